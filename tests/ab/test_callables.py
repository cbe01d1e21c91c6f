"""`kprof.ab_test`: two callables, and what makes their comparison worth nothing."""

import itertools
import re
import time

import numpy as np
import pytest

from kprof.ab import functions
from kprof.ab.functions import TIME, AbTestError, ab_test
from kprof.ab.variants import measure_host_resolution_ns
from kprof.comparison import Metric, Plan
from kprof.errors import KprofError
from kprof.timing import WarmUp
from tests.quantities import quantities_in

PLAN = Plan((TIME,), max_pairs=12, seed=3)


class SimulatedTime:
    """A host clock that only work moves."""

    def __init__(self):
        self.now_ns = 0

    def spend(self, time_ns):
        """Let so much time go by, give or take a little, so that no two samples are alike."""
        self.now_ns += time_ns + next(NOISE)


NOISE = itertools.cycle(np.random.default_rng(0).integers(-300, 300, 997).tolist())


@pytest.fixture
def clock(monkeypatch):
    simulated = SimulatedTime()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: simulated.now_ns)
    monkeypatch.setattr(time, "monotonic", lambda: simulated.now_ns / 1e9)
    return simulated


def taking(clock, time_ns, result=1.0):
    """Return a function that takes so long and returns this."""

    def work(*inputs):
        clock.spend(time_ns)
        return result

    return work


def test_b_that_takes_less_time_is_faster(clock):
    compared = ab_test(taking(clock, 1_000_000), taking(clock, 900_000), plan=PLAN)
    assert compared.headline.verdict == "FASTER"
    assert compared.headline.interval.ratio == pytest.approx(0.9, abs=0.005)


def test_on_a_clock_too_coarse_for_a_sample_nothing_is_proven(clock, monkeypatch):
    monkeypatch.setattr("kprof.ab.functions.measure_host_resolution_ns", lambda: 1e9)
    monkeypatch.setattr("kprof.ab.functions.warm_up", lambda *rest: WarmUp(1, is_stable=True))
    compared = ab_test(taking(clock, 2_000_000), taking(clock, 1_000_000), plan=PLAN)
    assert compared.headline.verdict == "INCONCLUSIVE"


def test_b_that_takes_more_time_is_slower(clock):
    compared = ab_test(taking(clock, 1_000_000), taking(clock, 1_100_000), plan=PLAN)
    assert compared.headline.verdict == "SLOWER"


def test_twice_the_same_is_the_same(clock):
    work = taking(clock, 1_000_000)
    assert ab_test(work, work, plan=PLAN).headline.verdict == "SAME"


def test_outputs_that_differ_are_no_comparison(clock):
    a, b = taking(clock, 1_000_000, 1.0), taking(clock, 500_000, 1.5)
    claim = ab_test(a, b, plan=PLAN).headline
    assert (claim.verdict, claim.is_material, claim.pairs_needed) == ("INVALID", False, None)
    assert quantities_in(claim.why)[0] == "0.5"  # by so much of A's norm


def test_an_output_kept_from_other_inputs_is_noticed(clock):
    def honest(x):
        clock.spend(1_000_000)
        return x * 2

    kept = []

    def cached(x):
        clock.spend(1_000)
        kept.append(x * 2)
        return kept[0]

    claim = ab_test(honest, cached, inputs=[(1.0,), (5.0,)], plan=PLAN).headline
    assert claim.verdict == "INVALID"


def test_a_function_that_is_fast_only_on_inputs_that_it_has_seen_is_no_comparison(clock):
    seen = []

    def remembering(x):
        clock.spend(1_000 if any(x is one for one in seen) else 1_000_000)
        seen.append(x)
        return x * 2

    def honest(x):
        clock.spend(1_000_000)
        return x * 2

    claim = ab_test(honest, remembering, inputs=[(np.ones(4),)], plan=PLAN).headline
    assert claim.verdict == "INVALID"
    seen_ns, new_ns = (int(time.replace(",", "")) for time in re.findall(r"([\d,]+) ns", claim.why))
    assert (seen_ns, new_ns) == (pytest.approx(1_000, abs=300), pytest.approx(1_000_000, abs=300))


