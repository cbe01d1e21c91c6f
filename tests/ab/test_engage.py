"""An engagement is a folder of numbered entries, a JSON file each."""

import json

import msgspec
import pytest

from kprof.ab import engagement_folder
from kprof.ab.engagement_folder import read_engagement
from kprof.analyze.engagement import Decided, RunAdded
from kprof.commands.engage import write_report
from kprof.comparison import FILE as COMPARISON_FILE
from kprof.errors import KprofError
from kprof.findings import Saving
from tests.commands.test_cli import kprof
from tests.engagements import finding, write_comparison, write_run
from tests.quantities import quantities_in


@pytest.fixture
def begun(tmp_path):
    engagement_folder.init(tmp_path / "engagement", "Tiny")
    return tmp_path / "engagement"


def entries(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("0*.json"))]


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_an_engagement_begins_with_its_name_and_the_day(begun):
    (first,) = entries(begun)
    assert first["content"] == {"kind": "opened", "name": "Tiny"}
    assert first["schema"] == 1
    assert first["date"].endswith("Z")


def test_without_a_name_it_has_the_folders(tmp_path):
    assert engagement_folder.init(tmp_path / "acme").name == "acme"


def test_it_begins_in_a_folder_whose_parents_do_not_exist(tmp_path):
    deep = tmp_path / "customers" / "acme"
    engagement_folder.init(deep, "Tiny")
    assert read_engagement(deep).name == "Tiny"


def test_a_folder_holds_one_engagement(begun):
    with pytest.raises(KprofError, match=str(begun)):
        engagement_folder.init(begun)
    assert read_engagement(begun).name == "Tiny"


def test_a_folder_without_one_says_how_to_begin(tmp_path):
    with pytest.raises(KprofError, match="kprof engage init"):
        read_engagement(tmp_path)


def test_adding_a_run_tells_how_many_findings_it_has(begun, tmp_path, capsys):
    both = Saving(10_000_000, 1_000_000, 2_000_000, "replayed")
    found = finding(swap="rmsnorm"), finding("unfused_rope", swap="rope")
    run = write_run(tmp_path / "run.kprof", *found, together=both, swapped=both)
    assert kprof("engage", "add", begun, run) == 0
    _, line, *_ = capsys.readouterr().out.splitlines()
    assert quantities_in(line)[:2] == ["2", "2"]  # its number, its findings


def test_adding_several_tells_of_each(begun, tmp_path, capsys):
    runs = [write_run(tmp_path / f"{i}.kprof", *[finding()] * i) for i in range(2)]
    assert kprof("engage", "add", begun, *runs) == 0
    _, *told = capsys.readouterr().out.splitlines()
    assert [quantities_in(line)[:2] for line in told] == [["2", "0"], ["3", "1"]]


def test_a_run_is_kept_in_short_with_its_findings_and_without_its_folders(begun, tmp_path):
    engagement_folder.add(begun, [write_run(tmp_path / "run.kprof", finding())])
    text = (begun / "0002-run-run-kprof.json").read_text()
    assert "/home/ada" not in text
    assert str(tmp_path) not in text
    assert len(text) < 20_000
    _, run = read_engagement(begun).of(RunAdded)[0]
    assert run.command == "python train.py"
    assert run.when == "before"
    assert run.predictions[0].shares == (0.1, 0.2)


def test_a_step_takes_what_an_unrecorded_step_takes(begun, tmp_path):
    engagement_folder.add(begun, [write_run(tmp_path / "run.kprof")])
    _, run = read_engagement(begun).of(RunAdded)[0]
    timed = msgspec.structs.replace(run, step_ns=120, unrecorded_step_ns=100)
    assert timed.true_step_ns == 100
    assert msgspec.structs.replace(timed, unrecorded_step_ns=None).true_step_ns == 120


def test_an_address_on_the_web_keeps_its_slashes(begun):
    engagement_folder.decide(begun, "see https://example.org/a/b, tokens/s, and /data/x/y.json")
    assert entries(begun)[1]["content"]["text"] == (
        "see https://example.org/a/b, tokens/s, and y.json"
    )


