"""What a finding saves: against simulated programs, and as an honest interval."""

import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kprof.analyze.findings.claims import fused, proof, proof_by_copy
from kprof.analyze.findings.diagnose import diagnose, rank_findings, saves_alone
from kprof.analyze.findings.queries import idle_of
from kprof.analyze.findings.savings import find_pricer
from kprof.analyze.passes import analyze
from kprof.analyze.whatif import baseline
from kprof.analyze.whatif.replay import gain_error_ns
from kprof.findings import Finding, Fix
from kprof.trace import Recording
from tests.analyze.findings.rule_cases import CASES
from tests.analyze.findings.rule_faults import LOGITS, RMS_NORM, loss_of
from tests.analyze.findings.rule_traces import US, ran, rest, trace_of_work
from tests.analyze.simulated import (
    END_OF_STEP,
    Do,
    Machine,
    faster,
    item,
    kernel,
    record,
    step_ns,
    synchronize,
)
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of, trace_of

BUSY = [kernel("mm", 100_000), kernel("norm", 60_000), kernel("mm", 100_000)]


def about(rows, **fix):
    return Finding("a_rule", "A claim", "high", "low", rows=tuple(rows), fix=Fix(**fix))


def priced(program, *findings):
    return find_pricer(record(program)).price(findings)


def test_faster_kernels_of_a_busy_device_save_what_they_take_less():
    found = priced(BUSY, about([1], best_ns=20_000, modest_ns=50_000))
    assert (found.step_ns, found.low_ns, found.high_ns) == (step_ns(BUSY), 10_000, 40_000)


def test_the_simulated_program_with_faster_kernels_takes_what_was_predicted():
    found = priced(BUSY, about([1], best_ns=20_000, modest_ns=20_000))
    assert found.step_ns - found.high_ns == step_ns(faster(BUSY, "norm", 3))


def test_activities_at_the_same_time_cost_no_more_than_the_step():
    at_once = [{"stream": stream, "duration_ns": 400, "start_ns": 0} for stream in (1, 2)]
    pricer = find_pricer(analyzed_trace_of(*at_once, {"stream": 1, "start_ns": 400}))
    assert pricer.step_ns == 500
    costs = [pricer.cause_ns(about(rows, best_ns=0, modest_ns=0)) for rows in ([0], [0, 1])]
    assert costs == [400, 500]


def test_fewer_launches_save_the_hosts_time_where_it_is_the_limit():
    late = [kernel("mm", 4_000, host_ns=50_000) for _ in range(10)]
    found = priced(late, about(range(10), best_ns=8_000, modest_ns=8_000, launches=2))
    # Eight launches of 3 µs go, and the last kernel takes as long as before. Of modest success six
    # launches are left, and the last kernel is shorter.
    assert found.high_ns == 8 * 3_000
    assert found.low_ns == 4 * 3_000 + 4_000 - 1_333


def waiting(wait):
    """Return the saving of a wait amid a step that the device idles for afterwards."""
    program = [kernel("mm", 400_000), wait, *[kernel("norm", 3_000, host_ns=9_000)] * 9]
    trace = analyze(Machine().run(program))
    rows = np.flatnonzero((trace.idle["cause"] == "synchronization").to_numpy(bool))
    found = replace(about([], idle_cause="synchronization"), idle_rows=tuple(rows.tolist()))
    return find_pricer(trace).price([found]), trace.idle["duration_ns"].iloc[rows].sum()


def test_of_a_wait_without_a_result_the_whole_gain_is_certain():
    found, lost_ns = waiting(synchronize())
    assert 0 < found.high_ns <= lost_ns
    assert found.low_ns == pytest.approx(found.high_ns, rel=0.2)


def test_of_a_wait_for_a_result_that_the_host_may_need_nothing_may_be_saved():
    found, lost_ns = waiting(item())
    assert found.low_ns == 0 < found.high_ns <= lost_ns
    assert "these waits stay" in found.basis


def test_savings_of_the_same_rows_are_not_added():
    alone = priced(BUSY, about([1], best_ns=20_000, modest_ns=20_000))
    both = priced(BUSY, *[about([1], best_ns=20_000, modest_ns=20_000)] * 2)
    assert both == alone


def test_savings_of_other_rows_are_replayed_together():
    first = about([1], best_ns=20_000, modest_ns=20_000)
    second = about([0, 2], best_ns=100_000, modest_ns=100_000)
    assert priced(BUSY, first, second).high_ns == 140_000


