"""What binaries of kernels depend on, and how rows are shared out."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest
import torch

from kprof.kernels.runtime import Launcher, alignments, next_power_of_two
from kprof.kernels.norm import plan_backward
from kprof.kernels.runtime import rows_of, tile_of
from kprof.kernels.gated import swiglu


def test_all_that_is_aligned_needs_one_binary():
    x = torch.zeros(64)
    assert alignments((x, None), 32, 0) == 0


def test_which_tensor_or_stride_is_not_aligned_makes_another_binary():
    x = torch.zeros(64)
    odd = x[1:]
    assert len({alignments((x, odd), 16), alignments((odd, x), 16), alignments((x, x), 17)}) == 3


def test_a_binary_for_one_odd_argument_is_not_taken_for_another(monkeypatch):
    keys = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, key, *rest, **known: keys.append(key))
    x = torch.zeros(4, 40)
    swiglu(x[:, :32], x[:, 1:33])
    swiglu(x[:, 1:33], x[:, :32])
    assert len(set(keys)) == 2


def test_rows_evenly_apart_are_not_copied():
    x = torch.zeros(6, 48)
    rows, stride = rows_of(x[::2, :32])
    assert (rows.data_ptr(), stride) == (x.data_ptr(), 96)


def test_rows_that_are_all_the_same_one_are_not_copied():
    x = torch.zeros(1, 32)
    rows, stride = rows_of(x.expand(6, 32))
    assert (rows.data_ptr(), stride) == (x.data_ptr(), 0)


def test_short_rows_share_a_program_and_long_ones_have_all_its_warps():
    assert tile_of(128, 4_096) == (32, 128, 8)
    assert tile_of(16_000, 4_096) == (1, 16_384, 32)


def test_rows_loaded_ahead_fit_the_shared_memory():
    assert plan_backward(2_048, 4 * 2_048) == (2, 2_048, 8, 3, 2)
    assert plan_backward(4_096, 4 * 4_096) == (1, 4_096, 8, 3, 2)
    assert plan_backward(8_192, 4 * 8_192) == (1, 8_192, 16, 3, 1)
    assert plan_backward(16_384, 4 * 16_384) == (1, 16_384, 32, 3, 1)
    assert plan_backward(16_384, 6 * 16_384).stages == 2
    assert plan_backward(16_384, 12 * 16_384).stages == 1


@pytest.mark.parametrize("columns", [384, 512, 768, 1_024])
def test_a_warp_has_whole_rows_in_backward_and_enough_bytes_under_way(columns):
    for bytes_each in (4, 6, 10, 12):
        row_bytes = bytes_each * next_power_of_two(columns)
        plan = plan_backward(columns, row_bytes)
        assert plan.rows >= plan.warps
        assert plan.ctas_per_sm * plan.rows * row_bytes >= 32 * 1_024
        assert plan.stages == 3
