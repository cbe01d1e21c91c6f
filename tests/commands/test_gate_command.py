"""`kprof gate` fails a CI job on a proven regression, and on nothing else."""

import json
import re
from xml.etree import ElementTree

import pytest

from tests.commands.test_cli import kprof
from tests.engagements import RATE, write_comparison, write_run

SLOWER, FASTER, SAME, UNCLEAR = "SLOWER", "FASTER", "SAME", "INCONCLUSIVE"


@pytest.fixture
def compared(tmp_path):
    """Return a function that writes a comparison of a ratio, a width and a verdict."""

    def write(ratio, width, verdict, name="ab.kprof", **changes):
        return str(write_comparison(tmp_path / name, ratio, width, verdict, **changes))

    return write


def gate(capsys, *words):
    """Return the exit code, and what was ruled."""
    code = kprof("gate", *words, "--json")
    return code, json.loads(capsys.readouterr().out)


def service_level(path, more=(), **verdicts):
    targets = [
        {"target": name, "verdict": verdict.replace("_", " "), "why": "", "unit": "ns"}
        | {"estimate": 1.0, "samples": 1, "metric": name.partition("_")[0]}
        for name, verdict in verdicts.items()
    ]
    said = {"schema": 1, "percentiles": "inverted CDF", "verdict": "MET", "targets": targets}
    path.write_text(json.dumps(said | dict(more)))
    return str(path)


def under(load, loop="open", gpus=None):
    """Return what `kprof sla --json` says of a load and of GPUs."""
    run = {"source": "a.json", "tool": "vllm bench serve", "loop": loop, "load": load}
    return {"runs": [run], "gpus": gpus}


def quality_gate(path, state):
    levels = [{"name": "L0", "state": "passed"}, {"name": "L1", "state": state}]
    path.write_text(json.dumps([{"subject": "softmax", "asked": ["L0", "L1"], "levels": levels}]))
    return str(path)


@pytest.mark.parametrize(
    ("claim", "verdict", "code"),
    [
        ((1.05, 0.02, SLOWER), "REGRESSION", 1),
        ((1.02, 0.015, SLOWER), "INCONCLUSIVE", 0),
        ((1.00, 0.05, UNCLEAR), "INCONCLUSIVE", 0),
        ((1.00, 0.005, SAME), "PASSED", 0),
        ((1.005, 0.006, SAME), "PASSED", 0),
        ((0.90, 0.02, FASTER), "PASSED", 0),
        ((1.50, 0.01, "INVALID"), "INCONCLUSIVE", 0),
    ],
)
def test_b_of_a_comparison_is_ruled_by_its_whole_interval(capsys, compared, claim, verdict, code):
    got, told = gate(capsys, compared(*claim))
    assert (told["verdict"], got) == (verdict, code)
    assert told["schema"] == 1


def test_where_more_is_better_less_is_a_regression(capsys, compared):
    code, told = gate(capsys, compared(0.9, 0.01, SLOWER, metric=RATE))
    assert code == 1
    assert told["rulings"][0]["low"] == pytest.approx(1 / 0.91)


@pytest.mark.parametrize(
    ("claim", "ends"),
    [
        ((0.74, 0.01, FASTER), [("27.00", "better"), ("25.00", "better")]),
        ((1.01, 0.02, UNCLEAR), [("1.00", "better"), ("3.00", "worse")]),
    ],
)
def test_what_became_better_is_not_called_worse_by_less_than_nothing(capsys, compared, claim, ends):
    _, told = gate(capsys, compared(*claim))
    why = told["rulings"][0]["why"]
    assert re.findall(r"([\d.]+) % (better|worse)", why) == ends
    assert "95 %" in why


def test_another_smallest_effect_may_be_asked_for(capsys, compared):
    candidate = compared(1.05, 0.02, SLOWER)
    assert gate(capsys, candidate, "--smallest-effect", "10%")[1]["verdict"] == "PASSED"
    assert gate(capsys, candidate, "--smallest-effect", "4%")[1]["verdict"] == "INCONCLUSIVE"


def test_proven_the_same_by_one_percent_proves_nothing_of_half_a_percent(capsys, compared):
    candidate = compared(1.00, 0.008, SAME)
    assert gate(capsys, candidate)[1]["verdict"] == "PASSED"
    assert gate(capsys, candidate, "--smallest-effect", "0.5%")[1]["verdict"] == "INCONCLUSIVE"


def test_an_inconclusive_one_says_so_and_what_would_settle_it(capsys, compared):
    assert kprof("gate", compared(1.0, 0.05, UNCLEAR)) == 0
    out = capsys.readouterr().out
    assert "INCONCLUSIVE" in out
    assert "more --pairs" in out


