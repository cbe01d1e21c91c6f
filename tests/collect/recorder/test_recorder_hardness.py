"""The recorder under scripts that make it hard: they die, profile and thread themselves."""

import os
from pathlib import Path

import pytest

from tests.recorded import MODEL, record

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from kprof.collect.recorder.kprof_recorder import capture  # noqa: E402
from kprof.collect.recorder.kprof_recorder.capture import Capture  # noqa: E402
from kprof.collect.recorder.kprof_recorder.quiet import Quiet  # noqa: E402
from kprof.collect.recorder.kprof_recorder.ranks import rank, world_size  # noqa: E402
from kprof.collect.recorder.kprof_recorder.settings import Settings  # noqa: E402

TRAIN = """
import os, threading
def train(num, at_step=lambda step: None):
    model = Llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num):
        at_step(step)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
def infer(num, at_step=lambda step: None):
    model.eval()
    for step in range(num):
        at_step(step)
        model(torch.ones(2, 4))
"""


@pytest.mark.slow
def test_a_complete_window_outlives_a_process_that_is_killed(tmp_path):
    killed = "infer(20, lambda step: os.kill(os.getpid(), 9) if step == 15 else None)\n"
    run = record(tmp_path, MODEL + TRAIN + killed)
    assert run.result.exit_code == 137
    assert run.recorded_steps() == [5, 6, 7]
    assert run.result.messages == ()
    assert not run.description["is_count_final"]


@pytest.mark.slow
def test_a_process_that_leaves_amid_its_window_is_told_how_to_record_sooner(tmp_path):
    leaving = "infer(20, lambda step: os._exit(5) if step == 7 else None)\n"
    result = record(tmp_path, MODEL + TRAIN + leaving).result
    assert (result.exit_code, result.parts) == (5, ())
    parts = ("os._exit", "SIGKILL", "--skip 0 --steps 1")
    assert [part for part in parts if part not in result.messages[0]] == []


@pytest.mark.slow
def test_steps_after_the_window_are_counted_where_os_exit_ends_the_process(tmp_path):
    run = record(tmp_path, MODEL + TRAIN + "train(30)\nos._exit(5)\n")
    assert (run.result.exit_code, run.description["num_steps_seen"]) == (5, 30)
    assert run.description["is_count_final"]


@pytest.mark.slow
def test_os_exit_waits_for_nothing_that_another_thread_holds(tmp_path):
    held = """
from kprof_recorder import start
thread = threading.Thread(target=start.session.recorder.lock.acquire)
train(30)
thread.start()
thread.join()
os._exit(5)
"""
    run = record(tmp_path, MODEL + TRAIN + held)
    assert (run.result.exit_code, run.description["num_steps_seen"]) == (5, 8)
    assert not run.description["is_count_final"]


@pytest.mark.slow
def test_a_profiler_that_will_not_stop_is_told_and_the_script_goes_on(tmp_path):
    sabotage = """
from torch.profiler import profile
def fail(self):
    raise RuntimeError("CUPTI is gone")
infer(7, lambda step: setattr(profile, "stop_trace", fail) if step == 5 else None)
infer(19)
"""
    result = record(tmp_path, MODEL + TRAIN + sabotage).result
    assert result.exit_code == 0
    assert "not be stopped" in result.messages[0]
    assert "CUPTI is gone" in result.messages[0]


@pytest.mark.slow
def test_a_window_that_the_profiler_loses_is_recorded_again(tmp_path):
    once = """
from torch.profiler import profile
stop = profile.stop_trace
def fail_once(self):
    profile.stop_trace = stop
    stop(self)
    raise RuntimeError("inserted.second")
infer(19, lambda step: setattr(profile, "stop_trace", fail_once) if step == 5 else None)
"""
    run = record(tmp_path, MODEL + TRAIN + once)
    assert run.recorded_steps() == [8, 9, 10]
    assert "inserted.second" in run.description["caveats"][0]


@pytest.mark.slow
def test_a_script_that_profiles_itself_all_the_time_is_told_why_nothing_is_recorded(tmp_path):
    profiled = "with torch.profiler.profile(): infer(12)\n"
    result = record(tmp_path, MODEL + TRAIN + profiled).result
    assert result.parts == ()
    assert "torch's profiler itself" in result.messages[0]


THREADED = """
first = threading.Thread(target=lambda: model(torch.ones(3, 4)))
first.start()
first.join()
second = threading.Thread(target=train, args=(12,))
second.start()
second.join()
"""


@pytest.mark.slow
def test_steps_on_another_thread_than_the_first_are_recorded(tmp_path, capfd):
    run = record(tmp_path, MODEL + TRAIN + THREADED)
    assert capfd.readouterr().err == ""
    assert len(run.recorded_steps()) == 3
    assert run.count("aten::addmm") == 3 * 2


