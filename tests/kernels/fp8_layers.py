"""A linear layer's operands for tests in FP8, and no weights kept from one test to the next."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest

from kprof.kernels.fp8 import _weights
from tests.kernels.kernel_checks import rows


def given(num_rows=4, num_columns=32, depth=64):
    x = rows(num_rows, depth, seed=1).half()
    weight = (rows(num_columns, depth, seed=2) / depth**0.5).half()
    return x, weight, rows(num_columns, seed=3).half()


@pytest.fixture(autouse=True)
def nothing_kept():
    _weights.quantized._kept.clear()
