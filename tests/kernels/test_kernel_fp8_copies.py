"""Activations with copies: the same bits as casting them, and when a copy counts."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import copy
import gc

import pytest
import torch
from torch import nn

from kprof.kernels.fp8 import _copies
from kprof.kernels.fp8._copies import WITH_COPY
from kprof.kernels.fp8._copies import CopyMaker, find_activation
from kprof.kernels.norm import add_layernorm
from kprof.kernels.norm import add_rmsnorm
from kprof.kernels.gated import geglu
from kprof.kernels.norm import layernorm
from kprof.kernels.fp8.quantize_fp8 import quantize_fp8
from kprof.kernels.norm import rmsnorm
from kprof.kernels.gated import swiglu
from tests.kernels.kernel_checks import (
    INTERPRETED,
    compiled,
    rows,
)
from tests.kernels.kernel_hopper import on_hopper

pytestmark = INTERPRETED


def drawn(*shape, seed=0):
    return rows(*shape, seed=seed).half()


def cases(columns, *before):
    x, other = drawn(*before, columns), drawn(*before, columns, seed=1)
    weight, bias = drawn(columns, seed=2), drawn(columns, seed=3)
    return {
        "rmsnorm": (rmsnorm, x, weight, 1e-6),
        "rmsnorm of torch": (rmsnorm, x, weight, 1e-5, "torch"),
        "rmsnorm of Gemma": (rmsnorm, x, weight, 1e-6, "gemma"),
        "rmsnorm without a weight": (rmsnorm, x, None, 1e-6),
        "add_rmsnorm": (add_rmsnorm, x, other, weight, 1e-6),
        "layernorm": (layernorm, x, weight, bias, 1e-5),
        "add_layernorm": (add_layernorm, x, other, weight, bias, 1e-5),
        "swiglu": (swiglu, x, other),
        "swiglu of one tensor": (swiglu, torch.cat((x, other), -1)),
        "rows that lie apart": (swiglu, *torch.cat((x, other), -1).chunk(2, -1)),
    }


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 127), (5, 384), (3, 4_097)], ids=str)
@pytest.mark.parametrize("name", cases(1, 1))
def test_result_and_copy_have_the_bits_of_the_kernel_and_of_the_cast(name, shape):
    function, *arguments = cases(shape[-1], *shape[:-1])[name]
    expected = as_tuple(function(*arguments))
    results, copy = WITH_COPY[function](*arguments)
    assert all(torch.equal(a, b) for a, b in zip(as_tuple(results), expected, strict=True))
    values, scales = quantize_fp8(expected[0].reshape(-1, shape[-1]))
    assert torch.equal(copy.values.float(), values.float())
    assert torch.equal(copy.scales, scales)
    assert (copy.values.stride(), copy.scales.stride()) == (values.stride(), scales.stride())


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
def test_zeros_and_rows_that_are_no_numbers_are_cast_as_elsewhere():
    x = drawn(4, 64)
    x[1], x[2, 5], x[3, 7] = 0, torch.nan, torch.inf
    y, copy = WITH_COPY[swiglu](x, torch.ones_like(x))
    values, scales = quantize_fp8(y)
    assert torch.equal(copy.values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(copy.scales.nan_to_num(-1.0), scales.nan_to_num(-1.0))


def test_no_rows_have_an_empty_copy():
    _, copy = WITH_COPY[rmsnorm](drawn(0, 64), drawn(64), 1e-6)
    assert (copy.values.shape, copy.scales.shape) == ((0, 64), (0, 1))


@pytest.mark.parametrize("name", ["add_rmsnorm", "swiglu"])
def test_it_compiles_without_a_graph_break_to_the_same_bits(name):
    function, x, *others = cases(64, 3)[name]
    results, copy = compiled(lambda x: WITH_COPY[function](x, *others))(x)
    expected, cast = WITH_COPY[function](x, *others)
    pairs = zip((*as_tuple(results), *copy), (*as_tuple(expected), *cast), strict=True)
    assert all(torch.equal(a.float(), b.float()) for a, b in pairs)


def made(maker, x=None, weight=None):
    """Return what a maker's rmsnorm makes; without gradients."""
    with torch.no_grad():
        x = drawn(3, 64) if x is None else x
        return maker.wrap(rmsnorm)(x, drawn(64, seed=2) if weight is None else weight, 1e-6)


def copy_of(y):
    """Return the copy that a layer without gradients finds; None: it finds none."""
    with torch.no_grad():
        known = find_activation(id(y))
        return known.copy_of(y) if known is not None and known.tensor() is y else None


@pytest.fixture
def maker():
    """Return one whose last result was wanted in FP8."""
    found = CopyMaker()
    found.is_wanted = True
    return found


def test_a_copy_is_made_once_the_last_result_was_wanted_and_until_none_is():
    maker = CopyMaker()
    found = []
    for is_read in (True, True, False, True, True):
        y = made(maker)
        found.append(find_activation(id(y)).copy is not None)
        if is_read:
            copy_of(y)
    assert found == [False, True, True, False, True]


def test_all_layers_that_read_an_activation_find_the_same_copy(maker):
    y = made(maker)
    values, scales = quantize_fp8(y)
    for _ in range(3):
        copy = copy_of(y)
        assert torch.equal(copy.values.float(), values.float())
        assert torch.equal(copy.scales, scales)


