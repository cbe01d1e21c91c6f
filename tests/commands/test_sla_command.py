"""`kprof sla`: what is shown, what is written, and the exit code."""

import json
from pathlib import Path

import pytest

from kprof.analyze.sla import evaluate
from kprof.analyze.sla.evaluate import judge_steps
from kprof.analyze.sla.responses import Load
from kprof.analyze.sla.targets import parse_target, read_targets
from kprof.commands import sla
from kprof.commands.sla import json_of, judge_responses
from kprof.errors import KprofError
from kprof.report.html import render_page
from kprof.report.section import Table, Text
from kprof.report.sla_verdict import result_of_sla, sections_of_sla
from kprof.report.units import format_time
from kprof.trace import Recording
from tests.commands.test_cli import kprof
from tests.quantities import quantities_in
from tests.responses import MS, answer, failure, run_of, service
from tests.traces import trace_of

AIPERF = Path(__file__).parents[1] / "data" / "responses" / "aiperf"
GUIDELLM = AIPERF.parent / "guidellm.json"
# A third of its 12 requests has no answer.
MET = ("--spell", "0", "--target", "ttft_p25<=5s")


def judged(*texts, runs, gpus=None):
    """Judge targets on runs; no slow spell is assumed."""
    return judge_responses(runs, read_targets(texts), gpus, 0)


def page_of(found):
    """Return the text of the page."""
    return render_page("sla", sections_of_sla(found, for_page=True))


def steps(text, **recording):
    """Judge a target on a run whose recorder has timed its steps."""
    recording = Recording("a rule", 9, (5,), **{"step_clock": "device", **recording})
    return judge_steps(trace_of({}, recording=recording), [parse_target(text)])


@pytest.mark.parametrize(
    ("targets", "code"),
    [
        (["ttft_p25<=5s"], 0),
        (["ttft_p25<=5s", "ttft_p50<=1us"], 1),
        (["ttft_p25<=5s", "ttft_p90<=5s"], 3),
        (["ttft_p50<5s"], 2),
        (["ttft_p25<=5s", "step_p50<=60ms"], 2),
        (["throughput>=1tok/s/gpu"], 2),
        ([], 2),
    ],
)
def test_the_exit_code_is_the_verdict(targets, code, capsys):
    words = [word for text in targets for word in ("--target", text)]
    assert kprof("sla", AIPERF, "--spell", "0", *words) == code


def test_a_target_on_steps_of_a_result_file_is_not_measured_in_json_either(capsys):
    assert kprof("sla", AIPERF, "--target", "step_p50<=60ms", "--json") == 2
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    assert target["verdict"] == "NOT MEASURED"


def test_the_terminal_shows_every_target_with_its_bound(capsys):
    words = ("sla", AIPERF, *MET, "--target", "ttft_p90<=5s")
    kprof(*words)
    shown = " ".join(capsys.readouterr().out.split())
    kprof(*words, "--json")
    result = json.loads(capsys.readouterr().out)
    targets = {target["target"]: target for target in result["targets"]}
    assert [text for text in targets if text not in shown] == []
    assert result["verdict"] == "NOT PROVEN"
    unproven = targets["ttft_p90<=5s"]
    assert unproven["verdict"] == "NOT PROVEN"
    assert unproven["why"] in shown
    assert quantities_in(unproven["why"]) == ["12", "44"]


def counts_shown(text, run):
    """Return the numbers of the reason that the terminal shows, the same as in --json."""
    found = judged(text, runs=[run])
    (kept,) = result_of_sla(found)["targets"]
    shown = [part.text for part in sections_of_sla(found)[0].parts if isinstance(part, Text)]
    assert any(kept["why"] in one for one in shown)
    numbers = [kept[name] for name in ("samples", "independent_samples")]
    assert quantities_in(kept["why"])[:2] == [f"{number:,}" for number in numbers]
    (judgement,) = found.assessment.judgements
    assert judgement.why_fewer in kept["why"]
    return [*numbers, quantities_in(kept["why"])[-1], judgement.why_fewer]