def test_a_time_below_what_the_work_needs_is_no_comparison(clock):
    a, b = taking(clock, 1_000_000), taking(clock, 90_000)
    claim = ab_test(a, b, plan=PLAN, floor_ns=100_000).headline
    assert claim.verdict == "INVALID"
    assert quantities_in(claim.why)[1] == "100,000 ns"


def test_one_sample_below_what_the_work_needs_is_enough(clock, monkeypatch):
    # Called once for its output, then twice a pair.
    monkeypatch.setattr("kprof.ab.functions.warm_up", lambda *rest: WarmUp(1, is_stable=True))
    calls = itertools.count()

    def once_short():
        clock.spend(50_000 if next(calls) in (7, 8) else 1_000_000)
        return 1.0

    claim = ab_test(taking(clock, 1_000_000), once_short, plan=PLAN, floor_ns=100_000).headline
    assert claim.verdict == "INVALID"


@pytest.mark.parametrize(("floor_ns", "is_below"), [(1_000_000, False), (1_000_001, True)])
def test_a_call_may_take_just_what_the_work_needs(clock, floor_ns, is_below):
    def work():
        clock.now_ns += 1_000_000
        return 1.0

    a = taking(clock, 1_100_000)
    claim = ab_test(a, work, plan=PLAN, floor_ns=floor_ns).headline
    assert (claim.verdict == "INVALID") == is_below


@pytest.mark.parametrize(("result", "verdict"), [(1.009, "FASTER"), (1.011, "INVALID")])
def test_outputs_may_differ_by_a_hundredth_of_as_norm(clock, result, verdict):
    a, b = taking(clock, 1_000_000, 1.0), taking(clock, 500_000, result)
    assert ab_test(a, b, plan=PLAN).headline.verdict == verdict


@pytest.mark.parametrize("num_slow", [1, 100])
def test_a_b_that_is_quick_on_some_copy_or_far_quicker_than_a_on_all_keeps_nothing(clock, num_slow):
    inputs, copies = [(np.ones(4),)], itertools.count()
    slow_ns = 1_000_000 if num_slow == 1 else 50_000

    def warming(x):
        is_slow = x is not inputs[0][0] and next(copies) < num_slow
        clock.spend(slow_ns if is_slow else 1_000)
        return x * 2

    def honest(x):
        clock.spend(1_000_000)
        return x * 2

    assert ab_test(honest, warming, inputs=inputs, plan=PLAN).headline.verdict == "FASTER"


@pytest.mark.slow
def test_a_result_larger_than_the_host_can_write_in_the_time_is_no_comparison(clock):
    def doubling(time_ns):
        def work(x):
            clock.spend(time_ns)
            return x * 2

        return work

    inputs = [(np.ones(1_000_000),)]
    claim = ab_test(doubling(1_000_000), doubling(1_000), inputs=inputs, plan=PLAN).headline
    assert claim.verdict == "INVALID"


def test_an_expanded_array_has_the_bytes_of_its_memory():
    assert functions.size_bytes(np.broadcast_to(np.ones(1), (1000,))) == 8
    assert functions.size_bytes(np.broadcast_to(np.ones((1, 3)), (1000, 3))) == 24
    assert functions.size_bytes(np.broadcast_to(np.ones(1), (0,))) == 0


def test_the_fewest_pairs_that_are_planned_are_taken(clock):
    plan = Plan((TIME,), max_pairs=6, seed=3)
    compared = ab_test(taking(clock, 1_000_000), taking(clock, 500_000), plan=plan)
    assert len(compared.pairs) == 6


