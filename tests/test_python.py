"""kprof in Python: its public names, runs that are opened or recorded, and a notebook."""

import inspect
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import kprof
from kprof import api
from kprof.analyze.attribution.ledger import balance
from kprof.analyze.passes import analyze
from kprof.comparison import Claim, Comparison, Interval, Metric, Plan
from kprof.errors import KprofError, LaunchError
from kprof.opened import Opened
from tests.quantities import quantities_in
from tests.traces import trace_of

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "data" / "h200" / "hf_generate.json.gz"
STEP = Metric("step", "ms")


@pytest.fixture(scope="module")
def run():
    return kprof.open(RECORDED)


@pytest.fixture
def nvtx(monkeypatch):
    """Return what is said to NVTX while a tool listens."""
    said = []

    class Domain:
        def __init__(self, name):
            self.name = name

        def get_event_attributes(self, message):
            return message

        def push_range(self, attributes):
            said.append((self.name, attributes))

        def pop_range(self):
            said.append((self.name, None))

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(get_domain=Domain))
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "tool.so")
    api._nvtx_domain.cache_clear()
    yield said
    api._nvtx_domain.cache_clear()


def test_completion_shows_the_public_names_and_no_other():
    assert dir(kprof) == kprof.__all__


@pytest.mark.parametrize("name", ["ab_test", "open", "profile", "range"])
def test_a_public_function_has_a_signature_and_says_what_it_does(name):
    function = getattr(kprof, name)
    assert inspect.signature(function).parameters
    assert inspect.getdoc(function).partition("\n")[0].endswith((".", ":", "analysis."))


def test_an_opened_trace_has_its_summary(run):
    summary = run.summary
    assert (summary.workload, summary.whole) == ("hf_generate.json.gz", "a step")
    assert summary.devices == ("NVIDIA H200",)
    assert sum(part.share for part in summary.time) == pytest.approx(1)


def test_findings_and_kernels_are_those_of_the_trace(run):
    assert run.findings == run.trace.diagnosis.findings != ()
    assert isinstance(run.kernels, pd.DataFrame)
    assert run.kernels["duration_ns"].sum() == balance(run.trace).sum_ns


def test_a_finding_is_shown_without_the_numbers_of_its_rows(run):
    assert " rows=" not in repr(run.findings[0])


def test_opening_writes_nothing_and_can_be_done_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sums = {kprof.open(RECORDED).kernels["duration_ns"].sum() for _ in "12"}
    assert len(sums) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_written_where_it_is_asked_for(run, tmp_path):
    page = run.report(tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    assert "hf_generate" in page.read_text()


def test_a_notebook_shows_the_report_without_scripts(run):
    shown = run._repr_html_()
    assert shown.startswith("<iframe sandbox ")
    assert "&lt;script" not in shown.lower()
    assert "Findings" in shown


def test_a_hostile_name_stays_inside_the_frame_of_a_notebook():
    trace = analyze(trace_of({"name": '"></iframe><script>alert(1)</script>'}))
    shown = api.Run(Path("x"), Opened(trace, Path("x")))._repr_html_()
    assert shown.count("<iframe") == shown.count("</iframe>") == 1
    assert shown.count("<") == 2


def test_a_run_says_its_step_and_its_findings(run):
    assert run.summary.whole_ns == 117_707_796
    num_findings = len(run.findings)
    assert repr(run).endswith(f"hf_generate.json.gz'): a step of 118 ms, {num_findings} findings")


def test_a_printed_run_is_the_summary_of_its_report(run):
    lines = str(run).splitlines()
    assert max(map(len, lines)) <= 80
    assert "118 ms" in quantities_in(" ".join(lines))
    assert lines[1] == "Summary"
    assert "Run" not in lines


@pytest.mark.slow
@pytest.mark.parametrize("is_script", [True, False])
def test_a_session_without_a_script_has_no_command_to_repeat(tmp_path, monkeypatch, is_script):
    torch = pytest.importorskip("torch")
    # A worker that runs tests has none either.
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "train.py", raising=False)
    if not is_script:
        monkeypatch.delattr(main, "__file__")
    with kprof.profile(tmp_path / "mine.kprof") as run:
        torch.ones(2).add(1)
    assert bool(run.trace.meta.command) is is_script


def test_nothing_to_open_is_refused():
    with pytest.raises(KprofError, match="no trace"):
        kprof.open()