def test_what_the_replay_misses_widens_the_interval():
    pricer = find_pricer(record(BUSY))
    unsure = replace(pricer, baseline=replace(pricer.baseline, uncertainty_ns=5_000))
    found = unsure.price([about([1], best_ns=20_000, modest_ns=50_000)])
    # No more than its cause: the kernel cannot take less than 20 of its 60 µs.
    assert (found.low_ns, found.high_ns) == (5_000, 40_000)


def test_without_a_replay_the_saving_is_between_nothing_and_all_of_it(monkeypatch):
    monkeypatch.setattr(baseline, "MOST_ACTIVITIES", 1)
    found = priced(BUSY, about([1], best_ns=20_000, modest_ns=20_000))
    assert (found.low_ns, found.high_ns) == (0, 40_000)
    assert quantities_in(found.basis) == ["3"]


def test_an_unknown_remedy_has_an_unknown_saving():
    found = priced(BUSY, about([1]))
    assert (found.low_ns, found.high_ns) == (None, None)


def test_what_saves_next_to_nothing_is_left_out():
    tiny = about([1], best_ns=59_900, modest_ns=59_900)
    assert rank_findings([tiny], find_pricer(record(BUSY))) == []


def test_no_fix_adds_more_to_others_than_it_may_save():
    pricer = find_pricer(record(BUSY))
    large = about([1], best_ns=20_000, modest_ns=20_000)
    small = about([0], best_ns=99_000, modest_ns=99_000)
    assert [pricer.may_save(least_ns, small) for least_ns in (1_000, 1_001)] == [True, False]
    assert pricer.price([large, small]).high_ns - pricer.price([large]).high_ns == 1_000


def test_faster_kernels_are_kept_where_they_save_once_the_host_no_longer_limits():
    trace = analyze(Machine().run([kernel("mm", 4_000, host_ns=50_000) for _ in range(10)]))
    pricer = find_pricer(trace)
    faster_kernels = about(range(10), best_ns=20_000, modest_ns=20_000)
    idle_rows = np.flatnonzero((trace.idle["cause"] == "launch-bound").to_numpy(bool))
    graphs = replace(about([], graphs=True), idle_rows=tuple(idle_rows.tolist()))
    assert rank_findings([faster_kernels], pricer) == []
    kept = rank_findings([faster_kernels, graphs], pricer)
    assert [(one.fix.graphs, saves_alone(one)) for one in kept] == [(True, True), (False, False)]


def test_a_sure_finding_comes_before_an_unsure_one_that_promises_a_little_more():
    sure = about([1], best_ns=20_000, modest_ns=20_000)
    unsure = replace(about([0], best_ns=55_000, modest_ns=55_000), confidence="low")
    assert rank_findings([unsure, sure], find_pricer(record(BUSY)))[0].confidence == "high"


def test_together_is_never_more_than_the_sum_nor_less_than_the_best():
    told = diagnose(trace_of_work(*RMS_NORM, rest(), *loss_of(LOGITS)))
    highs = [one.saving.high_ns for one in told.findings if one.saving.high_ns is not None]
    assert len(highs) > 1
    assert max(highs) <= told.together.high_ns + 1
    assert told.together.high_ns <= sum(highs)


def test_a_general_finding_is_left_out_where_a_particular_one_explains_it():
    rules = {one.rule for one in diagnose(CASES["unfused_norm"].faulty()).findings}
    assert "unfused_norm" in rules
    assert "elementwise_chains" not in rules


def test_the_proof_is_the_recorded_command_with_the_difference():
    command = ("/usr/bin/python3.11", "train.py", "--name", "a b")
    trace = trace_of(command=command)
    assert shlex.split(proof(trace, "--swap", "rmsnorm")) == [
        *("kprof", "ab", "--swap", "rmsnorm", "train.py", "--name", "a b"),
    ]
    assert proof_by_copy(trace, "compiled") == (
        "kprof ab --python train.py train_compiled.py --name 'a b'"
    )


def test_a_module_and_a_foreign_command_are_compared_as_they_were_started():
    module = trace_of(command=("python", "-m", "package.train"))
    assert proof(module, "--env", "A=1") == "kprof ab --env A=1 -m package.train"
    assert proof_by_copy(module, "compiled") == ""
    launched = trace_of(command=("torchrun", "--nproc-per-node", "8", "train.py"))
    assert shlex.split(proof(launched, "--env", "A=1")) == [
        *("kprof", "ab", "--env", "A=1", "--", "torchrun", "--nproc-per-node", "8", "train.py"),
    ]


