"""What findings predict for kernels, before `--swap auto` tries any."""

import itertools
import json
import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from kprof.ab import predict
from kprof.ab.predict import predicted_by, predictions, record
from kprof.ab.variants import AbOptions
from kprof.collect.trials import Variant
from kprof.findings import Diagnosis, Finding, Saving
from kprof.kernels.swap.swap_report import Choice, Predicted, Tried
from kprof.report.section import Facts
from kprof.report.swap import section_of_choice

ENDLESS = """
import itertools, kprof, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
kprof.swapped(model, "auto").__enter__()
for _ in itertools.count():
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


def finding(swap, low_ns, high_ns):
    saving = None if high_ns is None else Saving(1_000, low_ns, high_ns, "")
    return Finding("rule", "claim", "high", "low", swap=swap, saving=saving)


def test_a_saving_becomes_the_step_time_with_the_kernel():
    found = [finding("rope", 10, 40), finding(None, 5, 500), finding("adamw", None, None)]
    found.append(finding("rmsnorm", 100, 300))
    assert predicted_by(Diagnosis(tuple(found))) == [
        Predicted("rmsnorm", 0.7, 0.9),
        Predicted("rope", 0.96, 0.99),
        Predicted("adamw", None, None),
    ]


def tried(name, ratio, why=""):
    return Tried(
        name, ratio=ratio, low=ratio and ratio - 0.01, high=ratio and ratio + 0.01, why=why
    )


CHOICE = Choice(
    (tried("rmsnorm=kprof", 0.8), tried("rope=kprof", 0.9), tried("adamw=kprof", None, "no call")),
    (Predicted("rmsnorm", 0.7, 0.85), Predicted("rope", 0.96, 0.99), Predicted("adamw", 0.9, 1.0)),
)


def test_what_was_predicted_and_what_came_out_stand_side_by_side():
    facts, found, *_ = section_of_choice(CHOICE, 0.75).parts
    assert isinstance(facts, Facts)
    # Savings of 0.3 and 0.04 at the most, 0.15 and 0.01 at the least.
    assert CHOICE.predicted_by_findings() == pytest.approx((0.66, 0.84))
    assert [row[:3] for row in found.rows] == [
        ("rmsnorm", "-30.0 % to -15.0 %", "-20.0 %"),
        ("rope", "-4.0 % to -1.0 %", "-10.0 %"),
        ("adamw", "-10.0 % to +0.0 %", found.rows[2][2]),
    ]
    assert found.rows[2][-1] == "no call"
    assert [one.holds(0.8) for one in CHOICE.findings] == [True, False, False]
    assert Predicted("rope", None, None).holds(0.8) is None


def test_of_a_chosen_kernel_without_a_finding_nothing_is_predicted():
    assert Choice(CHOICE.tried, CHOICE.findings[:1]).predicted_by_findings() is None


@pytest.mark.slow
def test_the_workload_is_ended_behind_its_window(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "train.py").write_text(ENDLESS)
    # Without a GPU, no rule recommends a kernel.
    assert predicted(tmp_path, "train.py") == ((), "")


def test_a_workload_that_records_nothing_has_no_predictions(tmp_path):
    (tmp_path / "train.py").write_text("")
    found, why = predicted(tmp_path, "train.py")
    assert (found, bool(why)) == ((), True)


def predicted(folder, script):
    a = Variant("A", (sys.executable, str(folder / script)))
    return predictions(a, AbOptions(a.command), folder / "recorded", lambda message: None)()


class Recorded:
    """Stands in for a workload: between two looks its ranks write what a test says.

    Of each rank: is its window whole, has it made the dry run, how many seconds ago did it write?
    """

    def __init__(self, looks, raw):
        self.looks, self.raw, self.ends = iter(looks), raw, []

    def wait(self, timeout_s):
        states = next(self.looks, None)
        for rank, (is_complete, has_dry_run, age_s) in enumerate(states or ()):
            folder = self.raw / f"rank{rank}-pid{rank}"
            (folder / "window-0").mkdir(parents=True, exist_ok=True)
            path = folder / predict.RECORDER
            path.write_text(json.dumps({"is_complete": is_complete}))
            os.utime(path, (time.time() - age_s,) * 2)
            if has_dry_run:
                (folder / predict.DRY_RUN).touch()
        return 0 if states is None else None

    def end(self, number):
        self.ends.append(number)


WRITES, WAITS, DONE, SILENT = (
    (False, False, 0),
    (True, False, 5),
    (True, True, 0),
    (True, False, 30),
)


@pytest.mark.parametrize(
    ("looks", "num_left"),
    [
        ([[], [WRITES], [WAITS], [DONE], [DONE]], 1),
        # Each rank is waited for, as long as one has written a short while ago.
        ([[DONE, WRITES], [DONE, WAITS], [DONE, DONE], [DONE, DONE]], 1),
        ([[(False, False, 30)], [SILENT], [SILENT]], 1),
        ([[SILENT, WAITS], [SILENT, WRITES], [SILENT, DONE]], 1),
        ([[WAITS], [WAITS]], 0),
    ],
)
def test_a_recording_ends_when_each_rank_has_made_its_dry_run_or_none_writes_any_more(
    tmp_path, monkeypatch, looks, num_left
):
    workload = Recorded(looks, tmp_path / "raw")
    monkeypatch.setattr(predict, "Workload", lambda *of: workload)
    monkeypatch.setattr(predict, "complete", lambda *of: None)
    a = Variant("A", (sys.executable, "train.py"))
    record(a, AbOptions(a.command), tmp_path)
    assert (len(list(workload.looks)), len(workload.ends)) == (num_left, 1)


def test_a_recording_ends_after_five_minutes(tmp_path, monkeypatch):
    now_s = itertools.count(0, 100)
    clock = SimpleNamespace(monotonic=lambda: next(now_s), time=time.time, time_ns=time.time_ns)
    monkeypatch.setattr(predict, "time", clock)
    workload = Recorded([[WRITES]] * 9, tmp_path / "raw")
    monkeypatch.setattr(predict, "Workload", lambda *of: workload)
    monkeypatch.setattr(predict, "complete", lambda *of: None)
    a = Variant("A", (sys.executable, "train.py"))
    record(a, AbOptions(a.command), tmp_path)
    assert len(list(workload.looks)) == 9 - 3


def test_the_end_of_kprof_waits_for_no_analysis(tmp_path, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(predict, "record", lambda a, options, folder: None)
    opened = SimpleNamespace(diagnosis=Diagnosis())
    monkeypatch.setattr(predict, "open_trace", lambda folder: may_end.wait(60) and opened)
    before = set(threading.enumerate())
    result = predictions(Variant("A", ("true",)), AbOptions(("true",)), tmp_path, lambda told: None)
    started = set(threading.enumerate()) - before
    may_end.set()
    assert [one.daemon for one in started] == [True]
    assert result() == ((), "")


def test_a_fault_of_the_analysis_is_raised_where_its_result_is_asked_for(tmp_path, monkeypatch):
    def fail(folder):
        raise ZeroDivisionError

    monkeypatch.setattr(predict, "record", lambda a, options, folder: None)
    monkeypatch.setattr(predict, "open_trace", fail)
    result = predictions(Variant("A", ("true",)), AbOptions(("true",)), tmp_path, lambda told: None)
    with pytest.raises(ZeroDivisionError):
        result()
