"""Under Nsight Systems the recorder marks the window and names its ranges; it records nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kprof.collect.launch import RECORDER  # noqa: E402
from kprof.collect.recorder.kprof_recorder import named_ranges  # noqa: E402
from kprof.collect.recorder.kprof_recorder.settings import Settings  # noqa: E402
from tests.recorded import LEAN_TORCH  # noqa: E402

# A GPU that does nothing and says what it is asked for.
PRETENCE = f"""{LEAN_TORCH}
import contextlib
from kprof_recorder import capture, hooks, named_ranges, recorder
from types import SimpleNamespace

def say(*words):
    print(*words, flush=True)

class Event:
    def __init__(self, enable_timing):
        pass
    def record(self):
        pass
    def query(self):
        return False

@contextlib.contextmanager
def operators(record_shapes):
    say("operators, shapes", record_shapes)
    yield
    say("no operators")

cuda = torch.cuda
cuda.is_initialized, cuda.is_current_stream_capturing = lambda: True, lambda: False
cuda.current_device = cuda.device_count = lambda: 0
cuda.synchronize = lambda device=None: None
cuda.get_device_name, cuda.Event = lambda: "pretended", Event
cuda.profiler = SimpleNamespace(start=lambda: say("start"), stop=lambda: say("stop"))
cuda.nvtx = SimpleNamespace(range_push=lambda name: say("+", name), range_pop=lambda: say("-"))
capture.emit_nvtx = operators
named_ranges.Range = hooks.Range = recorder.Range = named_ranges.PlainNvtxRange
hooks.open_range, hooks.close_range = named_ranges._open, named_ranges._close
torch.autograd.profiler._prepare_profiler = lambda *given: say("torch's profiler")
torch.autograd.profiler._enable_profiler = lambda *given: say("torch's profiler")
model = torch.nn.Linear(2, 2).eval()

def call():
    model(torch.ones(1, 2))
"""
STEP = ["+ kprof.phase#forward", "+ kprof.module#Linear", "-", "-", "-"]


def said_by(folder, text, **environment):
    script = folder / "work.py"
    script.write_text(PRETENCE + text)
    settings = Settings(raw=folder / "raw", skip=2, steps=1, tracer="nsys")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={
            **{key: value for key, value in os.environ.items() if key != "LOCAL_RANK"},
            **settings.to_environment(),
            "PYTHONPATH": f"{RECORDER}:{Path(__file__).parents[3]}",
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_window_is_marked_and_its_ranges_are_named(tmp_path):
    assert said_by(tmp_path, "for _ in range(5): call()") == [
        *("start", "operators, shapes True", "+ kprof.step#2"),
        *STEP,
        *("no operators", "stop"),
    ]


@pytest.mark.slow
def test_operators_have_no_shapes_where_none_were_requested(tmp_path):
    said = said_by(tmp_path, "for _ in range(5): call()", KPROF_SHAPES="0")
    assert "operators, shapes False" in said


@pytest.mark.slow
@pytest.mark.parametrize(("leader", "is_leader"), [("0", False), ("1", True)])
def test_one_rank_marks_the_window_for_all(tmp_path, leader, is_leader):
    environment = {"LOCAL_RANK": "1", "KPROF_LEADER": leader}
    said = said_by(tmp_path, "for _ in range(5): call()", **environment)
    assert "+ kprof.step#2" in said
    assert ("start" in said, "stop" in said) == (is_leader, is_leader)


@pytest.mark.slow
def test_a_window_that_the_script_does_not_finish_is_closed_at_its_end(tmp_path):
    said = said_by(tmp_path, "for _ in range(5): call()", KPROF_STEPS="100")
    assert said[-2:] == ["no operators", "stop"]


def test_a_window_in_which_the_process_dies_is_said_to_be_cut_off(tmp_path):
    said_by(tmp_path, "import os\nfor _ in range(3): call()\nos._exit(0)", KPROF_STEPS="100")
    (recorder,) = tmp_path.glob("raw/rank0-pid*/recorder.json")
    assert "Nsight Systems ends" in json.loads(recorder.read_text())["problems"][0]


def test_a_window_before_the_training_is_followed_by_another(tmp_path):
    text = """
for _ in range(6): call()
model.train()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""
    said = said_by(tmp_path, text)
    assert [word for word in said if word in ("start", "stop")] == ["start", "stop"] * 2
    assert "+ kprof.phase#backward" in said


def test_nothing_is_marked_before_cuda_is_used(tmp_path):
    text = "cuda.is_initialized = lambda: False\nfor _ in range(5): call()"
    assert said_by(tmp_path, text) == []


def test_a_window_waits_for_cuda(tmp_path):
    text = """
cuda.is_initialized = lambda: False
for _ in range(4): call()
cuda.is_initialized = lambda: True
for _ in range(4): call()
"""
    assert said_by(tmp_path, text)[:3] == ["start", "operators, shapes True", "+ kprof.step#4"]


def test_the_settings_pass_through_the_environment():
    settings = Settings(Path("raw"), tracer="nsys", leader="3")
    assert Settings.from_environment(settings.to_environment()) == settings


def test_ranges_go_to_nvtx_alone_where_torch_writes_its_own_there(monkeypatch):
    monkeypatch.setattr(torch._C, "_nvtx", object(), raising=False)
    environment = {"KPROF_TRACER": "nsys", "NVTX_INJECTION64_PATH": "/nsys.so"}
    assert named_ranges.range_type(environment) is named_ranges.PlainNvtxRange
