"""`kprof whatif`: what may be asked, what is answered, and what the run keeps."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from kprof.analyze.whatif.changes import Target, parse_target, rows_of
from kprof.analyze.whatif.predict import suggest
from kprof.cli import run_command_line
from kprof.commands.whatif import ask, parse_change
from kprof.errors import KprofError
from kprof.report.section import Text
from kprof.report.sections.what_if import INSIDE, render, section_of
from kprof.storage import load
from kprof.trace import Prediction
from tests import kineto_files as kineto
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of

LAUNCHED_US, TOOK_US = (10, 200, 210), (40, 40, 40)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a run of three kernels; the second is launched late, the third waits for it."""
    folder = tmp_path_factory.mktemp("saved")
    events = [kineto.operator(ts=0, dur=300)]
    start = 0
    for number, (launched, took) in enumerate(zip(LAUNCHED_US, TOOK_US, strict=True), start=1):
        start = max(launched + 7, start + 1.4)
        events.append(kineto.launch(ts=launched, dur=3, args={"correlation": number}))
        where = {"correlation": number}
        events.append(kineto.kernel(name=f"k{number}", ts=start, dur=took, args=where))
        start += took
    assert kprof("open", kineto.write(folder, *events), "--out", folder / "run.kprof") == 0
    return folder


