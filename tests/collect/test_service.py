"""Recording a process that never ends: windows on demand, each a run of its own."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kprof.collect.service import OpenWindow, Trigger, has_ended
from kprof.errors import LaunchError
from tests.recorded import record_command, recorded_part

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_tiny.py"
PATIENCE_S = 60


def test_a_trigger_is_a_signal_a_file_or_a_number_of_requests():
    assert Trigger.parse("signal") == Trigger("signal")
    assert Trigger.parse("file") == Trigger("file")
    assert Trigger.parse("requests=40") == Trigger("requests", 40)


@pytest.mark.parametrize("text", ["requests", "requests=", "requests=-1", "signal=3", ""])
def test_any_other_trigger_is_an_error_that_lists_them(text):
    with pytest.raises(LaunchError) as error:
        Trigger.parse(text)
    assert error.value.problem.startswith(f"--trigger {text}: ")
    triggers = ("--trigger signal", "--trigger file", "--trigger requests=N")
    assert [trigger for trigger in triggers if trigger not in error.value.fix] == []


def process(**said):
    return {"is_complete": False, "host": platform.node(), "pid": os.getpid(), **said}


def test_a_process_has_ended_when_it_says_so_or_lives_no_more():
    dead = subprocess.Popen(("true",))
    dead.wait()
    assert has_ended(process(is_complete=True))
    assert has_ended(process(pid=dead.pid))
    assert not has_ended(process())


def test_a_process_of_another_machine_is_not_looked_for_on_this_one():
    dead = subprocess.Popen(("true",))
    dead.wait()
    assert not has_ended(process(pid=dead.pid, host="another"))


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def is_over(window, is_wanted=True):
    return window.is_over(is_wanted=is_wanted, order=window.folder / "order")


def test_a_window_is_over_a_second_after_its_last_process_is_complete(tmp_path, clock):
    window = OpenWindow(tmp_path, None)
    recorded_part(tmp_path / "raw", 1, **process(is_complete=True))
    assert not is_over(window)
    clock.now = 0.9
    late = recorded_part(tmp_path / "raw", 2, **process())
    assert not is_over(window)
    clock.now = 9.0
    assert not is_over(window)
    (late / "recorder.json").write_text(json.dumps(process(is_complete=True)))
    assert not is_over(window)
    clock.now = 10.1
    assert is_over(window)


def test_a_window_without_any_process_waits_until_it_is_not_wanted_any_more(tmp_path, clock):
    window = OpenWindow(tmp_path, None)
    clock.now = 9_999.0
    assert not is_over(window)
    assert not is_over(window, is_wanted=False)
    clock.now += 1.1
    assert is_over(window, is_wanted=False)


def test_a_process_that_does_not_end_its_window_is_waited_for_a_minute(tmp_path, clock):
    window = OpenWindow(tmp_path, None)
    recorded_part(tmp_path / "raw", 1, **process())
    assert not is_over(window, is_wanted=False)
    clock.now = 59.0
    assert not is_over(window, is_wanted=False)
    clock.now = 61.0
    assert is_over(window, is_wanted=False)


class Served:
    """The example service under `kprof run`, and its client."""

    def __init__(self, folder, *options, start_method):
        self.folder = folder
        command = (sys.executable, "-m", "kprof", "run", *options, "--out", folder / "s.kprof")
        service = (EXAMPLE, "--port", "0", "--start-method", start_method)
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [*map(str, (*command, *service))], stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        self.url = self.process.stdout.readline().strip()

    def ask(self, num_requests=1):
        for _ in range(num_requests):
            with urllib.request.urlopen(f"{self.url}/2", timeout=PATIENCE_S) as reply:
                assert reply.status == 200

    def ask_until(self, path):
        end = time.monotonic() + PATIENCE_S
        while not path.exists() and time.monotonic() < end:
            self.ask()
            time.sleep(0.01)
        assert path.exists(), self.stderr()

    def stderr(self):
        return (self.folder / "stderr").read_text()

    def end(self):
        self.process.terminate()
        stdout, _ = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, stdout

    def meta(self, name):
        return json.loads((self.folder / name / "meta.json").read_text())["meta"]


@pytest.fixture
def serve(tmp_path):
    """Start the service; it is ended in any case."""
    started = []

    def start(*options, start_method="spawn"):
        started.append(Served(tmp_path, *options, start_method=start_method))
        return started[0]

    yield start
    started[0].end()


@pytest.mark.slow
def test_every_touch_of_the_file_records_the_engine_into_a_run_of_its_own(serve, tmp_path):
    served = serve("--trigger", "file", "--skip", "2")
    served.ask(9)
    (tmp_path / "s.kprof/record").touch()
    served.ask_until(tmp_path / "s.kprof/report.html")
    (tmp_path / "s.kprof/record").touch()
    served.ask_until(tmp_path / "s-2.kprof/report.html")
    assert served.end() == (143, "")
    recorded = served.meta("s.kprof")["recording"]
    assert len(recorded["steps_recorded"]) == 3
    assert recorded["steps_recorded"][0] >= 9 + 2
    assert len(recorded["unrecorded_step_ns"]) == 1
    assert not (tmp_path / "s.kprof/record").exists()
    assert "touch" in served.stderr()


@pytest.mark.slow
def test_a_signal_starts_a_window_and_another_ends_it(serve, tmp_path):
    options = ("--trigger", "signal", "--skip", "0", "--steps", "1000000")
    served = serve(*options, start_method="fork")
    served.ask(3)
    served.process.send_signal(signal.SIGUSR1)
    served.ask_until(next_part(tmp_path))
    served.ask(4)
    served.process.send_signal(signal.SIGUSR1)
    served.ask_until(tmp_path / "s.kprof/report.html")
    assert served.end()[0] == 143
    assert len(served.meta("s.kprof")["recording"]["steps_recorded"]) >= 4


def next_part(folder):
    """Return the record of the first process that takes part, once there is one."""

    class Part:
        def exists(self):
            return any(folder.glob("s.kprof/raw/rank*/recorder.json"))

    return Part()


@pytest.mark.slow
def test_a_window_after_so_many_requests_ends_in_time_though_no_more_come(serve, tmp_path):
    options = ("--trigger", "requests=4", "--seconds", "1", "--steps", "50")
    served = serve(*options)
    served.ask(9)
    end = time.monotonic() + PATIENCE_S
    while not (tmp_path / "s.kprof/report.html").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert served.end()[0] == 143
    assert served.meta("s.kprof")["recording"]["steps_recorded"] == [4, 5, 6, 7, 8]
    assert not (tmp_path / "s-2.kprof").exists()


@pytest.mark.slow
def test_a_service_that_was_not_recorded_leaves_nothing_but_a_message(serve, tmp_path):
    served = serve("--trigger", "file")
    served.ask()
    assert served.end()[0] == 143
    assert "No recording" in served.stderr()
    assert not (tmp_path / "s.kprof").exists()


ENGINE = """
import sys, types, torch
module = types.ModuleType("vllm.v1.worker.gpu_worker")
class Worker:
    def __init__(self):
        self.model, self.sampler = torch.nn.Linear(4, 4).eval(), torch.nn.Linear(4, 2).eval()
    @torch.inference_mode()
    def execute_model(self, batch):
        return self.sampler(self.model(batch))
module.Worker = Worker
sys.modules[module.__name__] = module
worker = Worker()
worker.model(torch.ones(1, 4))
for _ in range(9): worker.execute_model(torch.ones(2, 4))
"""


@pytest.mark.slow
def test_a_step_of_an_engine_is_its_own_and_not_a_call_of_its_models(tmp_path):
    (tmp_path / "engine.py").write_text(ENGINE)
    run = record_command(tmp_path, (sys.executable, str(tmp_path / "engine.py")))
    assert "engine step (Worker.execute_model)" in run.description["step_rule"]
    assert run.description["num_steps_seen"] == 9
    assert run.count("kprof.module#Linear") == 2 * 3
