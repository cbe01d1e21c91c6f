"""The calls that the gate tries by itself beyond those given, and the scope that it names."""

import itertools
import json
import math
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kprof.kernels.correctness import Scope, check, variation
from kprof.kernels.correctness.levels import result_of_gate
from kprof.kernels.correctness.numerics import check_numerics
from kprof.kernels.correctness.scope import Size
from kprof.report.kernel_library import sections_of_gate
from kprof.report.partner.evidence import gate_in
from kprof.report.partner.sections import quality
from tests.kernels.correctness.doubling import DOUBLED, new_is
from tests.quantities import quantities_in

# The name of the check of sizes that grow.
BEYOND = "right beyond the calls given"
PLAIN = {"num_values": 1, "distributions": ("normal",), "layouts": ("contiguous",)}
# No clock ends it.
GROWING = replace(DOUBLED, **PLAIN, growth_s=math.inf)
QUICK = replace(GROWING, reach=(600, 300))


def level_of(function, **changes):
    return check_numerics(replace(QUICK, new=function, **changes))


def scope_of(function=DOUBLED.new, **changes):
    return level_of(function, **changes).scope


def sizes_of(scope):
    return {size.name: size.largest for size in scope.sizes}


# What is tried


@pytest.mark.slow
def test_free_dimensions_grow_beyond_every_size_given():
    scope = check_numerics(GROWING).scope
    assert sizes_of(scope) == {"rows": 65_536, "columns": 8_192}


def test_the_first_free_dimension_grows_as_rows_do_and_the_others_as_columns(monkeypatch):
    monkeypatch.setattr(variation, "ROWS", 100)
    monkeypatch.setattr(variation, "COLUMNS", 40)
    assert sizes_of(scope_of(reach=())) == {"rows": 100, "columns": 40}
    assert sizes_of(scope_of(reach=(), free=(1,)))["columns"] == 100
    assert sizes_of(scope_of(reach=(0, 50))) == {"rows": 100, "columns": 50}


def test_a_reach_lets_them_grow_further():
    assert sizes_of(scope_of(reach=(1_000, 2_000))) == {"rows": 1_000, "columns": 2_000}


def test_growth_goes_to_twice_the_largest_size_given_in_any_case():
    scope = scope_of(shapes=((8, 16), (4, 400)), reach=(10, 500))
    assert sizes_of(scope) == {"rows": 16, "columns": 800}


def test_the_time_of_a_first_call_which_compiles_does_not_end_growth():
    seen = set()

    def compiled_at_first(x):
        time.sleep(0.0 if x.shape in seen else 0.2)
        seen.add(x.shape)
        return x * 2

    only_rows = {"free": (0,), "contexts": ("gradient",), "growth_s": 1.0}
    assert sizes_of(scope_of(compiled_at_first, **only_rows))["rows"] == 600


def test_costs_that_do_not_grow_with_the_size_do_not_end_growth():
    def with_fixed_cost(x):
        time.sleep(0.1)
        return x * 2

    only_rows = {"free": (0,), "contexts": ("gradient",), "growth_s": 1.0}
    assert sizes_of(scope_of(with_fixed_cost, **only_rows))["rows"] == 600


@pytest.mark.parametrize("end", [600, 1_000, 5_000, 40_000])
def test_no_step_of_growth_is_longer_than_sixteen_times(end):
    rows = set()

    def noted(x):
        rows.add(x.shape[0])
        return x * 2

    scope_of(noted, free=(0,), shapes=((8, 3),), reach=(end,), contexts=("gradient",))
    grown = sorted(size for size in rows if size >= 8)
    assert grown[-1] == end
    assert all(larger <= 16 * smaller for smaller, larger in itertools.pairwise(grown))


def test_a_size_that_would_take_longer_than_its_time_is_not_tried():
    def slow(x):
        time.sleep(x.shape[0] / 1_000)
        return x * 2

    only_rows = {"free": (0,), "contexts": ("gradient",), "growth_s": 0.3}
    assert sizes_of(scope_of(slow, **only_rows))["rows"] == 65


def test_a_call_without_memory_for_it_is_left_out_of_the_scope_and_no_fault():
    def large(x):
        if x.shape[0] > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * 2

    level = level_of(large, free=(0,))
    assert (level.state, level.scope.sizes[0].largest) == ("passed", 65)
    (left_out,) = level.scope.left_out
    assert left_out.partition(":")[0] == "600 rows"
    assert "memory" in left_out


@pytest.mark.parametrize(("num_bytes", "rows"), [(600 * 64, 600), (600 * 64 - 1, 65)])
def test_growth_ends_where_the_arguments_take_more_bytes_than_allowed(monkeypatch, num_bytes, rows):
    monkeypatch.setattr(variation, "GROWTH_BYTES", {"cpu": num_bytes})
    scope = scope_of(free=(0,), contexts=("gradient",))
    assert sizes_of(scope)["rows"] == rows


