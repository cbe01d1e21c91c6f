"""The quality gate on functions: the faults and cheats that it catches, and its first level."""

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from kprof.kernels.correctness import Timing
from kprof.kernels.correctness.integrity import (
    check_integrity,
    find_patched_timers,
    find_wrong_outputs,
)
from kprof.kernels.correctness.numerics import check_numerics
from kprof.kernels.correctness.observe import draw
from kprof.kernels.correctness.subject import Case
from tests.gate_faults import (
    CHEATS,
    FAULTS,
    HONEST,
    ON_A_GPU,
    SAME,
    SUBJECTS,
    restored,
    standard_kept,
)
from tests.kernels.correctness.doubling import DOUBLED, new_is
from tests.quantities import quantities_in
from tests.samples import GATE, skip_if_left_out, tell_if_all_run

# Values pooled of one dtype: fewer than usual, to be done sooner.
FEW_VALUES = 50_000
# How a result that is not the right one is told.
WRONG = "output is wrong by"


def name_of(variant):
    """Return what a variant is called in the committed result."""
    return f"{variant.operation}: {variant.name}"


NAMES = [name_of(variant) for variant in (*FAULTS, *CHEATS, *SAME, *HONEST)]


@pytest.fixture(autouse=True, scope="module")
def one_standard_for_all():
    """Compute once what all that may replace an operation is held against: a third of the time."""
    with standard_kept():
        yield


def levels_of(subject):
    """Yield what L0 and then L1, with fewer values than usual, say of one dtype after another."""
    for dtype in subject.dtypes:
        of_it = replace(subject, dtypes=(dtype,), num_values=FEW_VALUES)
        yield check_integrity(of_it)
        yield check_numerics(of_it)


def is_caught(subject):
    """Tell whether any level fails; what one dtype shows is not looked for in the next."""
    with restored():
        return any(level.state == "failed" for level in levels_of(subject))


def test_a_result_speaks_for_what_a_sample_leaves_out():
    tell_if_all_run(GATE, NAMES)


@pytest.fixture
def uninterpreted(monkeypatch):
    """Let calls be tried on two threads, though other tests here run Triton in its interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("uninterpreted")
@pytest.mark.parametrize("fault", FAULTS, ids=name_of)
def test_a_seeded_fault_is_caught(fault):
    skip_if_left_out(GATE, NAMES, name_of(fault))
    assert is_caught(fault.subject)


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda v: v.name)
def test_a_cheat_on_the_clock_is_caught(cheat):
    skip_if_left_out(GATE, NAMES, name_of(cheat))
    assert is_caught(cheat.subject)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fault", ON_A_GPU, ids=lambda v: v.name)
def test_a_fault_with_streams_or_graphs_is_caught(fault):
    assert is_caught(fault.subject)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "same", [v for v in SAME if v.operation != "attention"], ids=lambda v: v.operation
)
def test_the_same_code_passes_on_a_gpu(same):
    # torch's own linear breaks the GPU on rows that 32 bits do not reach.
    layouts = tuple(one for one in same.subject.layouts if one != "far")
    assert not is_caught(replace(same.subject, device="cuda", layouts=layouts))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_code_that_breaks_a_gpu_on_far_rows_is_named_in_a_process_of_its_own():
    script = """
from dataclasses import replace
from kprof.kernels.correctness import check
from tests.gate_faults import SAME
linear = next(v for v in SAME if v.operation == "linear").subject
report = check(replace(linear, device="cuda", layouts=("contiguous", "far")), ("L1", "L2"))
print(report["L1"].state, report.is_gpu_broken)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() in ("not run True", "passed False")


def in_turn(variants):
    """Pair each variant with one dtype: of an operation, the next variant has the next dtype.

    `benchmarks/gate_mutations.py` judges each in all dtypes, on many seeds.
    """
    numbers = Counter()
    for one in variants:
        dtypes = SUBJECTS[one.operation].dtypes
        dtype = dtypes[numbers[one.operation] % len(dtypes)]
        numbers[one.operation] += 1
        yield pytest.param(one, dtype, id=name_of(one))


@pytest.mark.slow
@pytest.mark.usefixtures("uninterpreted")
@pytest.mark.parametrize(("honest", "dtype"), list(in_turn(SAME + HONEST)))
def test_an_honest_implementation_passes(honest, dtype):
    skip_if_left_out(GATE, NAMES, name_of(honest))
    assert not is_caught(replace(honest.subject, dtypes=(dtype,)))


# L0


def why_of(subject):
    level = check_integrity(subject)
    return [measure.where for measure in level.measures if not measure.is_met]


def test_a_function_that_only_rounds_otherwise_is_whole():
    level = check_integrity(DOUBLED)
    assert level.state == "passed"
    # Nor has it a fault that is excused because the replaced code shows it, too.
    noted = {note.partition(":")[0] for note in level.notes}
    assert not noted & {measure.name for measure in level.measures}


def test_a_function_that_raises_where_the_replaced_one_does_not_fails():
    def refuses(x):
        raise ValueError("no")

    assert "raises ValueError: no" in why_of(new_is(refuses))[0]


