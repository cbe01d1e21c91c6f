"""What findings predict is written down before, and scored after."""

import json
from dataclasses import replace

import pytest

from kprof.ab import engagement_folder
from kprof.ab.engagement_folder import read_engagement
from kprof.analyze.findings.scores import score
from kprof.analyze.findings.unexplained import RULE as UNEXPLAINED
from kprof.comparison import Metric
from kprof.errors import KprofError
from kprof.findings import Saving, Worth
from kprof.report.engagement_sections import NONE_SCORED, sections_of_engagement
from kprof.storage import load, save
from kprof.trace import Prediction
from tests.commands.test_cli import kprof
from tests.engagements import (
    LATER_NS,
    STEP_NS,
    comparison_of,
    finding,
    write_comparison,
    write_run,
)
from tests.quantities import quantities_in
from tests.section_traces import fact


@pytest.fixture
def begun(tmp_path):
    """Return an engagement with a run in which a norm could be 10 to 20 % of a step."""
    folder = tmp_path / "engagement"
    engagement_folder.init(folder)
    two = finding(swap="rmsnorm"), finding("sync_in_loop", 100_000, 300_000, command="kprof ab x")
    together = Saving(STEP_NS, 1_000_000, 2_200_000, "replayed")
    engagement_folder.add(folder, [write_run(tmp_path / "run.kprof", *two, together=together)])
    return folder


def scores(folder):
    return score(read_engagement(folder))


def added(folder, ratio, tests=None, **changes):
    number = len(list(folder.parent.glob("ab*")))
    # Each is an A/B of its own, however much they look alike.
    changes.setdefault("start_ns", LATER_NS + number * 10**9)
    path = write_comparison(folder.parent / f"ab{number}.kprof", ratio, **changes)
    engagement_folder.add(folder, [path], tests=tests)
    return scores(folder)


def test_before_anything_was_tried_there_is_no_error_and_not_one_of_0(begun, capsys):
    found = scores(begun)
    assert found.mean_absolute_error is None
    assert found.mean_error is None
    assert kprof("engage", "status", str(begun)) == 0
    out = capsys.readouterr().out
    assert NONE_SCORED in out
    assert "0.0 points" not in out
    assert kprof("engage", "status", str(begun), "--json") == 0
    told = json.loads(capsys.readouterr().out)["predictions"]
    assert told["mean_absolute_error"] is None
    assert told["num_inside"] is None


def test_every_finding_and_all_together_are_promises(begun):
    names = [one.predicted.name for one in scores(begun).untested]
    assert names == ["unfused_norm", "sync_in_loop", "all-findings"]


def test_two_findings_of_one_rule_have_two_names(tmp_path):
    engagement_folder.init(tmp_path / "e")
    engagement_folder.add(tmp_path / "e", [write_run(tmp_path / "run.kprof", finding(), finding())])
    names = [one.predicted.name for one in scores(tmp_path / "e").untested]
    assert names == ["unfused_norm", "unfused_norm-2"]


def test_a_gain_within_the_promise_is_inside_with_the_error_of_its_middle(begun):
    (one,) = added(begun, 0.87).scored
    assert one.name == "unfused_norm"
    assert one.predicted == (0.1, 0.2)
    assert one.measured == pytest.approx(0.13)
    assert one.error == pytest.approx(0.02)
    assert one.is_inside
    assert one.is_clear


def test_a_gain_beyond_the_promise_is_outside_and_the_error_negative(begun):
    (one,) = added(begun, 0.75).scored
    assert not one.is_inside
    assert one.is_clear
    assert one.error == pytest.approx(-0.10)


@pytest.mark.parametrize(("ratio", "inside"), [(0.895, True), (0.905, False)])
def test_a_measurement_across_the_end_of_the_promise_is_not_sure(begun, ratio, inside):
    (one,) = added(begun, ratio).scored
    assert one.is_inside is inside
    assert not one.is_clear
    assert scores(begun).num_surely_inside == 0


def test_the_mean_error_is_given_absolute_and_with_its_sign(begun):
    added(begun, 0.87)
    found = added(begun, 0.96, tests="sync_in_loop")
    assert found.mean_absolute_error == pytest.approx(0.02)
    assert found.mean_error == pytest.approx(0.0)
    assert found.num_inside == 1


