"""What compute-sanitizer says of a kernel, read and judged; the tool is a stand-in."""

import os
import re
import subprocess
import sys

import pytest

from kprof.kernels.bench.sanitize import read_log, run_edges, sanitize, sanitized
from kprof.kernels.correctness import Measure, Subject
from kprof.kernels.correctness.levels import judge, not_run

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
BEYOND = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at _forward+0x2a0 in relu_squared.py:40
=========     by thread (96,0,0) in block (3,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= ERROR SUMMARY: 3 errors
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _sum+0x10 and Read access at _sum+0x80
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
TWO_ENDS = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _sum+0x10 in letters.py:7
=========     and Read access at _sum+0x80 in letters.py:9 [64 hazards]
=========
========= Error: Race reported between Write access at _sum+0x10 in letters.py:7
=========     and Read access at _sum+0x80 in letters.py:9 [32 hazards]
=========
========= Error: Race reported between Read access at _sum+0x90 in letters.py:9
=========     and Write access at _sum+0x10 in letters.py:7 [2 hazards]
=========
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""
LEVEL = judge("L0", [Measure("right", 0, 0, None, "faults")], "4 cases")


def stand_in(folder, monkeypatch, log, exit_code=0):
    """Put a compute-sanitizer on the PATH that writes this log."""
    tool = folder / "compute-sanitizer"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({log!r})\n"
        f"print('all at sea', file=sys.stderr)\nsys.exit({exit_code})\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_clean_log_counts_no_error(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, CLEAN)
    found = sanitize("memcheck", "rmsnorm", "kprof")
    assert (found.num_errors, found.what) == (0, "")


@pytest.mark.parametrize(
    ("log", "num_errors", "what"),
    [(BEYOND, 3, "Invalid __global__ read of size 16 bytes"), (RACE, 1, "Error: Race reported")],
    ids=["beyond", "race"],
)
def test_errors_are_counted_and_the_first_is_named(log, num_errors, what):
    found = read_log("memcheck", log, 0, "")
    assert found.num_errors == num_errors
    assert found.what.startswith(what)


def test_a_race_is_named_by_both_ends_and_each_one_once():
    end = re.compile(r"(Write|Read) access at (\S+) in (\S+)")
    write = ("Write", "_sum+0x10", "letters.py:7")
    assert [end.findall(one) for one in read_log("racecheck", TWO_ENDS, 0, "").findings] == [
        [write, ("Read", "_sum+0x80", "letters.py:9")],
        [("Read", "_sum+0x90", "letters.py:9"), write],
    ]


def test_gradients_are_left_out_where_a_provider_has_none(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, CLEAN)
    asked = []

    def run(command, **known):
        asked.append(command)
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    sanitize("memcheck", "fp8_linear", "kprof-wide", are_forward=True)
    assert asked[0][-3:] == ["fp8_linear", "kprof-wide", "forward"]


def test_a_log_that_was_not_ended_says_nothing():
    found = read_log("memcheck", "========= Error: Device not supported\n", 255, "")
    assert found.num_errors is None
    assert "Device not supported" in found.what


def test_a_process_that_failed_by_itself_was_not_looked_at():
    found = read_log("memcheck", CLEAN, 1, "Traceback\nImportError: no quack\n")
    assert found.num_errors is None
    assert "no quack" in found.what


def test_without_the_tool_the_reason_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "PATH" in sanitize("memcheck", "rmsnorm", "kprof").what


def test_an_error_fails_the_level(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, BEYOND)
    level = sanitized(LEVEL, "rmsnorm", "kprof")
    assert level.state == "failed"
    assert "Invalid __global__ read" in level.why


def test_what_could_not_be_looked_at_is_noted_and_fails_nothing(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "", exit_code=255)
    level = sanitized(LEVEL, "rmsnorm", "kprof")
    assert level.state == "passed"
    assert len([note for note in level.notes if "all at sea" in note]) == 2


def test_a_level_that_was_not_run_does_not_pass_by_it(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, CLEAN)
    assert sanitized(not_run("L0", "it takes none"), "rmsnorm", "kprof").state == "not run"


def subject_of(new):
    return Subject(
        name="doubling",
        replaced=lambda x: x * 2,
        new=new,
        truth=lambda x: x * 2,
        inputs=lambda shape, draw: (draw(*shape),),
        shapes=((2, 3), (1, 5)),
        dtypes=("float32",),
        differentiable=(0,),
    )


def test_every_edge_runs_in_every_layout():
    calls = []

    def doubling(x):
        calls.append((tuple(x.shape), x.is_contiguous()))
        return x * 2

    assert run_edges(subject_of(doubling)) == 4
    assert calls == [((2, 3), True), ((2, 3), False), ((1, 5), True), ((1, 5), True)]


def test_code_that_raises_where_the_replaced_code_does_not_is_no_clean_run():
    def broken(x):
        raise ValueError("no rows")

    with pytest.raises(RuntimeError, match="no rows"):
        run_edges(subject_of(broken))