def test_strict_makes_an_inconclusive_one_exit_with_3(capsys, compared):
    assert kprof("gate", "--strict", compared(1.0, 0.05, UNCLEAR)) == 3
    assert kprof("gate", "--strict", compared(1.05, 0.01, SLOWER, "b.kprof")) == 1


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [(0.80, 0.90, "REGRESSION"), (0.90, 0.80, "PASSED"), (0.85, 0.86, "INCONCLUSIVE")],
)
def test_two_comparisons_are_held_against_one_another_by_their_a(
    capsys, compared, before, now, verdict
):
    baseline = compared(before, 0.01, FASTER, "baseline.kprof")
    code, told = gate(capsys, "--against", baseline, compared(now, 0.01, FASTER))
    assert told["verdict"] == verdict
    assert code == (verdict == "REGRESSION")
    (ruling,) = told["rulings"]
    assert ruling["low"] == pytest.approx((now - 0.01) / (before + 0.01))
    assert ruling["level"] == pytest.approx(0.9)


@pytest.mark.parametrize("fact", ["command of A", "GPU", "gpu"])
def test_comparisons_with_another_a_prove_nothing(capsys, compared, fact):
    baseline = compared(0.5, 0.01, FASTER, "baseline.kprof", facts={fact: "one"})
    candidate = compared(0.9, 0.01, FASTER, facts={fact: "other"})
    code, told = gate(capsys, "--against", baseline, candidate)
    assert (code, told["verdict"]) == (0, "INCONCLUSIVE")
    assert f"the {fact.replace('gpu', 'GPU')} differs" in told["rulings"][0]["why"]


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ("wall time, 12 calls a sample.", "L2 flushed, 12 calls a sample.", "INCONCLUSIVE"),
        ("wall time, 1 call a sample.", "wall time, 12,000 calls a sample.", "REGRESSION"),
    ],
)
def test_comparisons_timed_in_another_way_prove_nothing(capsys, compared, before, now, verdict):
    baseline = compared(0.5, 0.01, FASTER, "baseline.kprof", protocol=before)
    _, told = gate(capsys, "--against", baseline, compared(0.9, 0.01, FASTER, protocol=now))
    assert told["verdict"] == verdict


def test_the_same_a_may_lie_in_another_folder(capsys, compared):
    baseline = compared(
        *(0.8, 0.01, FASTER, "baseline.kprof"), facts={"command of A": "python /ci/17/train.py"}
    )
    candidate = compared(0.9, 0.01, FASTER, facts={"command of A": "python /ci/18/train.py"})
    assert gate(capsys, "--against", baseline, candidate)[1]["verdict"] == "REGRESSION"


def test_a_metric_that_the_baseline_lacks_is_open(capsys, compared):
    baseline = compared(0.9, 0.01, FASTER, "baseline.kprof", metric=RATE)
    _, told = gate(capsys, "--against", baseline, compared(0.9, 0.01, FASTER))
    (ruling,) = told["rulings"]
    assert ruling["verdict"] == "INCONCLUSIVE"
    assert "baseline" in ruling["why"]


def test_two_runs_prove_nothing_however_far_apart_they_are(capsys, tmp_path):
    runs = [str(write_run(tmp_path / f"{name}.kprof")) for name in "ab"]
    code, told = gate(capsys, "--against", *runs)
    assert (code, told["verdict"]) == (0, "INCONCLUSIVE")
    assert told["rulings"][0]["settle"] == "kprof ab --python BASELINE/train.py train.py"


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ("MET", "MISSED", "REGRESSION"),
        ("MISSED", "MISSED", "INCONCLUSIVE"),
        ("NOT_PROVEN", "MISSED", "INCONCLUSIVE"),
        ("MET", "NOT_PROVEN", "INCONCLUSIVE"),
        ("NOT_PROVEN", "MET", "PASSED"),
    ],
)
def test_a_target_regresses_from_proven_met_to_proven_missed(
    capsys, tmp_path, before, now, verdict
):
    baseline = service_level(tmp_path / "before.json", ttft=before)
    code, told = gate(capsys, "--against", baseline, service_level(tmp_path / "n.json", ttft=now))
    assert told["verdict"] == verdict
    assert code == (verdict == "REGRESSION")


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (under("10 requests/s"), under("20 requests/s"), "10 requests/s"),
        (under("10 requests/s", gpus=1), under("10 requests/s", gpus=8), "1 and 8"),
        (under("10 requests/s", gpus=1), under("10 requests/s"), "GPUs"),
        (under("not recorded", "unknown"), under("not recorded", "unknown"), "load"),
    ],
)
@pytest.mark.parametrize("verdict", ["MET", "MISSED"])
def test_a_target_under_another_load_or_on_other_gpus_is_open(
    capsys, tmp_path, before, now, why, verdict
):
    baseline = service_level(tmp_path / "b.json", before, ttft="MET")
    candidate = service_level(tmp_path / "n.json", now, ttft=verdict)
    code, told = gate(capsys, "--against", baseline, candidate)
    assert (code, told["verdict"]) == (0, "INCONCLUSIVE")
    assert why in told["rulings"][0]["why"]


