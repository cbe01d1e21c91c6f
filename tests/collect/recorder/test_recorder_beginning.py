"""What is recorded between the import of torch and the first work."""

import importlib.util
import sys

import pytest

torch = pytest.importorskip("torch")

from kprof.collect.recorder.kprof_recorder import (  # noqa: E402
    AfterImport,
    capture,
    recorder,
)
from kprof.collect.recorder.kprof_recorder.settings import Settings  # noqa: E402


class Trace:
    """A capture that notes what happens to it."""

    can_be_provisional = True
    can_be_stopped_here = True

    def __init__(self, log):
        self.log = log

    def start(self):
        self.log.append("start")

    def cancel(self):
        self.log.append("cancel")

    def stop(self, *, is_last):
        self.log.append("stop")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """Return a function that says of a machine with one GPU whether CUDA is initialized."""
    device = tmp_path / "nvidiactl"
    device.touch()
    monkeypatch.setattr(capture, "GPU_DEVICES", (str(device),))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def say(is_initialized):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)

    say(False)
    return say


@pytest.fixture
def log():
    return []


@pytest.fixture
def recording(monkeypatch, log, tmp_path):
    monkeypatch.setattr(recorder, "new_capture", lambda settings: Trace(log))
    monkeypatch.setattr(recorder, "can_start", lambda: True)
    made = recorder.Recorder(Settings(raw=tmp_path))
    made.on_begun = lambda: log.append("begun")
    return made


def test_a_gpu_that_the_process_has_not_used_is_left_alone(gpu, recording, log):
    recording.begin()
    assert log == []
    assert not recording.problems


def test_the_recording_begins_when_the_workload_itself_initializes_cuda(gpu, recording, log):
    recording.begin()
    recording.cuda_is_ready()
    assert log == ["start", "begun"]


def test_a_recording_begins_again_with_the_gpu_where_none_had_been_seen(
    monkeypatch, gpu, recording, log
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recording.begin()
    recording.cuda_is_ready()
    assert log == ["start", "begun", "cancel", "start", "begun"]


def test_a_recording_that_has_ended_does_not_begin_again(monkeypatch, gpu, recording, log):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    recording.begin()
    recording.end_capture()
    recording.cuda_is_ready()
    assert log == ["start", "begun", "stop"]


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_cannot_be_woken(monkeypatch, gpu, hidden):
    assert capture.would_wake_a_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not capture.would_wake_a_gpu()


def test_a_gpu_in_use_and_a_torch_without_cuda_need_no_care(monkeypatch, gpu):
    gpu(True)
    assert not capture.would_wake_a_gpu()
    gpu(False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not capture.would_wake_a_gpu()


@pytest.fixture
def followed(monkeypatch, tmp_path):
    """Return the modules named `followed` that a finder has seen imported."""
    (tmp_path / "followed.py").write_text("is_done = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [AfterImport(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "followed", raising=False)
    seen = []
    sys.meta_path[0].actions["followed"] = lambda module: seen.append(module.is_done)
    yield seen
    sys.modules.pop("followed", None)


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_module_that_was_looked_for_is_followed_once_it_is_imported(followed, times):
    found = [importlib.util.find_spec("followed") for _ in range(times)]
    assert all(found)
    assert followed == []

    importlib.import_module("followed")

    assert followed == [True]
    assert not any(isinstance(one, AfterImport) for one in sys.meta_path)
