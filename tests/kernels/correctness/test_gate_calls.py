"""L0: a call changes nothing but its results, and depends on nothing but its arguments."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kprof.kernels.correctness import Case, isolation
from kprof.kernels.correctness.integrity import check_integrity, count_variant_rows, find_dishonesty
from kprof.kernels.correctness.observe import ModesKept
from tests.kernels.correctness.doubling import DOUBLED, new_is

SMALL = replace(DOUBLED, distributions=("normal",), layouts=("contiguous",), free=())


RIGHT = "right, and nothing else written"
OWNED = "results belong to the caller"
UNCHANGED = "nothing else changed"
FORM = "in the form of the replaced code's"
ORDER = "whatever was called before"
KEPT = "nothing kept"
# The results that a fault names, each with the number of its call.
CALLS = re.compile(r"the (\w[\w ]*?) of call (\d+)")
# Whether two threads meet in memory that is shared is up to the clock.
THREADS = "on two threads"


def faults_of(function, **changes):
    """Return the checks of the first level that a function does not pass, with the first fault."""
    level = check_integrity(replace(SMALL, new=function, **changes))
    return {measure.name: measure.where for measure in level.measures if not measure.is_met}


def missing(fault, *parts):
    """Return what a fault does not name; one check has several ways to fail."""
    return [part for part in parts if part not in fault]


def test_one_buffer_for_every_result_fails():
    buffer = torch.empty(8, 16)

    def into_one_buffer(x):
        return x * 2 if x.requires_grad else torch.mul(x, 2, out=buffer)

    faults = faults_of(into_one_buffer)
    assert faults.keys() - {THREADS} == {OWNED}
    assert CALLS.findall(faults[OWNED]) == [("output", "2"), ("output", "1")]


@pytest.mark.parametrize("size", [2, 40, 63])
def test_a_pool_of_buffers_fails(size):
    pool, calls = torch.empty(size, 8, 16), []

    def into_a_pool(x):
        calls.append(1)
        return x * 2 if x.requires_grad else torch.mul(x, 2, out=pool[len(calls) % size])

    faults = faults_of(into_a_pool)
    assert faults.keys() - {THREADS} == {OWNED}
    assert CALLS.findall(faults[OWNED]) == [("output", str(size + 1)), ("output", "1")]


def test_a_pool_of_as_many_buffers_as_results_are_kept_passes():
    pool, calls = torch.empty(64, 8, 16), []

    def into_a_pool(x):
        calls.append(1)
        return x * 2 if x.requires_grad else torch.mul(x, 2, out=pool[len(calls) % 64])

    assert faults_of(into_a_pool) == {}


def test_a_result_that_a_later_call_overwrites_in_part_fails():
    arena, calls = torch.zeros(20_000), []

    def into_an_arena(x):
        calls.append(1)
        start = 2 * len(calls)
        return x * 2 if x.requires_grad else arena[start : start + 128].view(8, 16).copy_(x * 2)

    faults = faults_of(into_an_arena)
    assert faults.keys() - {THREADS} == {OWNED}
    assert missing(faults[OWNED], "later call changes", "output of an") == []


def test_a_pool_is_found_where_few_results_of_a_large_call_fit_the_memory(monkeypatch):
    monkeypatch.setattr(isolation, "KEPT_BYTES", 20 * 8 * 16 * 4)
    pools, calls = {}, []

    def into_a_pool(x):
        calls.append(1)
        key = x.shape, len(calls) % 30
        out = pools.setdefault(key, torch.empty(x.shape))
        return x * 2 if x.requires_grad else torch.mul(x, 2, out=out)

    faults = faults_of(into_a_pool, free=(0,))
    assert faults.keys() - {THREADS} == {OWNED}
    assert CALLS.findall(faults[OWNED]) == [("output", "31"), ("output", "1")]


def test_two_gradients_of_one_call_may_be_one_tensor_and_two_of_two_calls_may_not():
    buffer = torch.empty(8, 16)

    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, arriving):
            found = buffer.copy_(arriving) if arriving.shape == buffer.shape else arriving
            return found, found

    def added(x, y):
        return x + y

    two = {"inputs": lambda shape, draw: (draw(*shape), draw(*shape)), "differentiable": (0, 1)}
    of_torch = {"replaced": added, "truth": added, **two}
    assert faults_of(added, **of_torch) == {}
    faults = faults_of(Added.apply, **of_torch)
    assert faults.keys() - {THREADS} == {OWNED, KEPT}
    assert CALLS.findall(faults[OWNED]) == [("gradient of y", "2"), ("gradient of y", "1")]


def test_two_outputs_in_one_place_fail_where_the_replaced_codes_have_two():
    def twice(x):
        return x * 2, x * 2

    def once(x):
        out = x * 2
        return out, out

    pair = {"replaced": twice, "truth": twice, "differentiable": ()}
    faults = faults_of(once, **pair)
    assert faults.keys() == {UNCHANGED}
    assert "two outputs" in faults[UNCHANGED]


def test_a_gradient_in_one_buffer_fails():
    buffer = torch.empty(8, 16)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, arriving):
            return torch.mul(arriving, 2, out=buffer)

    faults = faults_of(Doubled.apply)
    assert faults.keys() - {THREADS} == {OWNED, KEPT}
    assert CALLS.findall(faults[OWNED]) == [("gradient of x", "2"), ("gradient of x", "1")]
    assert "gradient of x" in faults[KEPT]


def same(x):
    return x.view_as(x)


def test_a_view_of_the_input_fails_where_the_replaced_code_returns_a_result_of_its_own():
    def new(x):
        return same(x)

    aliased = {"replaced": lambda x: x * 1, "truth": lambda x: x * 1}
    faults = faults_of(new, **aliased)
    assert faults.keys() == {UNCHANGED, FORM}
    assert missing(faults[UNCHANGED], "an output", "in the memory", " input x ") == []
    assert "requires a gradient" in faults[FORM]
    assert faults_of(new, **aliased | {"replaced": same}) == {}


def test_a_result_that_requires_a_gradient_where_the_replaced_codes_does_not_fails():
    faults = faults_of(lambda x: (x * 2).requires_grad_(not x.is_inference()))
    assert faults.keys() == {FORM}
    assert missing(faults[FORM], "output ", "requires a gradient") == []


def test_a_tuple_in_the_place_of_a_tensor_fails():
    faults = faults_of(lambda x: (x * 2,))
    assert faults.keys() == {FORM}
    assert "(a tensor)" in faults[FORM]


def test_a_transposed_result_fails_where_the_replaced_codes_is_contiguous():
    faults = faults_of(lambda x: (x * 2).mT.contiguous().mT)
    assert faults.keys() == {FORM}
    assert missing(faults[FORM], "output ", "not contiguous") == []


def test_a_transposed_result_passes_where_the_caller_makes_it_contiguous():
    def transposed(x):
        return (x * 2).mT.contiguous().mT

    level = check_integrity(replace(SMALL, new=transposed, has_free_strides=True))
    assert level.state == "passed"
    assert missing(level.notes[-1], "strides", "not compared") == []


def test_an_expanded_gradient_fails_as_an_optimizer_writes_to_it():
    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, arriving):
            return arriving.expand(8, 16)

    def dense(x):
        return (x * torch.ones_like(x)).sum()

    faults = faults_of(Summed.apply, replaced=dense, truth=dense, rows=())
    assert faults.keys() == {FORM}
    assert missing(faults[FORM], "gradient of x ", "several elements") == []


def test_a_result_without_elements_overlaps_nothing():
    def no_rows_expanded(x):
        return x * 2 if x.numel() else x.sum() * 2 + torch.zeros(()).expand(x.shape)

    empty = {"shapes": ((8, 16),), "free": (0,), "differentiable": ()}
    assert faults_of(no_rows_expanded, **empty) == {}


def test_halves_of_the_columns_of_one_matrix_do_not_overlap():
    packed = torch.zeros(4, 6)
    assert not isolation.overlap(packed[:, :3], packed[:, 3:])
    assert isolation.overlap(packed[:, :4], packed[:, 3:])


def test_memory_that_is_seen_as_another_type_or_from_elsewhere_overlaps_itself():
    packed, array = torch.zeros(4, 6), np.zeros(10, dtype=np.float32)
    assert isolation.overlap(packed[:, 3:], packed.view(torch.int16)[:, 6:8])
    assert isolation.overlap(torch.from_numpy(array[:6]), torch.from_numpy(array[4:]))
    assert not isolation.overlap(torch.from_numpy(array[:4]), torch.from_numpy(array[4:]))


def test_a_write_of_the_same_values_into_the_input_fails():
    def rewrites(x):
        x.detach().mul_(1)
        return x * 2

    faults = faults_of(rewrites)
    assert faults.keys() == {UNCHANGED}
    assert missing(faults[UNCHANGED], "version of", " input x ") == []


def test_a_draw_from_torchs_generator_fails_unless_the_replaced_code_draws_too():
    def draws(x):
        torch.rand(1)
        return x * 2

    faults = faults_of(draws)
    assert faults.keys() == {UNCHANGED}
    assert "random numbers" in faults[UNCHANGED]
    assert faults_of(draws, replaced=draws) == {}


def test_a_mode_of_torch_that_is_left_changed_fails_and_is_put_back():
    def leaves_it_off(x):
        out = x * 2
        torch.set_grad_enabled(False)
        return out

    assert "gradient mode" in faults_of(leaves_it_off)[RIGHT]
    assert torch.is_grad_enabled()


MODES = {
    "gradient mode": lambda: torch.set_grad_enabled(False),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "deterministic mode": lambda: torch.use_deterministic_algorithms(True),
    "precision of GEMMs in float32": lambda: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_of_torch_that_was_changed_is_named_and_put_back(mode):
    with ModesKept("cpu") as kept:
        MODES[mode]()
    with ModesKept("cpu") as unchanged:
        pass
    assert [mode in fault for fault in kept.faults] == [True]
    assert unchanged.faults == []
    assert (torch.is_grad_enabled(), torch.get_default_dtype()) == (True, torch.float32)
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_call_that_depends_on_a_call_of_another_shape_fails():
    shapes = []

    def sticks_to_the_latest_shape(x):
        is_other = bool(shapes) and shapes[-1] != x.shape
        shapes.append(x.shape)
        return x * 3 if is_other else x * 2

    faults = faults_of(sticks_to_the_latest_shape, shapes=((8, 16), (4, 16)))
    assert faults.keys() == {ORDER}
    assert "of other shapes" in faults[ORDER]


def test_a_backward_pass_that_takes_the_latest_input_fails():
    latest = []

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            latest[:] = [x.detach()]
            return x * x

        @staticmethod
        def backward(ctx, arriving):
            return 2 * latest[0] * arriving

    def squared(x):
        return x * x

    faults = faults_of(Squared.apply, replaced=squared, truth=squared)
    assert faults.keys() - {THREADS} == {ORDER}
    assert "two calls" in faults[ORDER]


def test_a_second_pass_back_through_a_retained_graph_gives_the_same():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = 2
            return x * 2

        @staticmethod
        def backward(ctx, arriving):
            ctx.factor, factor = 1, ctx.factor
            return arriving * factor

    faults = faults_of(Doubled.apply)
    assert faults.keys() == {ORDER}
    assert "retained graph" in faults[ORDER]


def test_scratch_memory_that_two_threads_share_fails(monkeypatch):
    # Other tests of this process may run Triton in its interpreter, one call at a time.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    scratch = torch.empty(8, 16)

    def over_scratch(x):
        return x * 2 if x.requires_grad else scratch.copy_(x) * 2

    faults = faults_of(over_scratch)
    assert faults.keys() == {THREADS}
    assert faults[THREADS].startswith("output ")


def test_what_is_written_in_place_is_a_result_of_each_thread(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    scratch = torch.empty(8, 16)

    def over_scratch(x):
        scratch.copy_(x)
        x.copy_(scratch * 2)

    def in_place(x):
        x.mul_(2)

    written = {"replaced": in_place, "truth": in_place, "differentiable": (), "writes": (0,)}
    faults = faults_of(over_scratch, **written)
    assert faults.keys() == {THREADS}
    assert faults[THREADS].startswith("x after ")


def test_results_without_a_gradient_are_left_out_where_one_argument_alone_asks_for_it():
    def doubled(x, y):
        return x * 2, y * 2

    two = {"inputs": lambda shape, draw: (draw(*shape), draw(*shape)), "differentiable": (0, 1)}
    pair = {"replaced": doubled, "truth": doubled, **two}
    assert faults_of(lambda x, y: (x + x, y + y), **pair) == {}

    def lost(x, y):
        return (x + x if y.requires_grad else (x + x).detach()), y + y

    assert "require grad" in faults_of(lost, **pair)[RIGHT]


def test_a_gradient_of_one_argument_alone_is_asked_for():
    def product(x, y):
        return x * y

    def needs_both(x, y):
        return x * y if x.requires_grad == y.requires_grad else (x * y).detach()

    two = new_is(
        needs_both,
        replaced=product,
        truth=product,
        inputs=lambda shape, draw: (draw(*shape), draw(*shape)),
        differentiable=(0, 1),
        distributions=("normal",),
        layouts=("contiguous",),
        free=(),
    )
    level = check_integrity(two)
    assert level.state == "failed"
    (where,) = [one.where for one in level.measures if one.name == RIGHT and not one.is_met]
    assert "require grad" in where


class Keeping(torch.autograd.Function):
    """A square that keeps its input, or its result, as an attribute."""

    @staticmethod
    def forward(ctx, x, keeps_result):
        ctx.x, ctx.result = x.clone() if keeps_result else x, None
        ctx.result = x * x
        ctx.keeps_result = keeps_result
        return ctx.result if keeps_result else ctx.result.clone()

    @staticmethod
    def backward(ctx, arriving):
        root = ctx.result.detach().sqrt() * ctx.x.sign() if ctx.keeps_result else ctx.x
        return 2 * root * arriving, None


@pytest.mark.parametrize(("keeps_result", "name"), [(False, "x"), (True, "output")])
def test_a_gradient_of_what_was_written_since_without_an_error_fails(keeps_result, name):
    square = {"replaced": torch.square, "truth": lambda x: x * x}
    faults = faults_of(lambda x: Keeping.apply(x, keeps_result), **square, is_deterministic=False)
    assert faults.keys() == {ORDER}
    assert missing(faults[ORDER], f"the {name} is written", "without an error") == []


def test_an_error_or_a_copy_where_the_input_was_written_since_passes():
    square = {"replaced": torch.square, "truth": lambda x: x * x}
    assert faults_of(lambda x: x * x, **square) == {}
    assert faults_of(lambda x: x * x.clone(), **square) == {}
    assert faults_of(lambda x: torch.square(x.clone()), **square) == {}


def test_an_input_that_is_kept_after_later_calls_fails():
    kept = []

    def keeping(x):
        kept.append(x.detach())
        return x * 2

    faults = faults_of(keeping)
    assert faults.keys() == {KEPT}
    assert missing(faults[KEPT], "input x ", " after 2 ") == []


def test_an_input_that_the_next_call_lets_go_passes():
    latest = []

    def keeping(x):
        latest[:] = [x.detach()]
        return x * 2

    assert faults_of(keeping) == {}


def test_a_gradient_of_leaves_alone_fails():
    faults = faults_of(lambda x: x * 2 if x.is_leaf else x.detach() * 2 + 0 * x)
    assert faults.keys() == {ORDER}
    assert "other operators" in faults[ORDER]


def test_a_copy_of_a_parameter_that_was_updated_since_fails():
    copies = {}

    def copied(x):
        if not isinstance(x, torch.nn.Parameter):
            return x * 2
        _, copy = copies.setdefault(id(x), (x, x.detach().clone()))
        return (x - x.detach() + copy) * 2

    faults = faults_of(copied)
    assert faults.keys() == {ORDER}
    assert missing(faults[ORDER], "for parameters", "second time") == []


def test_a_copy_by_the_version_of_a_parameter_passes():
    copies = {}

    def copied(x):
        if not isinstance(x, torch.nn.Parameter):
            return x * 2
        key = id(x), x._version
        _, copy = copies.setdefault(key, (x, x.detach().clone()))
        return (x - x.detach() + copy) * 2

    assert "for parameters" not in faults_of(copied).get(ORDER, "")


def test_a_truth_with_options_does_not_switch_a_check_off():
    kept = []

    def keeping(x):
        kept.append(x)
        return x * 2

    faults = faults_of(keeping, truth=lambda x, scale=2: x * scale)
    assert faults.keys() == {KEPT}


def test_a_shape_that_the_replaced_code_refuses_is_not_asked_of_the_new_code():
    shapes = set()

    def of_many_rows(x):
        if len(x) < 2:
            raise ValueError("one row alone")
        return x * 2

    def noted(x):
        shapes.add(tuple(x.shape))
        return of_many_rows(x)

    subject = replace(DOUBLED, new=noted, replaced=of_many_rows)
    case = Case((8, 16), "float32")
    assert list(isolation.find_side_effects(subject, noted, case)) == []
    assert (9, 16) in shapes
    assert all(rows > 1 for rows, _ in shapes)


def test_rows_are_compared_with_those_of_half_the_batch_and_of_one():
    def of_few_rows(x):
        return x * 2 if len(x) > 4 else x * 3

    plain = [Case((rows, 16), "float32") for rows in (8, 3, 2, 1)]
    others = [
        Case((8, 16), "float32", layout="padded"),
        Case((8, 16), "float32", distribution="nonfinite"),
    ]
    found = count_variant_rows(new_is(of_few_rows), [*plain, *others])
    # Of 8 rows 4 and 1 are given, of 3 and of 2 rows 1 and 1.
    assert (found.new, found.replaced, found.num_rows) == (5, 0, 5 + 2 + 2)
    assert count_variant_rows(replace(DOUBLED, rows=()), plain) is None


def test_values_are_changed_so_that_their_sum_stays():
    seen = []

    def noted(x):
        seen.append(x.double().clone())
        return x * 2

    subject = new_is(noted, differentiable=())
    case = Case((8, 16), "float32")
    assert list(find_dishonesty(subject, noted, case)) == []
    pairs = [
        (one, other)
        for one, other in itertools.pairwise(seen)
        if 0 < int((one != other).sum()) <= 2
    ]
    assert pairs
    assert all(float(one.sum()) == pytest.approx(float(other.sum())) for one, other in pairs)
