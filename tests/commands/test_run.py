"""What `kprof run` starts and where it writes."""

import sys

import pytest

import kprof.opened
from kprof.collect.launch import LaunchResult
from kprof.errors import LaunchError
from kprof.run import RunOptions, command_of, launch_options, name_of, report_on, run
from kprof.storage import make_folder, remove_empty


def test_a_script_runs_under_this_interpreter_with_its_arguments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    options = RunOptions(("train.py", "--lr", "3", "--", "-m"))
    assert command_of(options) == (sys.executable, "train.py", "--lr", "3", "--", "-m")


def test_a_module_runs_as_python_runs_it():
    options = RunOptions(("json.tool", "x"), form="module")
    assert command_of(options) == (sys.executable, "-m", "json.tool", "x")


def test_a_command_runs_as_it_is():
    options = RunOptions((sys.executable, "train.py"), form="command")
    assert command_of(options) == (sys.executable, "train.py")


def test_a_missing_script_is_an_error_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"^train\.py: "):
        command_of(RunOptions(("train.py",)))


def test_run_folders_are_numbered_and_never_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [make_folder("train", None, force=False).name for _ in range(3)]
    assert made == ["train.kprof", "train-2.kprof", "train-3.kprof"]


def test_an_existing_folder_is_refused_without_force(tmp_path):
    (tmp_path / "raw").mkdir()
    with pytest.raises(LaunchError, match=str(tmp_path)) as error:
        make_folder("train.py", tmp_path, force=False)
    assert "--force" in error.value.fix
    assert (tmp_path / "raw").is_dir()


def test_force_empties_a_former_run(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "launch.json").touch()
    make_folder("train.py", tmp_path, force=True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "run.kprof"
    with pytest.raises(LaunchError, match=str(out)):
        make_folder("train.py", out, force=False)


def test_a_report_that_cannot_be_written_leaves_the_workloads_exit_code(tmp_path, monkeypatch):
    def fail(folder, progress):
        raise full

    full = OSError(28, "No space left on device")
    monkeypatch.setattr(kprof.opened, "open_recorded", fail)
    launched = LaunchResult(7, tmp_path / "raw", 1, (tmp_path / "raw/rank0-pid1",), ())
    outcome = report_on(launched, tmp_path, lambda stage: None)
    assert outcome.exit_code == 7
    assert str(full) in outcome.trouble.problem
    assert f"kprof open {tmp_path} --force" in outcome.trouble.fix


def test_ctrl_c_amid_the_report_leaves_the_exit_code_and_the_recording(tmp_path, monkeypatch):
    def interrupt(folder, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr(kprof.opened, "open_recorded", interrupt)
    launched = LaunchResult(7, tmp_path / "raw", 1, (tmp_path / "raw/rank0-pid1",), ())
    outcome = report_on(launched, tmp_path, lambda stage: None)
    assert (outcome.exit_code, outcome.opened) == (7, None)
    assert outcome.trouble.fix == f"kprof open {tmp_path} --force"


def test_ctrl_c_after_the_workload_says_how_to_open_its_recording(tmp_path, monkeypatch):
    def interrupt(options, say):
        raise KeyboardInterrupt

    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr("kprof.run.launch", interrupt)
    outcome = run(RunOptions((str(script),), "script", tmp_path / "train.kprof"))
    assert (outcome.exit_code, outcome.opened) == (130, None)
    assert f"kprof open {tmp_path / 'train.kprof'} --force" in outcome.trouble.fix


def test_where_nothing_was_recorded_the_launchers_message_is_enough(tmp_path):
    launched = LaunchResult(7, tmp_path / "raw", 1, (), ("No process reported a recording.",))
    outcome = report_on(launched, tmp_path, lambda stage: None)
    assert (outcome.opened, outcome.trouble) == (None, None)
    assert outcome.messages == launched.messages


def test_force_never_empties_a_folder_that_is_not_a_run(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "images.bin").touch()
    (tmp_path / "meta.json").touch()
    with pytest.raises(LaunchError, match=str(tmp_path)):
        make_folder("train.py", tmp_path, force=True)
    assert (tmp_path / "raw" / "images.bin").exists()


def test_force_replaces_the_run_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    former = make_folder("train", None, force=False)
    (former / "raw").mkdir()
    (former / "raw" / "launch.json").touch()
    assert make_folder("train", None, force=True) == former
    assert list(former.iterdir()) == []


def test_a_run_is_called_after_its_script_or_the_last_part_of_its_module():
    assert name_of(RunOptions(("src/train.py", "x"))) == "train"
    assert name_of(RunOptions(("package.train",), form="module")) == "train"


def test_a_run_that_recorded_nothing_leaves_no_folder_but_whatever_else_lies_there(tmp_path):
    for name in ("empty.kprof", "kept.kprof"):
        (tmp_path / name / "raw").mkdir(parents=True)
        (tmp_path / name / "raw" / "launch.json").touch()
    (tmp_path / "kept.kprof" / "notes.txt").touch()
    remove_empty(tmp_path / "empty.kprof")
    remove_empty(tmp_path / "kept.kprof")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.kprof"]


def test_a_program_that_there_is_not_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"^no_such_program: "):
        run(RunOptions(("no_such_program",), "command"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("counters", "light"), [(False, True), (True, False)])
def test_a_light_pass_is_asked_for_where_no_counters_have_the_windows_times(
    tmp_path, counters, light
):
    options = RunOptions(("train.py",), counters=counters)
    assert launch_options(options, ("python", "train.py"), tmp_path).light is light