def test_status_prints_mean_error_count_and_how_many_were_inside(begun, capsys):
    added(begun, 0.87)
    assert kprof("engage", "status", str(begun)) == 0
    capsys.readouterr()
    overview, *_ = sections_of_engagement(read_engagement(begun))
    scored, errors = fact(overview, "Predictions")
    assert quantities_in(scored) == ["1"]
    # Absolute, with its sign, inside of how many, surely; two are not tested yet.
    assert quantities_in(errors) == ["2.0", "+2.0", "1", "1", "1", "2"]


def test_a_swap_is_of_the_one_finding_that_proposes_it(begun):
    assert [one.name for one in added(begun, 0.87).scored] == ["unfused_norm"]


def test_a_swap_of_several_kernels_is_of_the_promise_that_names_them_all(tmp_path):
    engagement_folder.init(tmp_path / "two")
    swaps = finding(swap="rmsnorm"), finding("unfused_rope", swap="rope")
    both = Saving(STEP_NS, 1_500_000, 2_500_000, "replayed", Worth(500.0, 700.0, 900.0))
    engagement_folder.add(
        tmp_path / "two", [write_run(tmp_path / "run.kprof", *swaps, swapped=both)]
    )
    (scored,) = added(tmp_path / "two", 0.8, b="--swap rope,rmsnorm").scored
    assert scored.name == "all-swaps"
    assert scored.predicted == (0.15, 0.25)
    promised = read_engagement(tmp_path / "two").entries[1].predictions[-1]
    assert promised.worth == Worth(500.0, 700.0, 900.0)
    with pytest.raises(KprofError, match="--swap rope,swiglu"):
        added(tmp_path / "two", 0.8, b="--swap rope,swiglu")


def test_any_other_change_has_to_say_what_it_tests(begun):
    with pytest.raises(KprofError, match="--env X=1") as error:
        added(begun, 0.9, b="--env X=1")
    assert "--tests" in error.value.fix and "'unfused_norm'" in error.value.fix
    with pytest.raises(KprofError, match="'norm'") as error:
        added(begun, 0.9, tests="norm")
    assert "--tests" in error.value.fix and "'unfused_norm'" in error.value.fix


def test_a_test_of_nothing_is_kept_and_not_scored(begun):
    found = added(begun, 0.9, tests="nothing")
    assert found.scored == ()
    assert [one.name for one in found.unscored] == ["--swap rmsnorm"]
    assert found.mean_error is None


def test_what_was_measured_before_the_prediction_is_no_test_of_it(begun):
    found = added(begun, 0.87, start_ns=1_700_000_000_000_000_000)
    assert found.scored == ()
    assert found.unscored[0].name == "unfused_norm"
    assert "before" in found.unscored[0].why


def test_a_later_baseline_does_not_take_the_place_of_the_promise_in_time(begun, monkeypatch):
    monkeypatch.setattr(engagement_folder, "now", lambda: "2999-01-01T00:00:00Z")
    again = write_run(begun.parent / "again.kprof", finding(low_ns=1_299_999, high_ns=1_300_001))
    engagement_folder.add(begun, [again])
    (one,) = added(begun, 0.87, start_ns=LATER_NS).scored
    assert one.predicted == (0.1, 0.2)


def test_an_invalid_measurement_scores_nothing(begun):
    found = added(begun, 0.9, verdict="INVALID")
    assert found.scored == ()
    assert found.unscored[0].name == "unfused_norm"
    assert found.unscored[0].why.endswith(comparison_of().headline.why)


def test_an_inconclusive_one_counts_or_only_large_gains_would(begun):
    (one,) = added(begun, 0.99, width=0.05, verdict="INCONCLUSIVE").scored
    assert one.error == pytest.approx(0.14)


def test_a_comparison_of_something_else_than_time_scores_nothing(begun):
    found = added(begun, 0.9, metric=Metric("energy per step", "J"))
    assert "energy per step" in found.unscored[0].why


