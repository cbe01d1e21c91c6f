"""Work of finding where each piece of a ragged tensor begins, from the lengths of the pieces."""

from __future__ import annotations

import math
from functools import partial

from kprof.analyze.work import Inputs, Model, Work, at_least


def _running_sum(inputs: Inputs, num_more: int) -> Work | None:
    """Model a running sum of lengths with `num_more` results than lengths."""
    x = inputs.tensor(0)
    if x is None:
        return None
    written = math.ceil((x.numel + num_more) * x.element_bytes)
    return Work(x.numel, x.bytes + written, "fp32")


def _all_given(inputs: Inputs) -> Work | None:
    """Model an operator that at least reads all it is given."""
    given = inputs.tensors()
    return at_least(Work(None, sum(t.bytes for t in given))) if given else None


MODELS: dict[str, Model] = {
    **{
        f"{library}::asynchronous_{kind}_cumsum": partial(_running_sum, num_more=num_more)
        for library in ("fbgemm", "fb")
        for kind, num_more in (("complete", 1), ("inclusive", 0), ("exclusive", 0))
    },
    "fbgemm::offsets_range": _all_given,
    "fb::offsets_range": _all_given,
    "fb::lengths_range_w_truncation_size": _all_given,
}
