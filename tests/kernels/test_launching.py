"""Launches of binaries that are there: what reaches the C function, and when none is reused."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import types

import pytest
import torch

from kprof.kernels import runtime
from kprof.kernels import norm
from kprof.kernels import rope as rope_module, softmax as softmax_module
from kprof.kernels.runtime import Launcher, kind_of
from kprof.kernels.runtime import _is_dispatched
from kprof.kernels.norm import rmsnorm
from kprof.kernels.rope import rope, rope_
from kprof.kernels.softmax import softmax

# Between stream and arguments: function, two options, two scratch buffers, metadata, three hooks.
HEAD = 9


class _Kernel:
    """Stands for a kernel that compiles; notes grid and arguments of every call into C."""

    def __init__(self):
        self.compiled = 0
        self.launched = []
        self.devices = []

    def __getitem__(self, grid):
        return self._compile

    def _compile(self, *arguments, **options):
        self.compiled += 1
        scratch = {"global_scratch_size": 0, "profile_scratch_size": 0}
        options = {"launch_cooperative_grid": False, "launch_pdl": False}
        run = types.SimpleNamespace(launch=self._launch, **scratch, **options)
        return types.SimpleNamespace(run=run, packed_metadata=("packed",), function=7)

    def _launch(self, grid, y, z, stream, *rest):
        self.devices.append(stream)
        self.launched.append((grid, rest[HEAD:]))


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that all launchers here launch, on a pretended device."""
    active = types.SimpleNamespace(get_current_device=lambda: -1, get_current_stream=lambda d: d)
    monkeypatch.setattr(runtime, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(runtime, "HAS_KNOWN_LAUNCHER", True)
    noted = _Kernel()
    for module, name in (
        (norm, "_launch_forward"),
        (norm, "_launch_backward"),
        (norm, "_launch_sum"),
        (rope_module, "_launch"),
        (softmax_module, "_launch_forward"),
    ):
        monkeypatch.setattr(module, name, Launcher(noted))
    return noted


def _call(function, *arguments):
    with torch.no_grad():
        return function(*arguments)


def test_a_call_like_one_before_gets_its_own_tensors_and_the_same_numbers(kernel):
    weight = torch.ones(64)
    inputs = [torch.zeros(4, 64) for _ in range(4)]
    outputs = [_call(rmsnorm, x, weight) for x in inputs]
    (_, second), (_, third), (_, fourth) = kernel.launched
    assert kernel.compiled == 1
    assert [one[0] for one in (second, third, fourth)] == inputs[1:]
    assert all(one[4] is y for one, y in zip((second, third, fourth), outputs[1:], strict=True))
    assert second[8:] == third[8:] == fourth[8:]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(5, 64),
        torch.zeros(4, 128)[:, :64],
        torch.zeros(4, 64, dtype=torch.float16),
        torch.zeros(4 * 64 + 1)[1:].view(4, 64),
    ],
    ids=["more rows", "rows further apart", "another dtype", "not aligned"],
)
def test_a_call_of_another_kind_is_no_repetition(kernel, other):
    x, weight = torch.zeros(4, 64), torch.ones(64)
    for _ in range(3):
        _call(rmsnorm, x, weight)
    before = len(kernel.launched)
    for _ in range(3):
        _call(rmsnorm, other, weight.to(other.dtype))
    _, (first, *_, stride, _, num_rows, _) = _without_constants(kernel.launched[-1])
    assert (first.data_ptr(), stride, num_rows) == (other.data_ptr(), other.stride(0), len(other))
    assert len(kernel.launched) - before in (2, 3)


def _without_constants(launch):
    grid, arguments = launch
    return grid, arguments[:12]


def test_another_epsilon_is_no_repetition(kernel):
    x, weight = torch.zeros(4, 64), torch.ones(64)
    for eps in (1e-6, 1e-6, 1e-6, 1e-3, 1e-3):
        _call(rmsnorm, x, weight, eps)
    assert [arguments[11] for _, arguments in kernel.launched] == [1e-6, 1e-6, 1e-3, 1e-3]


def _gradient(x, weight, dy):
    return torch.autograd.grad(rmsnorm(x, weight), [x, weight], dy)


def _wanting(*shape):
    return torch.zeros(shape).requires_grad_()


def test_a_backward_pass_like_one_before_gets_its_own_tensors_and_the_same_numbers(kernel):
    weight = torch.ones(64).requires_grad_()
    inputs = [(_wanting(4, 64), torch.zeros(4, 64)) for _ in range(4)]
    gradients = [_gradient(x, weight, dy) for x, dy in inputs]
    # A forward pass, a backward pass and a sum each: the first of all compiles.
    *_, (_, backward), (_, sum_) = kernel.launched
    assert kernel.compiled == 3
    (x, dy), (dx, dweight) = inputs[3], gradients[3]
    assert [one.data_ptr() for one in backward[:1] + backward[2:4] + backward[6:7]] == [
        one.data_ptr() for one in (dy, x, weight, dx)
    ]
    assert sum_[0].data_ptr() == backward[7].data_ptr()
    assert sum_[1].data_ptr() == dweight.data_ptr()
    numbers = [arguments[8:] for _, arguments in kernel.launched[-2::-3]]
    assert numbers[0] == numbers[1] == numbers[2]


