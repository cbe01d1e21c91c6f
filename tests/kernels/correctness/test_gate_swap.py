"""A swap lets a kernel take the calls that the gate tried, and no others."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tests.kernel_interpreter  # noqa: F401 - first, before anything imports Triton.
from kprof.kernels import all_kernels
from kprof.kernels.bench.choice import choose, counted, find_choice, keep, why_beyond
from kprof.kernels.bench.measure import Timed, subject_of
from kprof.kernels.correctness import Scope
from kprof.kernels.correctness.scope import Size
from kprof.kernels.norm import RMSNORM
from kprof.kernels.swap.providers import Providers
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import Norm
from tests.quantities import quantities_in

SCOPE = Scope(
    sizes=(Size("rows", 100), Size("columns", 64)),
    num_dimensions=(2, 3),
    dtypes=("float32",),
    layouts=("contiguous",),
    contexts=("gradient",),
)


def call_of(*shape, dtype=torch.float32):
    device = torch.device("cuda", 0)
    return SimpleNamespace(device=device, dtype=dtype, shape=shape, dim=lambda: len(shape))


def test_a_call_with_more_rows_than_the_gate_tries_goes_to_the_original_with_the_reason():
    model = nn.Sequential(Norm(1))
    rows = RMSNORM.reach[0] + 1
    with swapped(model, "rmsnorm") as swap:
        model(torch.ones(2, 1))
        model(torch.ones(rows, 1))
    inside, outside = swap.sites[0].calls
    assert inside.provider == "kprof"
    assert (outside.provider, "rows" in outside.why) == (None, True)
    assert quantities_in(outside.why) == ["1,048,577", "1,048,576"]


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((100, 64), None),
        ((2, 50, 64), None),
        ((101, 64), ["101 rows", "100"]),
        ((2, 51, 64), ["102 rows", "100"]),
        ((10, 65), ["65 columns", "64"]),
        ((1, 2, 5, 64), ["4 dimensions", "2", "3"]),
    ],
)
def test_what_was_tried_on_this_machine_bounds_the_calls(shape, why):
    found = why_beyond(RMSNORM, call_of(*shape), shape, SCOPE)
    assert (found and re.findall(r"\d+(?: (?:rows|columns|dimensions))?", found)) == why


def test_a_measured_provider_is_chosen_inside_its_scope_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "GPU")
    timed = Timed("rmsnorm", "aten", (128, 64), "float32", "forward", gpu_ns=9.0)
    keep(replace(choose(RMSNORM, [timed], "GPU", "2026-01-01"), scope=SCOPE))
    assert find_choice(RMSNORM, "GPU", "float32", (128, 64)).scope == SCOPE
    providers = Providers({"rmsnorm": RMSNORM}, {})
    with torch.no_grad():
        for shape, name in (((100, 64), "aten"), ((101, 64), None)):
            found = providers.choose(RMSNORM, call_of(*shape), shape, is_default=True)
            assert found[1] == name


def test_the_gate_grows_to_what_a_swap_lets_a_kernel_take():
    assert subject_of(RMSNORM).reach == RMSNORM.reach == (1_048_576,)
    # Its calls are whole lists of parameters.
    assert [name for name, kernel in all_kernels().items() if not kernel.reach] == [
        *("adamw", "cast_weights")
    ]


def test_rows_in_several_dimensions_are_counted_in_one_number():
    assert counted(RMSNORM, (2, 3, 4)) == (6, 4)
    attention = all_kernels()["attention_forward"]
    assert counted(attention, (2, 8, 8, 128, 128, 64)) == (2, 8, 8, 128, 128, 64)
