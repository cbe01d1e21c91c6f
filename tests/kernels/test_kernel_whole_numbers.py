"""Whole numbers given for real ones: what Triton compiles for a 1 holds for no other number."""

import pytest

from tests import kernel_interpreter  # noqa: F401

torch = pytest.importorskip("torch")

from kprof.kernels.cross_entropy.cross_entropy import cross_entropy  # noqa: E402
from kprof.kernels.cross_entropy.linear_cross_entropy import linear_cross_entropy  # noqa: E402
from kprof.kernels.norm import rmsnorm  # noqa: E402

X, WEIGHT, TARGETS = torch.ones(2, 16), torch.ones(16), torch.zeros(2, dtype=torch.long)
CALLS = {
    "norm._forward": lambda: rmsnorm(X, WEIGHT, 1),
    "cross_entropy.cross_entropy.operator_loss": lambda: cross_entropy(
        X, TARGETS, label_smoothing=0, z_loss=1
    ),
    "cross_entropy.linear_cross_entropy.operator_loss": lambda: linear_cross_entropy(
        X, torch.ones(5, 16), TARGETS, label_smoothing=0, z_loss=1
    ),
}


@pytest.mark.parametrize("operator", CALLS)
def test_a_whole_number_reaches_the_kernel_as_a_real_one(operator, monkeypatch):
    given = []
    take = lambda *arguments: given.extend(arguments) or (X, X)  # noqa: E731
    monkeypatch.setattr(f"kprof.kernels.{operator}", take)
    CALLS[operator]()
    found = [type(one) for one in given if not isinstance(one, torch.Tensor) and one == 1]
    assert set(found) == {float}