def test_a_target_regresses_at_the_same_load_on_as_many_gpus(capsys, tmp_path):
    load = under("10 requests/s", gpus=2)
    baseline = service_level(tmp_path / "b.json", load, ttft="MET")
    candidate = service_level(tmp_path / "n.json", load, ttft="MISSED")
    assert gate(capsys, "--against", baseline, candidate)[0] == 1


@pytest.mark.parametrize(
    ("limit", "verdict"), [("ttft_p50", "REGRESSION"), ("ttft_p99", "INCONCLUSIVE")]
)
def test_requests_within_other_limits_prove_nothing(capsys, tmp_path, limit, verdict):
    baseline = service_level(tmp_path / "b.json", attainment="MET", ttft_p50="MET")
    candidate = service_level(tmp_path / "n.json", attainment="MISSED", **{limit: "MET"})
    _, told = gate(capsys, "--against", baseline, candidate)
    assert told["rulings"][0]["verdict"] == verdict
    assert (verdict == "REGRESSION") != ("ttft_p50 and ttft_p99" in told["rulings"][0]["why"])


def test_a_target_that_was_not_judged_again_is_open(capsys, tmp_path):
    baseline = service_level(tmp_path / "before.json", ttft="MET", tpot="MET")
    _, told = gate(capsys, "--against", baseline, service_level(tmp_path / "n.json", ttft="MET"))
    assert [one["verdict"] for one in told["rulings"]] == ["PASSED", "INCONCLUSIVE"]


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ("passed", "failed", "REGRESSION"),
        ("failed", "failed", "INCONCLUSIVE"),
        ("undecided", "failed", "INCONCLUSIVE"),
        ("passed", "undecided", "INCONCLUSIVE"),
    ],
)
def test_a_level_of_the_quality_gate_regresses_from_passed_to_failed(
    capsys, tmp_path, before, now, verdict
):
    baseline = quality_gate(tmp_path / "before.json", before)
    _, told = gate(capsys, "--against", baseline, quality_gate(tmp_path / "now.json", now))
    assert [one["verdict"] for one in told["rulings"]] == ["PASSED", verdict]


def test_one_regression_among_others_fails_the_job(capsys, tmp_path):
    before = service_level(tmp_path / "b.json", one="MET", two="MET", three="MET")
    now = service_level(tmp_path / "n.json", one="MET", two="NOT_PROVEN", three="MISSED")
    assert gate(capsys, "--against", before, now)[0] == 1


@pytest.mark.parametrize("words", [["nowhere"], ["--against", "nowhere", "ab.kprof"]])
def test_what_is_not_there_is_the_users_error(compared, tmp_path, monkeypatch, words):
    compared(0.9, 0.01, FASTER)
    monkeypatch.chdir(tmp_path)
    assert kprof("gate", *words) == 2


def test_things_of_two_kinds_are_not_held_against_one_another(compared, tmp_path):
    run = str(write_run(tmp_path / "run.kprof"))
    assert kprof("gate", "--against", run, compared(0.9, 0.01, FASTER)) == 2


def test_a_run_alone_has_nothing_to_be_held_against(tmp_path, capsys):
    assert kprof("gate", str(write_run(tmp_path / "run.kprof"))) == 2
    assert "--against BASELINE" in capsys.readouterr().err


def test_a_ci_server_sees_a_regression_fail_and_an_open_question_skipped(tmp_path, capsys):
    before = service_level(tmp_path / "b.json", one="MET", two="MET", three="MET")
    now = service_level(tmp_path / "n.json", one="MET", two="NOT_PROVEN", three="MISSED")
    xml, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
    words = ["--against", before, now, "--junit", str(xml), "--markdown", str(markdown)]
    assert kprof("gate", *words) == 1
    suite = ElementTree.parse(xml).getroot()[0]
    assert [len(case) for case in suite] == [0, 1, 1]
    assert suite[1][0].tag == "skipped"
    assert suite[2][0].tag == "failure"
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert "REGRESSION" in markdown.read_text()
    assert kprof("gate", *words) == 2
    assert kprof("gate", *words, "--force") == 1