def test_without_a_recorded_command_script_stands_for_it():
    words = proof(analyzed_trace_of({}), "--swap", "rope").split()
    assert words == ["kprof", "ab", "--swap", "rope", "SCRIPT"]


def test_a_bound_counts_the_pieces_of_idle_time_that_a_finding_is_about():
    pieces = [
        {"cause": "launch-bound", "start_ns": 100 + at, "duration_ns": ns, "recoverable_ns": ns}
        for at, ns in ((0, 300), (500, 70))
    ]
    trace = analyzed_trace_of({}, {"start_ns": 900}, idle=pieces)
    untimed = replace(trace, meta=replace(trace.meta, untimed="only sums"))
    found = replace(about([], graphs=True), idle_rows=(1,))
    assert find_pricer(untimed).price([found]).high_ns == 70
    assert find_pricer(untimed).price([found, found]).high_ns == 70


def test_of_two_remedies_for_the_same_rows_the_first_counts():
    first = about([1], best_ns=50_000, modest_ns=50_000)
    second = about([1], best_ns=20_000, modest_ns=20_000)
    assert priced(BUSY, first, second).high_ns == 10_000


def test_a_fused_kernel_moves_its_bytes_well_or_modestly_and_some_work_is_left():
    # 400 MB take 100 µs at 4 TB/s: 111 µs at nine tenths of it, 300 µs at a third; the rows move
    # 1 GB in 500 µs, so 400 MB as well as they do in 200 µs. A tenth of the 500 µs is left over.
    row = ran("aten::mul", 250 * US, bytes=500_000_000)
    trace = trace_of_work(row, row)
    fix = fused(trace, np.array([0, 1]), 400e6, launches=1)
    assert fix == Fix(best_ns=111_111, modest_ns=350_000, launches=1)


def test_a_fused_kernel_of_unknown_bytes_gains_anything_from_nothing_to_nearly_all():
    trace = trace_of_work(ran("aten::mul", 250 * US))
    assert fused(trace, np.array([0]), 0, launches=1) == Fix(860, 250_000, 1)


def test_of_very_many_rows_the_longest_are_kept_and_all_are_counted(monkeypatch):
    monkeypatch.setattr("kprof.analyze.findings.diagnose.MOST_ROWS", 3)
    trace = CASES["unfused_norm"].faulty()
    *_, found = diagnose(trace).findings
    assert (len(found.rows), found.num_rows) == (3, 14)
    took = trace.kernels["duration_ns"]
    assert set(took.iloc[list(found.rows)]) == set(took[took < 500_000].nlargest(3))


def test_savings_of_a_recording_of_minutes_do_not_overflow():
    minute = 60 * 10**9
    long = [kernel("mm", minute), kernel("norm", minute), kernel("mm", minute)]
    found = priced(long, about([0, 2], best_ns=minute, modest_ns=minute))
    assert (found.low_ns, found.high_ns) == (minute, minute)


class Steps:
    """Stands for a replay whose counted steps take these times."""

    def __init__(self, *counted_ns, rank=None):
        self.counted_ns = np.array(counted_ns)
        ranks = np.array(rank or [0] * len(counted_ns))
        self.spans = SimpleNamespace(rank=ranks, counts=np.ones(len(ranks), dtype=bool))


def test_the_mean_gain_of_few_steps_is_as_uncertain_as_they_differ():
    # Gains of 10, 20, 30 and 20: 8.165 of deviation, 2 of the root of four, 2.3534 of Student.
    error = gain_error_ns(Steps(100, 110, 120, 110), Steps(90, 90, 90, 90))
    assert error == pytest.approx(2.3534 * 8.165 / 2, rel=1e-4)
    assert gain_error_ns(Steps(100, 120), Steps(90, 110)) == 0
    assert gain_error_ns(Steps(100), Steps(90)) == 0


def test_the_uncertainty_of_a_gain_is_that_of_the_slowest_rank():
    ranks = [0, 0, 1, 1]
    assert gain_error_ns(Steps(10, 20, 90, 90, rank=ranks), Steps(5, 5, 80, 80, rank=ranks)) == 0


