"""What `kprof run` starts and where it writes."""

import sys

import pytest

from kprof.errors import LaunchError
from kprof.run import RunOptions, command_of, prepare_folder


def test_a_script_runs_under_this_interpreter_with_its_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = RunOptions(("train.py", "--lr", "3", "--", "-m"))
    assert command_of(options) == (sys.executable, "train.py", "--lr", "3", "--", "-m")


def test_a_module_runs_as_python_runs_it():
    options = RunOptions(("json.tool", "x"), form="module")
    assert command_of(options) == (sys.executable, "-m", "json.tool", "x")


def test_a_command_runs_as_it_is():
    options = RunOptions(("torchrun", "train.py"), form="command")
    assert command_of(options) == ("torchrun", "train.py")


def test_a_missing_script_is_an_error_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"train\.py: no such script"):
        command_of(RunOptions(("train.py",)))


def test_run_folders_are_numbered_and_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [prepare_folder(RunOptions(("src/train.py",))).name for _ in range(3)]
    assert made == ["train.kprof", "train-2.kprof", "train-3.kprof"]


def test_an_existing_folder_is_refused_without_force(tmp_path):
    (tmp_path / "raw").mkdir()
    with pytest.raises(LaunchError, match="exists already"):
        prepare_folder(RunOptions(("train.py",), out=tmp_path))


def test_force_empties_a_former_run(tmp_path):
    (tmp_path / "raw").mkdir()
    prepare_folder(RunOptions(("train.py",), out=tmp_path, force=True))
    assert list(tmp_path.iterdir()) == []


def test_force_never_empties_a_folder_that_is_not_a_run(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(LaunchError, match="not a run folder"):
        prepare_folder(RunOptions(("train.py",), out=tmp_path, force=True))
    assert (tmp_path / "thesis.tex").exists()
