"""How a trial ends: by itself, by force, by a crash; and what it leaves of its processes."""

import os
import signal
from pathlib import Path

import pytest

from kprof.collect.trials import TrialError
from kprof.errors import LaunchError
from tests.collect.trial_runs import MODEL, run
from tests.quantities import quantities_in

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


@pytest.mark.slow
def test_a_script_that_ends_by_itself_leaves_what_there_was(tmp_path):
    trial = run(tmp_path, MODEL + "serve(40)", "A" * 500, window_s=1e-9)
    assert 0 < len(trial.windows) < 500
    assert trial.exit_code == 0


@pytest.mark.slow
def test_a_script_without_steps_has_its_whole_time(tmp_path):
    trial = run(tmp_path, "import torch, time; time.sleep(0.2)")
    assert (trial.windows, trial.rule, trial.exit_code) == ((), "", 0)
    assert trial.wall_ns >= 200e6
    assert not list((tmp_path / "trial/raw").glob("rank*"))


def test_a_run_is_bounded(tmp_path):
    trial = run(tmp_path, "import torch, time; time.sleep(600)", most_s=0.5)
    assert trial.exit_code is None
    (problem,) = trial.problems
    assert quantities_in(problem) == ["0.5 s"]


@pytest.mark.slow
def test_a_crash_of_the_workload_tells_its_last_words_and_keeps_what_was_measured(tmp_path):
    script = MODEL + "serve(40)\nraise ValueError('bad luck')"
    with pytest.raises(
        TrialError, match=r"^A: .*code 1 .*\n(.*\n)*.*ValueError: bad luck"
    ) as caught:
        run(tmp_path, script, "A" * 500, window_s=1e-9)
    assert caught.value.trial.windows
    assert caught.value.trial.exit_code == 1


@pytest.mark.slow
def test_a_death_by_a_signal_is_named(tmp_path):
    script = MODEL + "serve(9)\nimport os; os.kill(os.getpid(), 11)"
    with pytest.raises(TrialError, match="SIGSEGV"):
        run(tmp_path, script)


def test_a_folder_that_holds_a_trial_is_refused(tmp_path):
    run(tmp_path, "")
    with pytest.raises(LaunchError, match="a trial already"):
        run(tmp_path, "")


def test_a_command_that_is_not_there_is_a_launch_error(tmp_path):
    with pytest.raises(LaunchError, match="cannot be started"):
        run(tmp_path, "", command=("/nonexistent/program",))


LEAVES_CHILDREN = """
import os, subprocess, sys
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
ignoring = subprocess.Popen([sys.executable, "-c", code])
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(ignoring.pid, apart.pid, flush=True)
"""


@pytest.mark.slow
def test_all_that_the_workload_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr("kprof.collect.trials.PATIENCE_S", 0.5)
    trial = run(tmp_path, LEAVES_CHILDREN + MODEL + "serve(10 ** 9)")
    pids = trial.log.read_text().split()
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_what_the_workload_left_behind_ends_as_well(tmp_path):
    trial = run(tmp_path, LEAVES_CHILDREN.replace("signal.signal(15, signal.SIG_IGN); ", ""))
    pids = trial.log.read_text().split()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]


@pytest.fixture
def heard():
    """Ctrl-C, also where tests run in the background, whose processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heard")
def test_ctrl_c_reaches_the_workload_and_the_caller(tmp_path):
    script = (
        MODEL
        + """
try:
    serve(10 ** 9)
except KeyboardInterrupt:
    print("interrupted")
"""
    )
    log = tmp_path / "trial/output.log"

    def interrupt(windows):
        os.kill(os.getpid(), signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, script, "A" * 500, interrupt)
    assert log.read_text() == "interrupted\n"