def test_a_secret_does_not_get_into_the_folder(begun):
    engagement_folder.decide(
        begun, "run t.py --hf-token s3cret --db postgres://bob:s3cret@db/x --host node7"
    )
    assert entries(begun)[1]["content"]["text"] == (
        "run t.py --hf-token [left out] --db postgres://[left out]@db/x --host node7"
    )


def test_the_same_thing_is_not_added_twice(begun, tmp_path):
    run = write_run(tmp_path / "run.kprof")
    engagement_folder.add(begun, [run])
    with pytest.raises(KprofError, match=r"run\.kprof .*\b2\b"):
        engagement_folder.add(begun, [run])
    assert len(entries(begun)) == 2


def test_what_cannot_be_read_leaves_nothing_behind(begun, tmp_path):
    run = write_run(tmp_path / "run.kprof")
    with pytest.raises(KprofError, match="nowhere"):
        engagement_folder.add(begun, [run, tmp_path / "nowhere"])
    assert len(entries(begun)) == 1


def test_an_unknown_file_is_refused_with_the_known_kinds(begun, tmp_path):
    (tmp_path / "x.json").write_text("[1, 2]")
    with pytest.raises(KprofError, match="kprof sla"):
        engagement_folder.add(begun, [tmp_path / "x.json"])


def test_a_file_larger_than_any_result_is_refused_unread(begun, tmp_path, monkeypatch):
    folder = write_comparison(tmp_path / "comparison")
    told = folder / COMPARISON_FILE
    monkeypatch.setattr(engagement_folder, "LARGEST_BYTES", told.stat().st_size - 1)
    with pytest.raises(KprofError):
        engagement_folder.add(begun, [folder])
    monkeypatch.setattr(engagement_folder, "LARGEST_BYTES", told.stat().st_size)
    engagement_folder.add(begun, [folder])
    assert len(entries(begun)) == 2


def test_a_run_of_before_there_were_findings_is_refused(begun, tmp_path):
    run = write_run(tmp_path / "run.kprof")
    (run / "findings.json").unlink()
    with pytest.raises(KprofError, match="--force"):
        engagement_folder.add(begun, [run])


def test_fields_of_earlier_versions_are_ignored(begun):
    rewrite(begun / "0001-opened.json", lambda content: content.update(previous="", digest="0f"))
    assert read_engagement(begun).name == "Tiny"


def test_after_a_removed_entry_the_next_number_follows_on_the_last(begun):
    engagement_folder.decide(begun, "Stop.")
    engagement_folder.decide(begun, "Go on.")
    (begun / "0002-decision.json").unlink()
    assert engagement_folder.decide(begun, "Adopt it.").number == 4
    assert [one.number for one in read_engagement(begun).entries] == [1, 3, 4]


def test_an_entry_that_was_removed_can_be_added_again(begun, tmp_path):
    run = write_run(tmp_path / "run.kprof")
    engagement_folder.add(begun, [run])
    (begun / "0002-run-run-kprof.json").unlink()
    assert [one.number for one in engagement_folder.add(begun, [run])] == [2]


def test_two_entries_with_one_number_are_refused(begun, capsys):
    engagement_folder.decide(begun, "Stop.")
    (begun / "0002-run-x.json").write_bytes((begun / "0002-decision.json").read_bytes())
    assert kprof("engage", "status", str(begun)) == 2
    assert "0002-run-x.json" in capsys.readouterr().err


def test_a_file_name_with_another_number_is_refused(begun, capsys):
    (begun / "0001-opened.json").rename(begun / "0002-opened.json")
    assert kprof("engage", "status", str(begun)) == 2
    told = capsys.readouterr().err
    assert "0002-opened.json" in told and "1" in quantities_in(told)


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "service-level", "when": "after", "said": {}},
        {"kind": "cost", "when": "after", "said": {"figures": [1]}},
        {"kind": "gate", "said": [{}]},
        {"kind": "bench", "said": [{}]},
        {"kind": "calibration", "said": {}},
    ],
    ids=lambda content: content["kind"],
)
def test_an_entry_with_a_damaged_answer_of_another_command_is_one_message(begun, content):
    rewrite(begun / "0001-opened.json", lambda entry: entry.update(content=content))
    with pytest.raises(KprofError, match=r"0001-opened\.json"):
        read_engagement(begun)