def test_a_run_that_is_being_recorded_cannot_be_analyzed():
    run = api.Run(Path("mine.kprof"))
    run._not_yet = api.RECORDING
    assert repr(run) == "Run('mine.kprof'): is being recorded"
    with pytest.raises(KprofError, match="is being recorded"):
        _ = run.summary


def test_a_run_stands_for_its_path():
    assert Path(api.Run(Path("mine.kprof"))) == Path("mine.kprof")


def test_a_range_is_one_of_nvtx_in_the_domain_kprof_without_torch(nvtx, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with kprof.range("mine"):
        nvtx.append("inside")
    assert nvtx == [("kprof", "mine"), "inside", ("kprof", None)]


def test_a_range_of_nvtx_ends_where_the_block_raises(nvtx, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(ZeroDivisionError), kprof.range("mine"):
        _ = 1 / 0
    assert nvtx == [("kprof", "mine"), ("kprof", None)]


def test_a_range_is_nothing_without_torch_and_without_a_tool(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for name in api.LISTENERS:
        monkeypatch.delenv(name, raising=False)
    api._nvtx_domain.cache_clear()
    assert isinstance(kprof.range("mine"), nullcontext)


@pytest.mark.parametrize("name", [3, None, b"step"])
def test_a_range_whose_name_is_no_text_is_refused(name):
    with pytest.raises(KprofError, match="is a text"):
        kprof.range(name)


@pytest.mark.slow
def test_ranges_keep_apart_whatever_they_are_called(tmp_path):
    torch = pytest.importorskip("torch")
    names = ["forward", "\u524d\u5411", "\u53cd\u5411", "a\0b", "a\nb", "\ud800", ""]
    with kprof.profile(tmp_path / "named.kprof") as run:
        for name in names:
            with kprof.range(name):
                torch.ones(2).add(1)
    told = {name for name in run.trace.ranges["name"].astype(str) if "::" not in name}
    assert len(told) == len(names)
    assert "unknown" not in told


@pytest.mark.slow
def test_a_second_block_inside_of_one_is_refused_and_the_first_is_recorded(tmp_path):
    torch = pytest.importorskip("torch")
    with kprof.profile(tmp_path / "outer.kprof") as run:
        torch.ones(2).add(1)
        with (
            pytest.raises(LaunchError, match="is being recorded"),
            kprof.profile(tmp_path / "inner.kprof"),
        ):
            pass
    assert "aten::add" in set(run.kernels["name"])
    assert not (tmp_path / "inner.kprof").exists()


def test_a_run_with_nothing_to_analyze_says_so_in_a_notebook(tmp_path):
    run = api.Run(tmp_path / "<b>.kprof")
    shown = run._repr_html_()
    assert "does not exist" in shown
    assert "<b>" not in shown


def test_a_comparison_shows_its_verdict():
    interval = Interval(0.912, 0.905, 0.919, 0.95, "fixed")
    claims = (Claim(STEP, "FASTER", 24, interval), Claim(Metric("energy", "J"), "INVALID", 3))
    shown = repr(Comparison("x", "theirs", "ours", Plan((STEP,)), (), claims, ""))
    assert shown.splitlines() == [
        "ours against theirs",
        "FASTER: step -8.80 % (-9.50 to -8.10 %, 24 pairs)",
        "INVALID: energy",
    ]


# A cell that records, and one that reads; the first runs twice.
CELLS = (
    """
import torch
import kprof

layer = torch.nn.Linear(8, 8)
with kprof.profile() as run:
    for _ in range(3):
        with kprof.range("step"):
            layer(torch.ones(2, 8)).sum().backward()
run
""",
    "run.path.name, run.summary.whole, len(run.kernels) > 0",
    "kprof.open(run.path).report().name",
    "kprof.ab_test(sum, sum, inputs=[([1, 2],)])",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_notebook_records_twice_and_reads_the_second_recording(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    first, read, report, compared = map(nbformat.v4.new_code_cell, CELLS)
    again = nbformat.v4.new_code_cell(CELLS[0])
    book = nbformat.v4.new_notebook(cells=[first, again, read, report, compared])
    nbclient.NotebookClient(
        book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [cell.outputs[-1].data for cell in book.cells]
    assert all("<iframe sandbox" in one["text/html"] for one in shown[:2])
    assert "'profile-2.kprof', 'a step', True" in shown[2]["text/plain"]
    assert shown[3]["text/plain"] == "'report.html'"
    assert shown[4]["text/plain"].startswith("sum against sum")
    assert sorted(p.name for p in tmp_path.glob("*.kprof")) == ["profile-2.kprof", "profile.kprof"]