def test_arguments_that_do_not_grow_with_a_dimension_count_no_bytes(monkeypatch):
    monkeypatch.setattr(variation, "GROWTH_BYTES", {"cpu": 600 * 64})

    def with_table(shape, draw):
        return draw(*shape), draw(1_000, 16)

    of_two = {
        "inputs": with_table,
        "replaced": lambda x, table: x * 2,
        "truth": lambda x, table: x * 2,
        "free": (0,),
        "contexts": ("gradient",),
    }
    assert sizes_of(scope_of(lambda x, table: x * 2, **of_two))["rows"] == 600


def test_other_dimensions_have_seventeen_at_most_while_rows_grow():
    shapes = []

    def noted(x):
        shapes.append(tuple(x.shape))
        return x * 2

    level_of(noted, shapes=((8, 40),), contexts=("gradient",))
    assert (600, 17) in shapes


def test_rows_grow_in_the_given_shape_with_the_fewest_values():
    shapes = set()

    def noted(x):
        shapes.add(tuple(x.shape))
        return x * 2

    level_of(noted, free=(0,), shapes=((4, 400), (8, 12)), contexts=("gradient",))
    assert {columns for rows, columns in (s for s in shapes if len(s) == 2) if rows > 99} == {12}


def test_code_that_refuses_more_rows_than_were_given_passes_with_what_it_takes():
    def refuses_more(x):
        if x.dim() == 2 and x.shape[0] > 9:
            raise ValueError("too many rows")
        return x * 2

    level = level_of(refuses_more, free=(0,), num_values=3_000, reach=(100,), differentiable=())
    assert (level.state, level.scope.sizes[0].largest) == ("passed", 8)
    assert quantities_in(level.notes[0])[-1] == "1,000,000"


def test_growth_ends_where_its_time_does():
    assert sizes_of(scope_of(growth_s=0.0)) == {"rows": 8, "columns": 16}


def test_sizes_that_are_not_free_are_those_that_were_tried():
    scope = scope_of(free=(0,), shapes=((8, 16), (4, 24)))
    assert scope.sizes[1] == Size("columns", None, (16, 24))


@pytest.mark.parametrize(("rows", "columns"), [(550, 10**9), (10**9, 250)])
def test_a_kernel_that_is_wrong_beyond_a_size_fails(rows, columns):
    def wrong_beyond(x):
        return x * 3 if x.shape[0] > rows or x.shape[-1] > columns else x * 2

    level = level_of(wrong_beyond)
    assert level.state == "failed"
    assert BEYOND in [m.name for m in level.measures if not m.is_met]


def test_a_kernel_that_refuses_beyond_a_size_is_right_up_to_it():
    refusal = ValueError("too many columns")

    def refuses_beyond(x):
        if x.shape[-1] > 150:
            raise refusal
        return x * 2

    level = level_of(refuses_beyond, reach=(600, 1_200))
    assert level.state == "passed"
    assert sizes_of(level.scope)["columns"] == 129
    (left_out,) = [one for one in level.scope.left_out if one.startswith("1,051 columns: ")]
    assert left_out.endswith(f"ValueError: {refusal}")


def test_declared_limits_are_left_out_and_not_called():
    def never_wide(x):
        assert x.shape[-1] <= 17
        return x * 2

    limit = "rows are short"

    def why_not(x):
        return limit if x.shape[-1] > 17 else None

    level = level_of(never_wide, refuses=why_not)
    assert level.state == "passed"
    assert level.scope.left_out == (f"129 columns: {limit}",)


def test_rows_in_another_number_of_dimensions_are_tried():
    assert scope_of().num_dimensions == (1, 2, 3, 4, 5)

    def wrong_in_three(x):
        return x * 3 if x.dim() == 3 else x * 2

    assert level_of(wrong_in_three).state == "failed"

    def refuses_three(x):
        if x.dim() == 3:
            raise ValueError("no")
        return x * 2

    assert scope_of(refuses_three).num_dimensions == (1, 2, 4, 5)


@pytest.mark.parametrize(
    ("is_on", "context"),
    [
        (torch.is_inference_mode_enabled, "inference_mode"),
        (lambda: not torch.is_grad_enabled(), "no_grad"),
        (lambda: torch.is_autocast_enabled("cpu"), "autocast"),
    ],
)
def test_a_kernel_that_is_wrong_in_a_mode_of_torch_fails_unless_it_is_not_for_it(is_on, context):
    def wrong_there(x):
        return x * 3 if is_on() else x * 2

    level = level_of(wrong_there)
    assert level.state == "failed"
    assert context in level.why
    without = replace(QUICK, new=wrong_there, contexts=("gradient",))
    assert check_numerics(without).scope.contexts == ("gradient",)