def test_cases_that_the_replaced_code_refuses_are_not_asked_of_the_new_one():
    def refuses_empty(x):
        if x.numel() == 0:
            raise ValueError("empty")
        return x * 2

    assert check_integrity(new_is(refuses_empty, replaced=refuses_empty)).state == "passed"


def none_for_nothing(x):
    return x * 2 if x.numel() else None


def test_a_call_of_which_the_replaced_code_computes_nothing_is_not_asked_of_the_new_one():
    level = check_integrity(new_is(DOUBLED.new, replaced=none_for_nothing))
    assert (level.state, level.looked_at) == ("passed", "14 cases")
    assert check_integrity(DOUBLED).looked_at == "15 cases"


def test_code_that_computes_nothing_where_the_replaced_one_does_fails():
    level = check_integrity(new_is(none_for_nothing))
    assert (level.state, "gives no output" in level.why) == ("failed", True)


def test_code_that_is_wrong_only_where_no_gradient_is_asked_for_fails():
    def for_training_alone(x):
        return x * 2 if x.requires_grad else x * 3

    assert WRONG in why_of(new_is(for_training_alone))[0]


def test_another_shape_or_dtype_fails():
    assert "is (8, 16) torch.float64" in why_of(new_is(lambda x: (x * 2).double()))[0]


def test_what_the_replaced_code_does_as_well_is_noted_and_not_held_against_the_new_one():
    def writes_input(x):
        out = x * 2
        x.detach().add_(1)
        return out

    level = check_integrity(new_is(writes_input, replaced=writes_input, differentiable=()))
    assert level.state == "passed"
    assert any(" input x" in note for note in level.notes if "replaced code" in note)


def test_a_fault_of_the_replaced_code_excuses_no_other_one():
    def writes_input(x):
        out = x * 2
        x.detach().add_(1)
        return out

    def wrong(x):
        return x * 3 if x.mean() > 5 else x * 2

    level = check_integrity(new_is(wrong, replaced=writes_input, differentiable=()))
    assert level.state == "failed"
    assert WRONG in level.why


def doubled_in_a_mess(x):
    y = x * 2
    x += 1
    return y


def test_where_the_replaced_code_spoils_its_input_the_new_one_is_held_against_the_truth():
    honest = new_is(lambda x: x + x, replaced=doubled_in_a_mess, differentiable=())
    assert check_integrity(honest).state == "passed"
    wrong = check_integrity(replace(honest, new=lambda x: x * 3))
    assert wrong.state == "failed"
    assert WRONG in wrong.why
    assert check_numerics(honest).state == "not run"


def test_a_declared_difference_from_run_to_run_is_no_fault():
    subject = next(v for v in FAULTS if v.name == "order_race").subject
    once = replace(subject, dtypes=("float32",))
    assert check_integrity(once).state == "failed"
    assert check_integrity(replace(once, is_deterministic=False)).state == "passed"


def test_batch_invariance_is_reported_and_judged_only_where_it_is_claimed():
    def depends_on_its_neighbours(x):
        return x * 2 if x.shape[0] > 4 else (x * 2).nextafter(torch.tensor(9e9))

    level = check_integrity(new_is(depends_on_its_neighbours, differentiable=()))
    assert level.state == "passed"
    (told,) = [note for note in level.notes if "smaller batch" in note]
    assert quantities_in(told)[-1] == "0"
    claimed = new_is(depends_on_its_neighbours, differentiable=(), is_batch_invariant=True)
    assert "their neighbours" in check_integrity(claimed).why


def test_a_time_below_the_floor_fails():
    assert check_integrity(DOUBLED, Timing(measured_ns=99, floor_ns=100)).state == "failed"
    assert check_integrity(DOUBLED, Timing(measured_ns=101, floor_ns=100)).state == "passed"


def test_a_time_that_was_not_compared_with_its_floor_is_mentioned():
    assert any("floor" in note for note in check_integrity(DOUBLED).notes)


def test_a_timed_output_can_be_verified_afterwards():
    case = Case((8, 16), "float32")
    arguments = draw(DOUBLED, case)
    assert find_wrong_outputs(DOUBLED, case, arguments, arguments[0] * 2) is None
    assert "wrong by" in find_wrong_outputs(DOUBLED, case, arguments, arguments[0] * 2.1)


def test_genuine_clocks_are_recognised_and_patched_ones_named():
    assert find_patched_timers() == []
    with restored():
        time.perf_counter = lambda: 0.0
        assert find_patched_timers() == ["replaces time.perf_counter"]


def test_every_operation_is_there():
    assert len(SUBJECTS) == 9


def test_a_lower_precision_keeps_its_integrity_and_a_wrong_result_of_it_does_not():
    rounded = new_is(lambda x: (x * 2).bfloat16().float(), precision="lower", stated_error=2**-8)
    assert check_integrity(rounded).state == "passed"
    assert check_integrity(replace(rounded, new=lambda x: x.bfloat16().float())).state == "failed"