@pytest.mark.parametrize(
    "dy",
    [torch.zeros(64, 4).t(), torch.zeros(4 * 64 + 1)[1:].view(4, 64)],
    ids=["across", "not aligned"],
)
def test_a_gradient_of_another_kind_is_no_repetition(kernel, dy):
    x, weight = _wanting(4, 64), torch.ones(64).requires_grad_()
    for _ in range(3):
        _gradient(x, weight, torch.zeros(4, 64))
    calls = len(norm._launch_backward._calls)
    for _ in range(2):
        _gradient(x, weight, dy)
    backwards = [arguments for _, arguments in kernel.launched if len(arguments) == 19]
    assert backwards[-1][0].is_contiguous()
    assert torch.equal(backwards[-1][0], dy)
    assert len(norm._launch_backward._calls) == calls + dy.is_contiguous()


def test_rows_that_had_to_be_copied_are_copied_every_time(kernel):
    x = torch.zeros(64, 8).t()
    for _ in range(4):
        _call(softmax, x)
    assert all(one.is_contiguous() for _, (one, *_) in kernel.launched)


def test_turning_in_place_and_into_new_tensors_are_different_calls(kernel):
    q, angles = torch.zeros(1, 4, 2, 8).transpose(1, 2)[..., :4], torch.zeros(1, 4, 4)
    for _ in range(3):
        _call(rope, q, q, angles, angles)
    turned = kernel.launched[-1][1]
    for _ in range(3):
        _call(rope_, q, q, angles, angles)
    in_place = kernel.launched[-1][1]
    assert turned[4] is not q and in_place[4] is q
    assert turned[6:18] != in_place[6:18]


def test_the_stream_is_that_of_the_tensors_device(kernel):
    for _ in range(2):
        _call(softmax, torch.zeros(4, 64))
    assert kernel.devices == [-1]


def test_calls_are_not_kept_for_ever(kernel, monkeypatch):
    monkeypatch.setattr(runtime, "MOST_CALLS", 3)
    for rows in range(1, 9):
        for _ in range(2):
            _call(softmax, torch.zeros(rows, 64))
    assert len(softmax_module._launch_forward._calls) <= 3


def test_triton_itself_launches_while_a_profiler_of_it_listens(kernel, monkeypatch):
    for _ in range(3):
        _call(softmax, torch.zeros(4, 64))
    monkeypatch.setattr(runtime, "_is_watched", lambda: True)
    before = kernel.compiled, len(kernel.launched)
    _call(softmax, torch.zeros(4, 64))
    assert (kernel.compiled, len(kernel.launched)) == (before[0] + 1, before[1])


def test_kinds_differ_by_what_is_missing_and_by_what_is_not_aligned():
    x, odd = torch.zeros(64), torch.zeros(65)[1:]
    kinds = [kind_of(x, None), kind_of(x, x), kind_of(odd, x), kind_of(x, odd), kind_of(x[::2], x)]
    assert len(set(kinds)) == 5
    assert kind_of(x, x) == kind_of(torch.ones(64), x)


def _within_vmap():
    seen = []
    torch.vmap(lambda x: seen.append(_is_dispatched((x,))) or x)(torch.zeros(2, 2))
    return seen[0]


def _within_trace():
    seen = []
    torch.jit.trace(lambda x: (seen.append(_is_dispatched((x,))), x + 1)[1], torch.zeros(2))
    return seen[0]


def test_the_dispatcher_is_left_out_only_where_it_would_do_nothing():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Subclass(torch.Tensor):
        pass

    x = torch.zeros(2)
    with torch.no_grad():
        assert not _is_dispatched((x, None, torch.nn.Parameter(x)))
        assert _is_dispatched((x, x.as_subclass(Subclass)))
        assert _is_dispatched((x.to("meta"),))
        assert _is_dispatched((torch._neg_view(x),))
        assert _within_vmap()
        with TorchDispatchMode():
            assert _is_dispatched((x,))
        with torch.device("cpu"):
            assert _is_dispatched((x,))
        with torch.profiler.profile():
            assert _is_dispatched((x,))
        assert not _is_dispatched((x.clone().requires_grad_(),))
    assert not _is_dispatched((x,))
    assert _is_dispatched((x.requires_grad_(),))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_trace_sees_the_operator():
    with torch.no_grad():
        assert _within_trace()


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4)])
def test_an_empty_tensor_is_laid_out_as_torchs(shape):
    found = runtime.empty(shape, torch.float32, torch.device("cpu"))
    expected = torch.empty(shape)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())


def test_a_norm_with_misaligned_statistics_is_no_repetition(kernel):
    x, weight = torch.zeros(4, 64), torch.ones(64)
    rstd, other = torch.ones(4), torch.ones(5)[1:]
    for one in (rstd, rstd, other, other):
        norm._run_backward(x, None, x, weight, one, None, norm.FORMS["torch"], 1)
    assert len(norm._launch_backward._calls) == 2