def test_how_far_outputs_differ_is_told_only_where_both_times_are_known(clock):
    def later():
        calls = itertools.count()

        def work():
            clock.spend(1_000_000)
            return 1.0 if next(calls) else None

        return work

    assert "outputs" not in ab_test(later(), later(), plan=PLAN).facts
    work = taking(clock, 1_000_000)
    assert quantities_in(ab_test(work, work, plan=PLAN).facts["outputs"]) == ["0", "0"]


def test_functions_that_return_nothing_are_compared_with_a_doubt(clock):
    work = taking(clock, 1_000_000, None)
    compared = ab_test(work, work, plan=PLAN)
    assert compared.headline.verdict == "SAME"
    assert [doubt.id for doubt in compared.doubts] == ["results_unknown"]
    something = taking(clock, 1_000_000, 1.0)
    assert ab_test(something, something, plan=PLAN).doubts == ()


def test_every_input_has_its_turn_with_both(clock):
    seen = {"a": set(), "b": set()}

    def noting(name):
        def work(x):
            clock.spend(1_000_000)
            seen[name].add(x)
            return x

        return work

    ab_test(noting("a"), noting("b"), inputs=[(1.0,), (2.0,), (3.0,)], plan=PLAN)
    assert seen == {"a": {1.0, 2.0, 3.0}, "b": {1.0, 2.0, 3.0}}


def test_the_inputs_come_in_their_order_from_the_first_on(clock):
    seen = []

    def noting(x):
        clock.spend(1_000_000)
        seen.append(x)
        return x

    ab_test(noting, taking(clock, 1_000_000), inputs=[(1.0,), (2.0,), (3.0,)], plan=PLAN)
    assert seen[:7] == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0]


def test_the_two_are_called_what_their_functions_are_called(clock):
    work = taking(clock, 1_000_000)
    compared = ab_test(work, lambda: work(), plan=PLAN)
    assert (compared.a, compared.b) == ("work", "B")


def test_a_plan_that_does_not_stop_early_takes_all_its_pairs(clock):
    plan = Plan((TIME,), max_pairs=15, stops_early=False, seed=0)
    compared = ab_test(taking(clock, 1_000_000), taking(clock, 500_000), plan=plan)
    assert len(compared.pairs) == 15


def test_without_inputs_there_is_nothing_to_call_with():
    with pytest.raises(KprofError, match="inputs"):
        ab_test(len, len, inputs=[])


def test_the_clock_of_a_gpu_needs_one():
    with pytest.raises(KprofError, match=r"'gpu'.*CUDA") as error:
        ab_test(list, list, clock="gpu")
    assert "wall" in error.value.fix