POOLED = """
from concurrent.futures import ThreadPoolExecutor
model.eval()
with ThreadPoolExecutor(2) as pool:
    for _ in range(9):
        pool.submit(model, torch.ones(3, 4)).result()
"""


@pytest.mark.slow
def test_threads_begin_the_work_where_the_trace_is_the_main_threads_alone(tmp_path, capfd):
    run = record(tmp_path, MODEL + POOLED, memory=True)
    assert capfd.readouterr().err == ""
    assert run.description["problems"] == []
    assert run.recorded_steps() == [5, 6, 7]


class Profile:
    """A profile that notes whether CUPTI is left where it stops, and writes `text`."""

    text, left = "", None

    def __init__(self, **options):
        pass

    def prepare_trace(self):
        pass

    start_trace = prepare_trace

    def stop_trace(self):
        Profile.left = os.environ.get("TEARDOWN_CUPTI")

    def export_chrome_trace(self, path):
        Path(path).write_text(self.text)


def test_a_trace_without_its_end_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(capture, "profile", Profile)
    trace = tmp_path / "window-0.json"
    monkeypatch.setattr(Profile, "text", '{"traceEvents": [\n{"ph": "X", "name": "aten::')
    with pytest.raises(OSError, match="disk full"):
        Capture(Settings(tmp_path)).export(trace)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Profile, "text", '{"traceEvents": [\n{"ph": "X"}\n]}\n')
    Capture(Settings(tmp_path)).export(trace)
    assert list(tmp_path.iterdir()) == [trace]


def detached(monkeypatch, cuda):
    """Return how CUPTI is left where the last recording stops, and afterwards."""
    monkeypatch.setattr(capture, "profile", Profile)
    monkeypatch.setattr(capture, "used_devices", lambda: [0])
    monkeypatch.setattr(capture, "synchronize", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    last = Capture(Settings(Path("raw")))
    last.start()
    last.stop(is_last=True)
    return Profile.left, os.environ.get("TEARDOWN_CUPTI")


def test_the_last_recording_lets_go_of_cupti_and_leaves_no_trace_of_that(monkeypatch):
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    assert detached(monkeypatch, "13.0") == ("1", None)


def test_cupti_is_held_where_letting_go_may_crash_or_the_user_wants_it(monkeypatch):
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    assert detached(monkeypatch, "12.4") == (None, None)
    assert detached(monkeypatch, None) == (None, None)
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    assert detached(monkeypatch, "13.0") == ("0", "0")


def launched_with(monkeypatch, **environment):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return rank(), world_size()


def test_a_process_has_the_rank_that_its_launcher_gave_it(monkeypatch):
    of_mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    assert launched_with(monkeypatch, **of_mpi) == (3, 4)


def test_torchruns_rank_goes_before_that_of_the_job_around_it(monkeypatch):
    nested = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "RANK": "5", "WORLD_SIZE": "8"}
    assert launched_with(monkeypatch, **nested) == (5, 8)


def test_a_batch_script_that_starts_one_process_is_no_rank_of_its_jobs_tasks(monkeypatch):
    assert launched_with(monkeypatch, SLURM_PROCID="0", SLURM_NTASKS="8") == (0, 1)


def test_only_what_torch_says_of_the_recorders_own_work_is_silenced(capfd):
    with Quiet(), Quiet():
        torch._C._autograd._disable_profiler()
    assert capfd.readouterr().err == ""
    torch._C._autograd._disable_profiler()
    assert "no active profiling" in capfd.readouterr().err


@pytest.mark.slow
def test_a_recording_that_kineto_ended_by_itself_says_so(tmp_path):
    script = "torch.autograd._is_kineto_stopped = lambda: True\ntorch.cuda.is_initialized = bool\n"
    ending = """
from kprof_recorder.capture import Capture
Capture.has_cuda = property(lambda self: True, lambda self, value: None)
infer(12)
"""
    run = record(tmp_path, MODEL + TRAIN + script + ending)
    assert any("buffers were full" in text for text in run.description["caveats"])


SPAWNING = """
import multiprocessing, torch
def is_term_caught():
    status = open("/proc/self/status").read()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> 14 & 1)
def tell(pipe):
    pipe.send(is_term_caught())
if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=tell, args=(there,))
    process.start()
    print(is_term_caught(), here.recv())
    process.join()
"""


@pytest.mark.slow
def test_sigterm_ends_a_spawned_process_at_once_as_it_may_wait_where_python_hears_nothing(
    tmp_path, capfd
):
    record(tmp_path, SPAWNING)
    assert capfd.readouterr().out == "True False\n"
