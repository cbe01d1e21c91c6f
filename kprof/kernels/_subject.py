"""A provider of a kernel as the quality gate wants it."""

from __future__ import annotations

from kprof.gate import Subject
from kprof.kernels import OURS, Kernel


def subject_of(kernel: Kernel, provider: str = OURS, device: str = "cpu") -> Subject:
    """Return what the gate has to look at to let this provider take the reference's place."""
    by = kernel.provider(provider)
    return Subject(
        name=f"{kernel.name} by {provider}",
        replaced=kernel.reference,
        new=by.load(),
        truth=kernel.truth,
        inputs=kernel.inputs,
        shapes=kernel.edges,
        free=kernel.free,
        reach=kernel.reach,
        refuses=kernel.refuses if provider.startswith(OURS) else None,
        dtypes=kernel.dtypes,
        device=device,
        differentiable=kernel.differentiable,
        writes=kernel.writes,
        rows=kernel.rows,
        constant=kernel.constant,
        precision="same" if kernel.stated_error is None else "lower",
        stated_error=kernel.stated_error,
        is_deterministic=by.repeats,
        is_batch_invariant=bool(kernel.rows) and not by.is_varying,
        has_free_strides=kernel.has_free_strides,
    )