def test_a_finding_of_unknown_saving_is_not_scored(begun):
    unknown = write_run(begun.parent / "u.kprof", finding("kv_cache_layout", None, None))
    engagement_folder.add(begun, [unknown])
    found = added(begun, 0.9, tests="kv_cache_layout")
    assert found.unscored[0].name == "kv_cache_layout"
    assert found.unscored[0].why.endswith("replayed")


def test_another_step_time_than_the_recordings_is_a_doubt(begun):
    assert added(begun, 0.87).scored[0].doubts == ()
    slow = Saving(2 * STEP_NS, 1_000_000, 2_000_000, "replayed")
    run = write_run(begun.parent / "slow.kprof", replace(finding("tiny_kernels"), saving=slow))
    engagement_folder.add(begun, [run])
    (_, one) = added(begun, 0.87, tests="tiny_kernels").scored
    (doubt,) = one.doubts
    assert quantities_in(doubt) == ["10 ms", "20 ms"]


def test_a_tested_promise_is_open_again_where_a_later_run_makes_it_again(begun):
    assert "unfused_norm" not in [one.predicted.name for one in added(begun, 0.87).untested]
    engagement_folder.add(
        begun, [write_run(begun.parent / "b.kprof", finding("unfused_norm", 1))], "after"
    )
    assert "unfused_norm" in [one.predicted.name for one in scores(begun).untested]


def test_what_if_answers_are_promises_with_what_the_replay_misses(tmp_path):
    run = write_run(tmp_path / "run.kprof")
    trace = load(run)
    asked = Prediction("kind:gemm", "2x faster", 1000, 800, 800, 50)
    save(replace(trace, meta=replace(trace.meta, what_if=(asked,))), run)
    engagement_folder.init(tmp_path / "e")
    engagement_folder.add(tmp_path / "e", [run])
    (one,) = scores(tmp_path / "e").untested
    assert one.predicted.name == "kind:gemm 2x faster"
    assert one.predicted.shares == (0.15, 0.25)
    # They are many, and named after kernels, so an error does not list them.
    with pytest.raises(KprofError, match="--env X=1") as error:
        added(tmp_path / "e", 0.9, b="--env X=1")
    assert "what-if" in error.value.fix and "kind:gemm" not in error.value.fix


@pytest.mark.parametrize("gain", ["", "5%", "a,b", "1%,2%,3%", "5%,1%", "1,2", "nan,nan"])
def test_a_prediction_of_ones_own_is_an_interval_of_shares(begun, gain):
    assert kprof("engage", "predict", str(begun), "tuned", "--gain", gain) == 2


def test_an_added_run_counts_all_findings_of_its_page(tmp_path):
    """A finding that no rule explains predicts nothing, and is one all the same."""
    engagement_folder.init(tmp_path / "e")
    run = write_run(tmp_path / "run.kprof", finding(), replace(finding("x"), rule=UNEXPLAINED))
    (entry,) = engagement_folder.add(tmp_path / "e", [run])
    assert entry.content.num_findings == 2
    assert [one.name for one in entry.content.predictions] == ["unfused_norm"]


@pytest.mark.parametrize("name", ["bigger batches", "sync_in_loop"])
def test_a_name_is_predicted_once(begun, name):
    first = engagement_folder.predict(begun, "bigger batches", (0.01, 0.02))
    with pytest.raises(KprofError, match=name):
        engagement_folder.predict(begun, name, (0.05, 0.5))
    assert read_engagement(begun).entries[-1] == first


def test_a_prediction_of_ones_own_needs_a_step_to_be_a_share_of(tmp_path):
    engagement_folder.init(tmp_path)
    with pytest.raises(KprofError) as error:
        engagement_folder.predict(tmp_path, "tuned", (0.1, 0.2))
    assert f"kprof engage add {tmp_path} " in error.value.fix


def test_a_prediction_whose_entry_was_removed_is_not_scored(begun):
    added(begun, 0.87)
    (begun / "0002-run-run-kprof.json").unlink()
    found = scores(begun)
    assert found.scored == ()
    assert [quantities_in(one.why) for one in found.unscored] == [["2"]]
    assert kprof("engage", "report", str(begun)) == 0