def test_a_silence_of_the_host_counts_whole_where_the_device_was_busy_for_a_part_of_it():
    busy, silent_ns = kernel("mm", 5_000_000), 7_000_000
    late = kernel("norm", 100_000, host_ns=silent_ns)
    trace = analyze(Machine().run([busy, late, END_OF_STEP] * 3 + [busy, late]))
    rows, lost_ns = idle_of(trace, "launch-bound", least_ns=6_000_000)
    assert len(rows) == 4
    # Each piece of idle time is shorter than the silence, and counts as it is.
    assert 4 * 1_900_000 < lost_ns < 4 * 2_100_000
    assert not len(idle_of(trace, "launch-bound", least_ns=8_000_000)[0])


def test_a_call_costs_the_lead_also_while_the_device_is_about_to_begin():
    launch, wait_ns = kernel("mm", 20_000), 300_000
    tiny = [kernel("add", 1_000, host_ns=9_000)] * 30
    program = [launch, Do("allocate", "cudaMalloc", wait_ns), *tiny]
    trace = analyze(Machine().run([*[*program, END_OF_STEP] * 3, *program]))
    of_calls = trace.idle[(trace.idle["cause"] == "allocator").to_numpy(bool)]
    in_steps = of_calls["duration_ns"].groupby(
        trace.kernels["step"].to_numpy()[of_calls["kernel_row"]]
    )
    # Without the call all that follows it would have come as much earlier.
    assert in_steps.sum().to_numpy()[1:] == pytest.approx(wait_ns, abs=1_500)


def test_a_wait_may_cost_an_unrecorded_host_a_lead_that_the_recorded_one_never_had():
    # Before its wait the recorded host launches every 100 µs what runs for 100: it has no lead.
    # Unrecorded it takes about half of that, and the lead would last for the small kernels.
    large, small = kernel("mm", 100_000, host_ns=100_000), kernel("norm", 5_000, host_ns=40_000)
    program = [*[large] * 8, synchronize(), *[small] * 10]
    trace = analyze(Machine().run(program))
    rows = np.flatnonzero((trace.idle["cause"] == "synchronization").to_numpy(bool))
    found = replace(about([], idle_cause="synchronization"), idle_rows=tuple(rows.tolist()))
    as_recorded = find_pricer(trace)
    recording = Recording("steps", 9, (5,), "device", (as_recorded.step_ns,), (1_070_000,))
    pricer = find_pricer(replace(trace, meta=replace(trace.meta, recording=recording)))
    saving, cause_ns = pricer.price([found]), pricer.cause_ns(found)
    assert pricer.step_ns == 1_070_000
    assert as_recorded.cause_ns(found) < saving.high_ns <= cause_ns
    # The kernels with 1.4 µs between them are the least that is left.
    assert cause_ns <= 1_070_000 - 8 * 101_400 - 10 * 6_400


def test_how_quick_a_host_is_that_the_device_hides_counts_either_way():
    # The host launches every 40 µs what runs for 50; of its own time unrecorded nothing is known.
    program = [kernel("mm", 50_000, host_ns=0), *[kernel("mm", 50_000, host_ns=40_000)] * 9]
    trace = record(program)
    as_recorded = find_pricer(trace)
    recording = Recording(
        "steps", 9, (5,), "device", (as_recorded.step_ns,), (as_recorded.step_ns,)
    )
    pricer = find_pricer(replace(trace, meta=replace(trace.meta, recording=recording)))
    shorter = about(range(10), best_ns=50_000, modest_ns=50_000)
    slow, both = as_recorded.price([shorter]), pricer.price([shorter])
    # With the recorded host nine launches stay 40 µs apart; with a quick one none holds the device.
    assert slow.high_ns < 170_000 < 350_000 < both.high_ns <= 450_000
    assert both.low_ns == pytest.approx(slow.low_ns, abs=1_000)


def test_a_host_that_makes_the_step_as_long_as_it_is_is_no_quicker():
    program = [kernel("mm", 4_000, host_ns=50_000)] * 10
    trace = record(program)
    as_recorded = find_pricer(trace)
    recording = Recording(
        "steps", 9, (5,), "device", (as_recorded.step_ns,), (as_recorded.step_ns,)
    )
    pricer = find_pricer(replace(trace, meta=replace(trace.meta, recording=recording)))
    shorter = about(range(10), best_ns=20_000, modest_ns=20_000)
    assert pricer.price([shorter]).high_ns == pytest.approx(
        as_recorded.price([shorter]).high_ns, abs=1_000
    )