def test_many_samples_that_count_as_few_are_told_with_both_numbers_and_why():
    in_a_spell = run_of([50] * 490 + list(range(110, 120)))
    *counts, clumps = counts_shown("ttft_p99<=1s", in_a_spell)
    assert counts == [500, 44, "459"]
    assert clumps


def test_gaps_of_few_answers_are_told_with_both_numbers_and_why():
    few = service(*(answer(50, sent_ms=i, gaps_ms=[5] * 100) for i in range(10)))
    *counts, together = counts_shown("gap_p99<=20ms", few)
    assert counts == [1000, 10, "459"]
    assert together
    assert together != counts_shown("ttft_p99<=1s", run_of([50] * 490 + list(range(110, 120))))[-1]


def test_the_json_names_the_method_and_holds_every_figure(capfdbinary):
    assert kprof("sla", AIPERF, *MET, "--json") == 0
    result = json.loads(capfdbinary.readouterr().out)
    assert (result["verdict"], result["percentiles"]) == ("MET", "inverted CDF")
    assert result["requests"] == {"sent": 12, "answered": 8, "failed": 2, "cancelled": 2}
    (target,) = result["targets"]
    assert (target["unit"], target["limit"], target["samples"]) == ("ns", 5e9, 12)
    assert (target["verdict"], target["low"]) == ("MET", None)
    assert 0 < target["estimate"] <= target["high"] <= target["limit"]


def test_a_percentile_that_failures_reach_is_never_and_not_null():
    found = judged("ttft_p50<=1s", runs=[service(*(failure(i) for i in range(9)))])
    (target,) = json.loads(json_of(found))["targets"]
    assert (target["verdict"], target["estimate"], target["low"]) == ("MISSED", "never", "never")


def test_the_page_is_written_and_not_overwritten_without_force(tmp_path, capsys):
    page = tmp_path / "sla.html"
    assert kprof("sla", AIPERF, *MET, "--out", page) == 0
    assert "first N tokens" in page.read_text()
    assert kprof("sla", AIPERF, *MET, "--out", page) == 2
    assert kprof("sla", AIPERF, *MET, "--out", page, "--force") == 0


def test_a_preset_brings_its_targets(capsys):
    assert kprof("sla", AIPERF, "--preset", "chat") == 1
    assert "itl_p99<=50ms" in capsys.readouterr().out
    assert kprof("sla", AIPERF, "--preset", "nothing") == 2


def test_one_load_of_a_file_is_named_by_its_number(capsys):
    assert kprof("sla", GUIDELLM, *MET) == 2
    assert kprof("sla", f"{GUIDELLM}#1", *MET) == 0


def test_runs_at_different_loads_are_refused():
    other = service(*run_of([50]).rows, load=Load("closed", "8 at a time"))
    with pytest.raises(KprofError, match="8 at a time"):
        judged("ttft_p50<=1s", runs=[run_of([50]), other])


def test_a_run_named_twice_is_refused(capsys):
    assert kprof("sla", AIPERF, AIPERF / "profile_export.jsonl", *MET) == 2
    assert "twice" in capsys.readouterr().err


def test_no_run_is_refused():
    with pytest.raises(KprofError, match="no run"):
        judged("ttft_p50<=1s", runs=[])


def test_several_runs_show_what_each_measured():
    found = judged("ttft_p50<=1s", runs=[run_of([50] * 9), run_of([80] * 9)])
    (by_run,) = [table for table in tables_of(found) if table.rows[0][0] == "ttft_p50<=1s"][1:]
    assert by_run.rows[0][1:3] == ("50 ms", "80 ms")
    alone = judged("ttft_p50<=1s", runs=[run_of([50] * 9)]).assessment.doubts
    assert [doubt.id for doubt in alone if doubt not in found.assessment.doubts] == ["one_run"]


def tables_of(found):
    return [p for s in sections_of_sla(found) for p in s.parts if isinstance(p, Table)]