def test_an_entry_of_a_later_schema_is_refused(begun):
    rewrite(begun / "0001-opened.json", lambda content: content.update(schema=2))
    with pytest.raises(KprofError, match=r"0001-opened\.json .*\b2\b"):
        read_engagement(begun)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}'])
def test_a_damaged_entry_is_one_message(begun, text):
    (begun / "0002-x.json").write_text(text)
    with pytest.raises(KprofError, match=r"0002-x\.json"):
        read_engagement(begun)


def test_reports_in_the_folder_are_no_entries(begun):
    write_report(read_engagement(begun))
    assert len(read_engagement(begun).entries) == 1


def test_a_decision_has_words(begun):
    engagement_folder.decide(begun, "Adopt the swap.")
    assert [one.text for _, one in read_engagement(begun).of(Decided)] == ["Adopt the swap."]
    with pytest.raises(KprofError):
        engagement_folder.decide(begun, " ")
    assert len(entries(begun)) == 2


def test_the_command_goes_from_the_first_entry_to_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run.kprof", finding(swap="rmsnorm"))
    write_comparison(tmp_path / "ab.kprof")
    for words in (
        ("init", "e", "Tiny"),
        ("add", "e", "run.kprof"),
        ("add", "e", "ab.kprof"),
        ("decide", "e", "Adopt the swap."),
        ("status", "e"),
        ("report", "e"),
    ):
        assert kprof("engage", *words) == 0
    out = capsys.readouterr().out
    assert "1 scored" in out
    assert "Adopt the swap." in out
    assert {path.name for path in (tmp_path / "e").glob("report.*")} == {
        *("report.html", "report.json", "report.md", "report.xml")
    }


def test_secrets_of_a_command_line_are_left_out(begun, tmp_path):
    command = ("python", "train.py", "--api-key=hunter2", "--steps", "3")
    engagement_folder.add(begun, [write_run(tmp_path / "run.kprof", command=command)])
    _, run = read_engagement(begun).of(RunAdded)[0]
    assert run.command == "python train.py --api-key=[left out] --steps 3"


@pytest.mark.parametrize(
    "words",
    [
        ("status", "extra"),
        ("decide", "two", "words"),
        ("decide", "one", "--after"),
        ("add",),
        ("predict", "x", "--gain", "1"),
        ("predict", "x"),
    ],
)
def test_words_and_options_that_an_action_would_pass_over_are_refused(begun, words):
    action, *rest = words
    assert kprof("engage", action, str(begun), *rest) == 2
    assert len(entries(begun)) == 1


def test_a_prediction_without_a_gain_is_asked_for_it(begun, capsys):
    assert kprof("engage", "predict", str(begun), "x") == 2
    assert "--gain" in capsys.readouterr().err


def test_a_prediction_is_a_share_of_the_latest_run(begun, tmp_path):
    for number, window_ns in enumerate((5_000, 10_000), 1):
        engagement_folder.add(begun, [write_run(tmp_path / f"run{number}.kprof")])
        (path,) = begun.glob(f"{number + 1:04d}-*.json")
        rewrite(path, lambda entry, ns=window_ns: entry["content"].update(window_ns=ns))
    predicted = engagement_folder.predict(begun, "tuned", (0.1, 0.2)).content.predicted
    assert (predicted.step_ns, predicted.low_ns, predicted.high_ns) == (10_000, 1_000, 2_000)


def test_a_gain_may_be_one_number_and_is_less_than_the_whole_step(begun, tmp_path):
    engagement_folder.add(begun, [write_run(tmp_path / "run.kprof")])
    sure = engagement_folder.predict(begun, "tuned", (0.25, 0.25)).content.predicted
    assert sure.low_ns == sure.high_ns == 0.25 * sure.step_ns
    with pytest.raises(KprofError):
        engagement_folder.predict(begun, "removed", (0.5, 1.0))
    with pytest.raises(KprofError):
        engagement_folder.predict(begun, "doubled", (-1.0, 0.5))


def test_an_entry_is_named_after_the_first_40_letters_of_its_source(begun, tmp_path):
    engagement_folder.add(begun, [write_run(tmp_path / ("x" * 50))])
    (path,) = begun.glob("0002-*.json")
    assert path.name == f"0002-run-{'x' * 40}.json"
