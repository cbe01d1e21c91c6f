"""Calls made again in C: who takes them, on what, and what is left to the long way."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import gc
import weakref

import pytest
import torch
import triton.backends.nvidia.driver as triton_driver
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from kprof.kernels import _launch, _operator, _repeated
from kprof.kernels._operator import DifferentiationError
from tests.repeated_calls import SIGNATURE, Case, Run, pretend


@pytest.fixture(autouse=True)
def cases(monkeypatch):
    with torch.no_grad():
        yield pretend(monkeypatch)


@pytest.fixture
def case(cases):
    """An operator of one launch."""
    cases.append(Case())
    return cases[-1]


def _x(*shape):
    return torch.randint(1, 9, shape or (4, 8)).float()


def test_a_call_like_one_before_is_made_in_c_with_its_own_tensors(case):
    who = [case.who(_x(), _x(), 2.0) for _ in range(5)]
    # Compiled; launched by what that left; kept, and noted; then all at once.
    assert who == ["Triton", "Triton's C", "driver", "driver", "driver"]
    assert case.told == ["driver"]


def test_every_call_has_results_of_its_own(case):
    case.learn(_x(), None, 2.0)
    x = _x()
    results = [case.call(x, None, 2.0)[0] for _ in range(3)]
    assert len({one.data_ptr() for one in results}) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        (_x(5, 8), _x(5, 8), 2.0),
        (_x(8, 4).t(), _x(), 2.0),
        (_x().double(), _x(), 2.0),
        (_x(33)[1:].view(4, 8), _x(), 2.0),
        (_x(), None, 2.0),
        (_x(), _x(), 3.0),
    ],
    ids=["shape", "strides", "dtype", "not aligned", "no bias", "factor"],
)
def test_a_call_of_another_kind_goes_the_long_way(case, arguments):
    case.learn(_x(), _x(), 2.0)
    case.who(*arguments)
    assert case.told[0] == "run"


def test_one_tensor_given_twice_is_not_taken_for_two(case):
    x = _x()
    for _ in range(5):
        case.who(x, x, 2.0)
    assert case.told[0] == "run"
    case.who(x, _x(), 2.0)


def test_two_tensors_are_not_taken_for_one_given_twice(case):
    x = _x()
    case.learn(x, _x(), 2.0)
    case.who(x, x, 2.0)
    assert case.told[0] == "run"


def test_a_parameter_is_known_apart_from_a_tensor(case):
    case.learn(_x(), _x(), 2.0)
    case.learn(torch.nn.Parameter(_x()), _x(), 2.0)
    case.who(_x(), _x(), 2.0)
    assert case.told == ["driver"]


class _Mode(TorchDispatchMode):
    seen = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += (func,)
        return func(*args, **(kwargs or {}))


class _Subclass(Tensor):
    pass


@pytest.mark.parametrize("is_known", [False, True])
def test_the_operator_is_seen_by_whom_it_has_to_be(case, is_known):
    x = _x()
    if is_known:
        case.learn(x, None, 2.0)
    with _Mode() as mode:
        case.call(x, None, 2.0)
    assert mode.seen[0] is case.operator
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert case.call(x, None, 2.0)[0].fake_mode
    graph = make_fx(lambda x: case.call(x, None, 2.0))(x).graph
    assert case.operator in [one.target for one in graph.nodes]
    with torch.profiler.profile() as profiled:
        case.call(x, None, 2.0)
    assert case.operator.name() in [one.name for one in profiled.events()]
    case.told.clear()
    with torch.device("cpu"):
        case.call(x, None, 2.0)
    assert case.told[0] == "run"
    with pytest.raises(RuntimeError, match="Batching rule not implemented for kprof"):
        torch.vmap(lambda x: case.call(x, None, 2.0)[0].sum())(_x(2, 4, 8))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_derivative_in_forward_mode_goes_the_long_way(case):
    case.learn(_x(), None, 2.0)
    with forward_ad.dual_level():
        case.told.clear()
        case.call(_x(), None, 2.0)
        assert case.told[0] == "run"
        with pytest.raises(DifferentiationError):
            case.call(forward_ad.make_dual(_x(), _x()), None, 2.0)
    case.told.clear()
    case.call(_x(), None, 2.0)
    assert case.told == ["driver"]


@pytest.mark.parametrize("is_known", [False, True])
def test_compiled_code_holds_the_operator(case, is_known):
    graphs = []

    def note(module, inputs):
        graphs.append([one.target for one in module.graph.nodes])
        return module

    if is_known:
        case.learn(_x(), None, 2.0)
    compiled = torch.compile(lambda x: case.call(x, None, 2.0)[0], backend=note, fullgraph=True)
    x = _x()
    assert torch.equal(compiled(x), 2 * x)
    assert case.operator in graphs[0]


def test_a_subclass_and_a_wanted_gradient_reach_the_dispatcher(case):
    case.learn(_x(), None, 2.0)
    case.told.clear()
    case.call(_x().as_subclass(_Subclass), None, 2.0)
    with torch.enable_grad():
        case.call(_x().requires_grad_(), None, 2.0)
    assert "driver" not in case.told[:1]
    assert case.told.count("run") == 2


def test_nobody_wants_a_gradient_where_no_tensor_does(case):
    with torch.enable_grad():
        case.learn(_x(), None, 2.0)


def test_hooks_of_triton_hear_of_every_launch(case):
    case.learn(_x(), None, 2.0)
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(print)
        assert case.who(_x(), None, 2.0) == "Triton"
        hook.remove(print)
        assert case.who(_x(), None, 2.0) == "driver"


def test_a_hook_in_the_place_of_the_chain_hears_of_it_too(case, monkeypatch):
    case.learn(_x(), None, 2.0)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", print)
    assert case.who(_x(), None, 2.0) == "Triton"


def test_where_the_driver_refuses_triton_launches_and_says_why(case):
    case.learn(_x(), None, 2.0)
    case.refuses = True
    assert case.who(_x(), None, 2.0) == "Triton's C"


def test_tensors_of_a_device_that_is_not_the_current_one_go_the_long_way(case, monkeypatch):
    case.learn(_x(), None, 2.0)
    case.device = 1
    assert case.who(_x(), None, 2.0) == "Triton's C"


@pytest.mark.parametrize(
    "name", ["_prepare", "_check", "_hooks", "_parameters"], ids=lambda name: name[1:]
)
def test_what_cannot_be_had_is_done_the_long_way(case, monkeypatch, name):
    monkeypatch.setattr(_repeated, name, lambda *arguments: None)
    for _ in range(5):
        case.who(_x(), None, 2.0)
    assert case.told[0] == "run"


def test_a_compiler_that_fails_is_no_error(monkeypatch):
    monkeypatch.setattr(_repeated, "SOURCE", "this is no C")
    monkeypatch.setenv("CC", "false")
    assert _repeated._prepare.__wrapped__() is None


@pytest.mark.parametrize(
    "options",
    [
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
        {"num_ctas": 2},
        {"signature": (*SIGNATURE[:3], "i64", "fp16", "constexpr")},
    ],
    ids=str,
)
def test_what_is_more_than_a_plain_launch_is_left_to_triton(cases, options):
    cases.append(Case(**options))
    assert [cases[-1].who(_x(), None, 2.0) for _ in range(4)][1:] == 3 * ["Triton's C"]


def test_a_number_that_does_not_fit_its_type_is_left_to_triton(cases):
    cases.append(Case(signature=(*SIGNATURE[:3], "i8", "fp32", "constexpr")))
    x = _x(32, 8)
    assert [cases[-1].who(x, None, 2.0) for _ in range(4)][1:] == 3 * ["Triton's C"]


def test_a_number_beyond_float32_is_infinite_as_it_is_to_triton(case):
    case.learn(_x(), None, 1e300)


def test_another_launcher_or_another_triton_launches_itself(case, monkeypatch):
    monkeypatch.setattr(triton_driver, "CudaLauncher", type(None))
    assert [case.who(_x(), None, 2.0) for _ in range(4)][1:] == 3 * ["Triton's C"]
    monkeypatch.setattr(triton_driver, "CudaLauncher", Run)
    monkeypatch.setattr(_repeated, "HAS_KNOWN_LAUNCHER", False)
    case.launcher.forget()
    assert [case.who(_x(), None, 2.0) for _ in range(4)][1:] == 3 * ["Triton's C"]


def test_an_operator_of_more_than_one_launch_runs_every_time(cases):
    cases.append(Case(is_one_launch=False))
    for _ in range(5):
        cases[-1].who(_x(), None, 2.0)
    assert cases[-1].told == ["run", "driver"]


def test_what_was_forgotten_is_compiled_anew(case):
    case.learn(_x(), None, 2.0)
    case.launcher.forget()
    assert case.who(_x(), None, 2.0) == "Triton"


def test_no_call_keeps_tensors(case):
    x = _x()
    case.learn(x, None, 2.0)
    kept = [weakref.ref(one) for one in (x, *case.call(x, None, 2.0))]
    del x
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_kinds_beyond_the_most_change_places_now_and_then(case, monkeypatch):
    monkeypatch.setattr(_operator, "MOST_RECENT", 2)
    monkeypatch.setattr(_operator, "PAUSE", 5)
    for rows in (1, 2, 3):
        for _ in range(4):
            case.who(_x(rows, 8), None, 2.0)
    assert case.told == ["run", "driver"]
    for _ in range(5):
        case.who(_x(3, 8), None, 2.0)
    assert case.told == ["driver"]
    assert len(_launch.recent_calls[-1]) == 2
