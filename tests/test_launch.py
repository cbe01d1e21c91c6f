"""How a workload is started and what comes back, without torch."""

import gzip
import json
import os
import sys

import pytest

from kprof.collect.launch import (
    INJECT,
    LaunchOptions,
    command_for,
    compress_parts,
    environment_for,
    launch,
)
from kprof.errors import LaunchError


def run_python(tmp_path, code, *options):
    return launch(LaunchOptions((sys.executable, *options, "-c", code), tmp_path / "run.kprof"))


def test_the_exit_code_is_the_workloads_own(tmp_path):
    assert run_python(tmp_path, "raise SystemExit(7)").exit_code == 7


def test_death_by_a_signal_is_128_and_its_number(tmp_path):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run_python(tmp_path, code).exit_code == 137


def test_a_process_that_never_ran_torch_leaves_no_part_and_a_reason(tmp_path):
    result = run_python(tmp_path, "pass", "-I")
    assert result.parts == ()
    assert "-I, -E or -S" in result.messages[0]


def test_the_launch_is_described(tmp_path):
    result = run_python(tmp_path, "pass")
    description = json.loads((result.raw / "launch.json").read_text())
    assert description["exit_code"] == 0
    assert description["command"][1:] == ["-c", "pass"]
    assert description["ended_ns"] - description["started_ns"] == result.wall_ns


def test_a_folder_that_holds_a_recording_is_refused(tmp_path):
    run_python(tmp_path, "pass")
    with pytest.raises(LaunchError, match="holds a recording already"):
        run_python(tmp_path, "pass")


def test_a_program_that_cannot_start_is_a_launch_error(tmp_path):
    options = LaunchOptions(("/nonexistent/program",), tmp_path / "run.kprof")
    with pytest.raises(LaunchError, match="cannot be started"):
        launch(options)


def test_the_workload_does_not_see_the_recorders_folder_on_its_path(tmp_path):
    code = f"import sys; raise SystemExit({str(INJECT)!r} in sys.path)"
    assert run_python(tmp_path, code).exit_code == 0


def test_a_sitecustomize_of_the_environment_still_runs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.from_the_environment = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import sys; raise SystemExit(sys.from_the_environment + 2)"
    assert run_python(tmp_path, code).exit_code == 3


def test_the_environment_keeps_what_the_caller_set(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/my/code")
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    options = LaunchOptions(("true",), tmp_path, skip=2, steps=4, stacks=True)
    environment = environment_for(options, tmp_path)
    assert environment["PYTHONPATH"] == f"{INJECT}{os.pathsep}/my/code"
    assert environment["KINETO_LOG_LEVEL"] == "1"
    assert (environment["KPROF_SKIP"], environment["KPROF_STEPS"]) == ("2", "4")
    assert (environment["KPROF_STACKS"], environment["KPROF_SHAPES"]) == ("1", "1")


def test_traces_are_compressed_and_the_plain_ones_go(tmp_path):
    part = tmp_path / "rank0-pid1"
    part.mkdir()
    (part / "window-0.json").write_text("{}")
    (part / "recorder.json").write_text("{}")
    assert compress_parts(tmp_path) == (part,)
    assert sorted(path.name for path in part.iterdir()) == ["recorder.json", "window-0.json.gz"]
    assert gzip.decompress((part / "window-0.json.gz").read_bytes()) == b"{}"


def test_a_script_runs_under_this_interpreter(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert command_for((str(script), "--lr", "3")) == (sys.executable, str(script), "--lr", "3")


def test_a_program_on_the_path_runs_as_it_is():
    assert command_for(("sh", "-c", "true")) == ("sh", "-c", "true")


def test_a_module_that_nobody_has_is_an_error():
    with pytest.raises(LaunchError, match="no_such_module_here: no such module"):
        command_for(("no_such_module_here",), is_module=True)


def test_a_command_that_nobody_has_is_an_error():
    with pytest.raises(LaunchError, match="command not found"):
        command_for(("no-such-command-here",))