@pytest.mark.slow
def test_the_gpu_is_told_as_in_a_comparison_of_processes(clock, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert ab_test(taking(clock, 10), taking(clock, 10), plan=PLAN).facts["GPU"] == "Tesla T4"


def test_an_error_in_one_arm_names_it_and_keeps_the_pairs_before(clock, monkeypatch):
    # Called once for its output, then twice a pair.
    monkeypatch.setattr("kprof.ab.functions.warm_up", lambda *rest: WarmUp(1, is_stable=True))
    work, calls = taking(clock, 1_000_000), itertools.count()

    def failing():
        work()
        if next(calls) == 11:
            raise ValueError("no more memory")

    with pytest.raises(AbTestError, match=r"^B .*ValueError .*no more memory") as e:
        ab_test(work, failing, plan=PLAN)
    assert len(e.value.pairs) == 5
    assert e.value.pairs[0].a[0] == pytest.approx(1_000_000, rel=0.01)
    assert isinstance(e.value.__cause__, ValueError)


def test_two_that_return_nan_are_no_proof_that_they_do_the_same(clock):
    work = taking(clock, 1_000_000, np.array([1.0, np.nan]))
    claim = ab_test(work, work, plan=PLAN).headline
    assert claim.verdict == "INVALID"
    assert "NaN" in claim.why


def test_what_does_not_match_is_told_in_words_and_not_as_infinity(clock):
    a, b = taking(clock, 1_000_000, 1.0), taking(clock, 1_000_000, [1.0])
    claim = ab_test(a, b, plan=PLAN).headline
    assert claim.verdict == "INVALID"
    assert "shape" in claim.why
    assert quantities_in(claim.why) == [] and "inf " not in claim.why


def test_a_clock_that_there_is_not_is_answered_with_those_that_there_are():
    with pytest.raises(KprofError, match="'sun'") as error:
        ab_test(int, int, clock="sun")
    assert "wall" in error.value.fix and "cold gpu" in error.value.fix


@pytest.mark.parametrize(
    "plan",
    [
        Plan((TIME,), max_pairs=5),
        Plan((TIME,), smallest_effect=0.0),
        Plan((TIME,), smallest_effect=1.0),
        Plan((TIME,), alpha=0.0),
        Plan((TIME,), alpha=1.0),
        Plan(()),
        Plan((TIME, Metric("energy", "J"))),
        Plan((Metric("time per call", "ns", "higher"),)),
        Plan((Metric("time per call", "ms"),)),
    ],
)
def test_a_plan_that_can_decide_nothing_is_refused_before_anything_is_called(plan):
    with pytest.raises(KprofError):
        ab_test(pytest.fail, pytest.fail, plan=plan)


def adding(clock, time_ns, is_in_place):
    """Return a function that returns its input plus nothing, and may leave a change in it."""

    def work(x):
        clock.spend(time_ns)
        before = x.copy()
        if is_in_place:
            x += 1
        return before * 0

    return work


@pytest.mark.parametrize(("a", "b", "label"), [(False, True, "B"), (True, False, "A")])
def test_one_that_alone_changes_its_inputs_makes_no_verdict(clock, a, b, label):
    functions = adding(clock, 1_000_000, a), adding(clock, 900_000, b)
    compared = ab_test(*functions, inputs=[(np.ones(4),)], plan=PLAN)
    assert compared.headline.verdict == "INVALID"
    assert compared.headline.why.startswith(f"{label} ")
    assert "inputs" in compared.headline.why
    assert len(compared.pairs) > 0


def test_the_first_of_several_inputs_shows_who_changes_them(clock):
    functions = adding(clock, 1_000_000, False), adding(clock, 900_000, True)
    inputs = [(np.ones(4),), (np.ones(4),), (np.ones(4),)]
    compared = ab_test(*functions, inputs=inputs, plan=PLAN)
    assert compared.headline.verdict == "INVALID"
    assert compared.headline.why.startswith("B ")


def test_two_that_both_change_their_inputs_are_compared_with_a_doubt(clock):
    functions = adding(clock, 1_000_000, True), adding(clock, 900_000, True)
    compared = ab_test(*functions, inputs=[(np.ones(4),)], plan=PLAN)
    assert compared.headline.verdict == "FASTER"
    (doubt,) = compared.doubts
    assert doubt.id == "inputs_change"


def test_unchanged_inputs_are_not_mentioned(clock):
    functions = adding(clock, 1_000_000, False), adding(clock, 900_000, False)
    compared = ab_test(*functions, inputs=[(np.ones(4),)], plan=PLAN)
    assert (compared.headline.verdict, compared.doubts) == ("FASTER", ())


def test_a_plan_longer_than_chances_can_be_told_of_is_refused():
    with pytest.raises(KprofError, match="1024"):
        Plan((TIME,), max_pairs=1024)


def test_the_resolution_of_a_clock_is_its_smallest_step(monkeypatch):
    readings = itertools.accumulate(itertools.cycle([0, 0, 700, 0, 500]))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(readings))
    assert measure_host_resolution_ns() == 500.0


def test_the_resolution_of_a_clock_that_does_not_move_is_what_the_system_says(monkeypatch):
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 5)
    said_ns = time.get_clock_info("perf_counter").resolution * 1e9
    assert measure_host_resolution_ns() == said_ns