@pytest.fixture
def run(saved, tmp_path, monkeypatch, capsys):
    """A copy of the saved run, in the folder to work in."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    return tmp_path / "run.kprof"


def kprof(*words):
    with pytest.raises(SystemExit) as stopped:
        run_command_line([str(word) for word in words])
    return stopped.value.code


def answers(capsys, *words):
    assert kprof("whatif", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_each_change_is_answered_alone_and_then_all_together(run, capsys):
    found = answers(capsys, run, "kernel:k1=2", "op:aten::mm=removed")
    assert [(one["target"], one["change"]) for one in found] == [
        ("kernel:k1", "2x faster"),
        ("op:aten::mm", "removed"),
        ("kernel:k1 2x faster + op:aten::mm removed", "together"),
    ]
    assert [one["step_ns"] for one in found] == [271_400] * 3
    # The second kernel is launched when it is, whatever becomes of the first.
    assert found[0]["predicted_step_ns"] == 271_400
    assert found[0]["amdahl_step_ns"] == 251_400


def test_a_run_keeps_its_answers_and_the_latest_of_equal_questions(run, capsys):
    answers(capsys, run, "kernel:k3=2")
    answers(capsys, run, "kernel:k3=2", "graphs")
    kept = [one.target for one in load(run).meta.what_if]
    assert kept.count("kernel:k3") == 1
    assert "launches" in kept
    summary = json.loads((run / "summary.json").read_text())
    assert [one["target"] for one in summary["what_if"]] == kept
    assert [one["target"] for one in answers(capsys, run)] == kept


def test_a_trace_that_is_not_a_run_is_answered_and_nothing_is_written(run, capsys, tmp_path):
    before = sorted(path.name for path in tmp_path.iterdir())
    assert (
        answers(capsys, tmp_path / "trace.json", "kernel:k3=2")[0]["predicted_step_ns"] == 251_400
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_terminal_shows_both_figures(run, capsys):
    assert kprof("whatif", run, "kernel:k3=2") == 0
    shown = capsys.readouterr().out
    assert "251 µs" in shown
    assert "Amdahl" in shown
    assert f"ask: kprof whatif {run} kind:gemm=2 op:aten::mm=removed graphs" in shown


UNREADABLE = [
    ("kernel:k1", "=2"),
    ("kernel:k1=0", "=2"),
    ("kernel:k1=nan", "=2"),
    ("kernel:k1=soon", "=2"),
    ("kernel:k1=1e-12", "0.001"),
    ("kernel:k1=1e-300", "1e-300"),
    ("kernel:k1=0.0009", "0.001"),
    ("kernel:k1=1.1e6", "1,000,000"),
    ("=2", "'=2'"),
    ("kernel:kk1=2", "kernel:k1"),
    ("module:layers.0=2", "module:layers.0"),
    ("aten::nn=2", "kernel:k1"),
    ("idle:allocator=removed", "'allocator' does not occur in this trace"),
    ("idle:launch-bound=removed", "what putting the launches into CUDA graphs would save"),
    ("idle:nothing=removed", "'nothing' is no cause"),
]


def test_a_question_that_cannot_be_read_is_a_clear_error(run, capsys):
    told = [(kprof("whatif", run, text), capsys.readouterr().err) for text, _ in UNREADABLE]
    assert {code for code, _ in told} == {2}
    named = [said for _, said in UNREADABLE]
    assert [pair for pair in zip(named, told, strict=True) if pair[0] not in pair[1][1]] == []


@pytest.mark.parametrize("factor", ["0.001", "1000000"])
def test_the_least_and_the_most_of_a_factor_are_answered(run, factor):
    assert kprof("whatif", run, f"kernel:k1={factor}") == 0


@pytest.mark.parametrize(("factor", "said"), [("1", "unchanged"), ("0.5", "2x slower")])
def test_a_factor_that_makes_nothing_faster_says_so(run, capsys, factor, said):
    (found,) = answers(capsys, run, f"kernel:*={factor}")
    assert found["change"] == said
    assert (found["predicted_step_ns"] == found["step_ns"]) is (factor == "1")


SYNCHRONIZED = analyzed_trace_of({}, idle=[{"cause": "synchronization"}])


def test_a_cause_of_idle_time_is_removed_and_nothing_else():
    change = parse_change("idle:synchronization=removed", SYNCHRONIZED)
    assert (change.subject, change.words) == ("idle:synchronization", "gone")
    assert change.question == "idle:synchronization=removed"
    with pytest.raises(KprofError, match="idle:synchronization=2"):
        parse_change("idle:synchronization=2", SYNCHRONIZED)


HOSTS = analyzed_trace_of({"activity": "host", "name": "aten::empty", "op": "aten::empty"})


def test_of_a_host_without_a_gpu_only_operators_are_suggested():
    assert [one.question for one in suggest(HOSTS)] == ["op:aten::empty=2"]


def test_nothing_is_suggested_that_the_answer_would_refuse():
    kernel = {"name": "mm", "kind": "gemm"}
    assert [one.question for one in suggest(analyzed_trace_of(kernel))] == ["kind:gemm=2"]
    assert suggest(analyzed_trace_of(kernel, untimed="no starts were recorded")) == []


TREE = analyzed_trace_of(
    {"name": "gemm[1]", "module": "layers.0.attn", "kind": "gemm", "op_row": 1},
    {"name": "gemm[2]", "module": "layers.0", "kind": "norm", "op_row": 0},
    {"name": "add", "module": "layers.01", "kind": "gemm"},
    ranges=[{"name": "aten::linear"}, {"name": "aten::mm", "parent": 0}],
)


TARGETS = [
    ("module:layers.0", Target("module", "layers.0"), [True, True, False]),
    ("module:layers.*", Target("module", "layers.*"), [True, True, True]),
    ("op:aten::linear", Target("op", "aten::linear"), [True, True, False]),
    ("op:aten::mm", Target("op", "aten::mm"), [True, False, False]),
    ("kernel:gemm[1]", Target("kernel", "gemm[1]"), [True, False, False]),
    ("kernel:gemm[*", Target("kernel", "gemm[*"), [True, True, False]),
    ("aten::mm", Target("op", "aten::mm"), [True, False, False]),
    ("norm", Target("kind", "norm"), [False, True, False]),
]


def test_a_target_has_all_that_runs_inside_it():
    found = [(text, parse_target(text, TREE)) for text, _, _ in TARGETS]
    rows = [(text, target, rows_of(target, TREE).tolist()) for text, target in found]
    assert rows == TARGETS


def test_an_unknown_target_names_those_that_look_like_it():
    with pytest.raises(KprofError, match=r"module:layers\.0\.attn"):
        parse_target("module:layers.0.atn", TREE)


def prediction(**changes):
    told = {"step_ns": 100_000, "predicted_step_ns": 80_000, "amdahl_step_ns": 70_000}
    return Prediction("kernel:mm", "2x faster", **{**told, "uncertainty_ns": 500, **changes})


def test_a_run_that_cannot_be_written_is_answered_and_keeps_nothing(run, capsys, monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    before = (run / "meta.json").read_bytes()
    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    assert kprof("whatif", run, "kernel:k1=2", "--json") == 0
    told = capsys.readouterr()
    assert [one["target"] for one in json.loads(told.out)] == ["kernel:k1"]
    (line,) = told.err.splitlines()
    assert str(run) in line and "Permission denied" in line
    assert (run / "meta.json").read_bytes() == before


def test_how_much_of_a_roofline_is_known_stands_only_beside_rooflines():
    at_its_roofline = prediction(known_share=0.9, what="roofline")
    named_so = Prediction("kernel:roofline", "beside the roofline", 100, 80, 70, 5, what="faster")
    headers = [
        [column.header for column in section_of(told).parts[1].columns]
        for told in ([named_so], [named_so, at_its_roofline])
    ]
    assert headers[0] == ["What", "Change", "Step", "Saves", "Between", "Amdahl"]
    assert headers[1] == [*headers[0], "Roofline known for"]


def test_the_report_leads_with_the_largest_saving():
    lead, table, *_ = section_of([prediction(), prediction(predicted_step_ns=60_000)]).parts
    assert lead.text.startswith("kernel:mm 2x")
    assert quantities_in(lead.text)[:4] == ["60 µs", "100 µs", "39.5 %", "40.5 %"]
    assert [row[2:6] for row in table.rows] == [
        ("80 µs", "20.0 %", "19.5 % to 20.5 %", "70 µs"),
        ("60 µs", "40.0 %", "39.5 % to 40.5 %", "70 µs"),
    ]


def test_the_report_says_what_an_operator_counts_where_it_has_one():
    captions = [
        section_of([replace(prediction(), target=target)]).parts[1].caption
        for target in ("op:aten::_convolution", "kernel:mm")
    ]
    assert INSIDE in captions[0]
    assert INSIDE not in captions[1]


def test_the_report_says_why_it_cannot_tell():
    untold = prediction(predicted_step_ns=None, uncertainty_ns=None, reason="no shapes")
    others = [replace(untold, target=f"kernel:{number}") for number in range(5)]
    one, two, five = (section_of(all_).parts[0] for all_ in ([untold], [untold, others[0]], others))
    assert {part.tone for part in (one, two, five)} == {"warning"}
    assert [part.text.count(untold.reason) for part in (one, two, five)] == [1, 1, 1]
    assert re.findall(r"kernel:\w+", one.text) == ["kernel:mm"]
    assert re.findall(r"kernel:\w+", two.text) == ["kernel:mm", "kernel:0"]
    assert re.findall(r"kernel:\w+", five.text) == [f"kernel:{number}" for number in range(4)]
    assert re.search(r"\b1 more\b", five.text)


def test_the_report_of_a_run_without_predictions_says_so():
    (only,) = render(analyzed_trace_of({})).parts
    assert isinstance(only, Text)
    assert quantities_in(only.text) == []


def test_a_trace_without_steps_is_predicted_as_its_window():
    lead, table, *_ = section_of([prediction()], whole="the window").parts
    assert "window" in lead.text
    assert "window" not in section_of([prediction()]).parts[0].text
    assert table.columns[2].header == "Window"
    assert section_of([prediction()]).parts[1].columns[2].header == "Step"


def test_a_question_across_ranks_of_one_rank_says_why_it_has_no_answer(run):
    asked = ask(run, ["kind:gemm=2", "ranks=in-time"])
    assert asked.answers[0].predicted_step_ns is not None
    assert (asked.answers[1].target, asked.answers[1].predicted_step_ns) == ("late ranks", None)
    (alone,) = ask(run, ["communication=hidden"]).answers
    assert alone.reason


def test_a_question_that_cannot_be_understood_leaves_the_others_answered(run, capsys):
    assert kprof("whatif", run, "kernel:k1=2", "kind:nothing=2", "--json") == 2
    told = capsys.readouterr()
    assert [one["target"] for one in json.loads(told.out)] == ["kernel:k1"]
    assert "kind:nothing" in told.err
    assert kprof("whatif", run, "kind:nothing=2") == 2
    assert capsys.readouterr().out == ""