def test_another_dtype_under_autocast_is_left_out_of_the_scope():
    def product(x):
        return x @ torch.eye(x.shape[-1], dtype=x.dtype)

    def in_its_own_dtype(x):
        return product(x).to(x.dtype)

    products = {"replaced": product, "truth": lambda x: x * 1, "free": ()}
    scope = scope_of(in_its_own_dtype, **products)
    assert "autocast" not in scope.contexts
    (left_out,) = scope.left_out
    assert re.findall(r"autocast|torch\.\w+", left_out) == [
        "autocast",
        "torch.float32",
        "torch.bfloat16",
    ]


def test_a_kernel_without_gradients_of_gradients_is_left_out_of_that_alone():
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, arriving):
            return 2 * arriving * ctx.saved_tensors[0]

    def squared(x):
        return x * x

    level = level_of(Squared.apply, replaced=squared, truth=squared)
    assert level.state == "passed"
    assert level.scope.contexts == ("gradient", "no_grad", "inference_mode", "autocast")


def test_all_three_dtypes_are_tried_unless_the_subject_has_others():
    subject = replace(QUICK, dtypes=type(QUICK).__dataclass_fields__["dtypes"].default)
    assert check_numerics(subject).scope.dtypes == ("bfloat16", "float16", "float32")


def test_bits_beyond_the_calls_given_count():
    def other_bits_in_long_rows(x):
        return (x * 2).nextafter(torch.tensor(9e9)) if x.shape[-1] > 250 else x * 2

    assert level_of(DOUBLED.new).is_bit_exact
    level = level_of(other_bits_in_long_rows)
    assert (level.state, level.is_bit_exact) == ("passed", False)


# What is said

SCOPE = Scope(
    sizes=(Size("rows", 65_536), Size("columns", None, (128, 256))),
    num_dimensions=(2, 3),
    dtypes=("bfloat16", "float32"),
    layouts=("contiguous", "padded"),
    contexts=("gradient", "no_grad"),
)


def test_a_scope_in_words_has_sizes_dtypes_layouts_and_modes():
    parts = ("≤ 65,536", "{128, 256}", "2 and 3", "bf16", "fp32", *SCOPE.layouts, *SCOPE.contexts)
    assert [part for part in parts if part not in str(SCOPE)] == []


def test_a_call_outside_a_scope_has_a_reason():
    expected = {
        ((65_536, 256), "float32"): None,
        ((65_537, 256), "float32"): ["65,537 rows", "65,536"],
        ((1, 255), "float32"): ["255 columns", "128", "256"],
        ((1, 256), "float16"): ["float16", "bfloat16", "float32"],
        ((1, 2, 256), "float32"): ["3 sizes", "2"],
    }
    named = re.compile(r"[\d,]*\d(?: (?:rows|columns|sizes))?|b?float\d+")
    reasons = {call: SCOPE.why_outside(*call) for call in expected}
    assert {call: why and named.findall(why) for call, why in reasons.items()} == expected


def test_a_number_of_dimensions_and_a_mode_are_outside_where_they_were_not_tried():
    inside = SCOPE.why_outside((1, 256), "float32", num_dimensions=3, contexts=("no_grad",))
    assert inside is None
    four = SCOPE.why_outside((1, 256), "float32", num_dimensions=4)
    assert ("dimensions" in four, quantities_in(four)) == (True, ["4", "2", "3"])
    cast = SCOPE.why_outside((1, 256), "float32", contexts=("autocast",))
    assert [word for word in ("autocast", "gradient", "no_grad") if word not in cast] == []


def test_the_class_and_its_scope_stand_together_in_words_and_as_data():
    report = check(replace(QUICK, distributions=("normal", "small")), ("L0", "L1"))
    first = sections_of_gate(report)[0].parts[0].text
    assert first.startswith(f"PASSED, BIT-EXACT, for {report.scope}")
    saved = result_of_gate(report)["scope"]
    assert saved["sizes"][0] == {"name": "rows", "largest": 600, "known": ()}
    assert saved["dtypes"] == ("float32",)


def test_a_saved_report_has_its_scope_when_it_is_read_again():
    report = check(QUICK, ("L0", "L1"))
    saved = json.loads(json.dumps(result_of_gate(report)))
    read = gate_in(saved)
    assert (read.scope, read.reached) == (report.scope, "BIT-EXACT")
    (chapter,) = [quality.render(SimpleNamespace(gates=(read,)))]
    assert str(report.scope) in chapter.blocks[0].text


def test_a_report_without_the_second_level_has_no_scope():
    report = check(QUICK, ("L0",))
    assert report.scope is None
    assert result_of_gate(report)["scope"] is None


def test_the_same_function_is_right_in_every_context():
    assert scope_of(new_is(DOUBLED.replaced).new).contexts == (
        *("gradient", "no_grad", "inference_mode", "autocast"),
    )