def test_what_failed_is_shown_with_its_most_frequent_error(capsys):
    kprof("sla", AIPERF, *MET)
    assert "planted" in capsys.readouterr().out


def test_the_page_draws_a_curve_that_ends_below_100_percent_where_requests_failed():
    found = judged("ttft_p50<=1s", runs=[service(answer(30), failure(9))])
    assert '"y":[50.0]' in page_of(found)


def test_the_bound_that_is_shown_is_the_one_that_decides():
    found = judged("ttft_p50<=1s", "ttft_p50<=1ms", runs=[run_of(range(10, 40))])
    table = sections_of_sla(found)[0].parts[1]
    met, missed = found.assessment.judgements
    assert met.low < met.high
    assert [row[3] for row in table.rows] == [format_time(met.high), format_time(missed.low)]


def test_a_name_in_an_error_cannot_steer_the_page():
    row = failure()
    bad = type(row)(row.sent_ns, "failed", end_ns=row.end_ns, error="<script>alert(1)</script>")
    assert "<script>alert(1)" not in page_of(judged("ttft_p50<=1s", runs=[service(bad)]))


def test_steps_that_were_not_recorded_are_judged():
    found = steps(
        "step_p50<=60ms",
        unrecorded_step_ns=(50 * MS,) * 9,
        recorded_step_ns=(80 * MS,) * 3,
    )
    assert found.verdict == "MET"
    assert found.judgements[0].num_samples == 9
    assert any("60.0 % longer" in doubt.text for doubt in found.doubts)


def test_the_cost_of_recording_is_left_out_where_it_is_unknown():
    found = steps(
        "step_p50<=60ms",
        unrecorded_step_ns=(20 * MS, 50 * MS, 90 * MS),
        recorded_step_ns=(80 * MS,) * 3,
    )
    (doubt,) = [one for one in found.doubts if one.id == "recorded_steps_left_out"]
    assert quantities_in(doubt.text) == ["3"]


def test_recorded_steps_alone_can_meet_a_target_and_miss_none():
    assert steps("step_p50<=60ms", recorded_step_ns=(50 * MS,) * 9).verdict == "MET"
    slow = steps("step_p50<=60ms", recorded_step_ns=(80 * MS,) * 9)
    assert slow.verdict == "NOT PROVEN"
    assert slow.judgements[0].verdict == "NOT PROVEN"
    assert "all_steps_recorded" in [doubt.id for doubt in slow.doubts]


def test_a_run_has_steps_and_no_requests():
    found = steps("ttft_p50<=60ms", recorded_step_ns=(50 * MS,) * 9)
    assert found.judgements[0].verdict == "NOT MEASURED"
    assert "result file" in found.judgements[0].why


def test_a_result_file_has_requests_and_no_steps():
    found = judged("step_p50<=60ms", runs=[run_of([50] * 9)])
    assert found.assessment.judgements[0].verdict == "NOT MEASURED"


def test_a_saved_run_is_judged_on_its_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ranges = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{i}",
            "pid": 0,
            "tid": 1,
            "ts": 1000 * i,
            "dur": 900,
        }
        for i in range(9)
    ]
    kernels = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 0,
            "tid": 7,
            "ts": 1000 * i + 10,
            "dur": 500,
            "args": {"device": 0, "stream": 7, "correlation": i + 1},
        }
        for i in range(9)
    ]
    Path("trace.json").write_text(json.dumps({"traceEvents": [*ranges, *kernels]}))
    assert kprof("open", "trace.json") == 0
    assert kprof("sla", "trace.kprof", "--target", "step_p50<=60ms") == 0
    assert kprof("sla", "trace.kprof", "--target", "step_p50<=1us") == 3
    assert kprof("sla", "trace.kprof", "--target", "ttft_p50<=1s") == 2


def test_the_default_spell_of_the_command_is_that_of_the_verdict():
    assert sla.LONGEST_SPELL_S == evaluate.LONGEST_SPELL_S