CHANGES = {
    "added to": lambda y: y.add_(1),
    "a part written": lambda y: y[1:].zero_(),
    "by a detached one": lambda y: y.detach().mul_(2),
    "other data": lambda y: setattr(y, "data", torch.zeros_like(y)),
    "turned round": lambda y: y.t_(),
    "another shape": lambda y: y.resize_(2, 96),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_changes_an_activation_in_place_makes_its_copy_void(name, maker):
    y = made(maker)
    assert copy_of(y) is not None
    with torch.no_grad():
        CHANGES[name](y)
    assert copy_of(y) is None


@pytest.mark.parametrize(
    "change", [torch.clone, torch.Tensor.detach, copy.deepcopy], ids=["clone", "detach", "deepcopy"]
)
def test_another_tensor_has_no_copy_however_equal(change, maker):
    y = made(maker)
    assert copy_of(change(y)) is None


PLACES = {"another stream": (8, 0), "another capture": (7, 2), "no capture": (7, 0)}


@pytest.mark.parametrize("where", [*PLACES.values(), None], ids=[*PLACES, "unknown"])
def test_a_copy_counts_on_its_stream_and_in_its_capture_alone(where, maker, monkeypatch):
    monkeypatch.setattr(_copies, "_stream_of", lambda x: (7, 1))
    y = made(maker)
    assert copy_of(y) is not None
    monkeypatch.setattr(_copies, "_stream_of", lambda x: where)
    assert copy_of(y) is None


def test_what_was_made_outside_is_not_read_in_a_capture(maker, monkeypatch):
    y = made(maker)
    monkeypatch.setattr(_copies, "_stream_of", lambda x: (0, 3))
    assert copy_of(y) is None


def test_no_copy_is_made_where_the_capture_is_unknown(maker, monkeypatch):
    monkeypatch.setattr(_copies, "_stream_of", lambda x: None)
    assert find_activation(id(made(maker))).copy is None


class OnGpu:
    is_cuda = True

    def get_device(self):
        return 0


@pytest.mark.parametrize(
    ("is_capturing", "told", "place"),
    [(False, None, (5, 0)), (True, 9, (5, 9)), (True, None, None)],
)
def test_the_driver_is_asked_for_the_capture(is_capturing, told, place, monkeypatch):
    on_device = {"_cuda_getDevice": lambda: 0, "_cuda_getCurrentRawStream": lambda device: 5}
    for name, found in on_device.items():
        monkeypatch.setattr(torch._C, name, found, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(_copies, "_capture_on", lambda stream: told)
    assert _copies._stream_of(OnGpu()) == place
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert _copies._stream_of(OnGpu()) is None


@pytest.mark.parametrize(
    ("failed", "status", "found"), [(0, 1, 42), (0, 0, None), (0, 2, None), (1, 1, None)]
)
def test_a_capture_is_known_by_the_drivers_number_while_it_goes_on(
    failed, status, found, monkeypatch
):
    def tell(stream, into_status, into_number, *others):
        into_status._obj.value, into_number._obj.value = status, 42
        return failed

    monkeypatch.setattr(_copies, "_capture_info", lambda: tell)
    assert _copies._capture_on(5) == found
    monkeypatch.setattr(_copies, "_capture_info", lambda: None)
    assert _copies._capture_on(5) is None


def test_with_gradients_nothing_is_made_or_read(maker):
    y = maker.wrap(rmsnorm)(drawn(3, 64), drawn(64), 1e-6)
    assert find_activation(id(y)) is None
    y = made(maker)
    assert find_activation(id(y)).copy_of(y) is None


def test_in_inference_mode_which_counts_no_versions_nothing_is_remembered(maker):
    with torch.inference_mode():
        y = maker.wrap(rmsnorm)(drawn(3, 64), drawn(64), 1e-6)
        assert find_activation(id(y)) is None


def test_weights_of_another_dtype_make_no_copy(maker):
    y = made(maker, weight=torch.ones(64))
    assert y.dtype == torch.float32
    assert find_activation(id(y)).copy is None


def test_in_float32_where_last_bits_would_differ_there_is_no_copy(maker):
    y = made(maker, torch.ones(3, 64), torch.ones(64))
    assert find_activation(id(y)).copy is None


def test_a_copy_ends_with_its_activation(maker):
    gc.collect()
    before = len(_copies._activations)
    y = made(maker)
    key = id(y)
    assert len(_copies._activations) == before + 1
    del y
    assert find_activation(key) is None


def test_what_has_no_copy_is_left_as_it_is():
    assert CopyMaker().wrap(geglu) is geglu
    assert CopyMaker().wrap(nn.functional.silu) is nn.functional.silu


@pytest.mark.slow
def test_ahead_of_time_nothing_spills_on_the_sizes_of_llamas():
    assert on_hopper(AHEAD) == "[]\n"


AHEAD = """
import torch
from kprof.kernels.bench.ahead import compile_ahead
from kprof.kernels.fp8._copies import _run_norm, _run_swiglu
from kprof.kernels.norm import FORMS

def x(columns):
    return torch.empty(64, columns, dtype=torch.bfloat16)

def calls():
    for n in (2_048, 4_096, 8_192):
        for form in ("llama", "layer"):
            weight = torch.empty(n, dtype=torch.bfloat16)
            bias = weight if form == "layer" else None
            yield n, lambda: _run_norm(x(n), None, weight, bias, 1e-6, FORMS[form])
            yield n, lambda: _run_norm(x(n), x(n), weight, bias, 1e-6, FORMS[form])
    for n in (8_192, 14_336, 28_672):
        yield n, lambda: _run_swiglu(x(n), x(n))

found = [(n, one.name, one.spilled_bytes) for n, call in calls() for one in compile_ahead(call)]
assert len(found) == 15, found
print([one for one in found if one[-1]])
"""
