"""How a workload is started and what comes back, without torch."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kprof.collect.launch
from kprof.collect.launch import (
    RECORDER,
    LaunchOptions,
    command_for,
    environment_for,
    launch,
    messages_of,
)
from kprof.errors import LaunchError
from tests.quantities import quantities_in
from tests.recorded import LEAN_TORCH, record, recorded_part


def run_python(tmp_path, code, *options):
    return launch(LaunchOptions((sys.executable, *options, "-c", code), tmp_path / "run.kprof"))


def test_the_exit_code_is_the_workloads_own(tmp_path):
    assert run_python(tmp_path, "raise SystemExit(7)").exit_code == 7


def test_a_recorder_that_cannot_start_costs_neither_the_workload_nor_its_exit_code(tmp_path):
    code = """
import sys, time
sys.modules["kprof_recorder.settings"] = None
import torch
time.sleep(0.2)
raise SystemExit(7)
"""
    result = run_python(tmp_path, code)
    assert result.exit_code == 7
    assert result.messages


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
    with pytest.raises(LaunchError, match="already") as error:
        run_python(tmp_path, "pass")
    assert tmp_path.name in error.value.problem


def test_a_program_that_cannot_start_is_a_launch_error(tmp_path):
    options = LaunchOptions(("/nonexistent/program",), tmp_path / "run.kprof")
    with pytest.raises(LaunchError, match="cannot be started"):
        launch(options)


def test_the_workload_does_not_see_the_recorders_folder_on_its_path(tmp_path):
    code = f"import sys; raise SystemExit({str(RECORDER)!r} in sys.path)"
    assert run_python(tmp_path, code).exit_code == 0


def test_a_sitecustomize_of_the_environment_still_runs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.from_the_environment = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import sys; raise SystemExit(sys.from_the_environment + 2)"
    assert run_python(tmp_path, code).exit_code == 3


def test_the_environment_keeps_what_the_caller_set(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/my/code")
    options = LaunchOptions(("true",), tmp_path, skip=2, steps=4, stacks=True)
    environment = environment_for(options, tmp_path)
    assert environment["PYTHONPATH"] == f"{RECORDER}{os.pathsep}/my/code"
    assert (environment["KPROF_SKIP"], environment["KPROF_STEPS"]) == ("2", "4")
    assert (environment["KPROF_STACKS"], environment["KPROF_SHAPES"]) == ("1", "1")


@pytest.mark.parametrize(
    ("nsys", "trigger", "light"), [(False, None, "1"), (True, None, "0"), (False, Path("x"), "0")]
)
def test_only_a_window_of_torchs_profiler_that_opens_once_has_a_light_pass(
    tmp_path, nsys, trigger, light
):
    options = LaunchOptions(("true",), tmp_path, light=True, nsys=nsys)
    assert environment_for(options, tmp_path, trigger)["KPROF_LIGHT"] == light


def without_nvml(tmp_path):
    return SimpleNamespace(problem="no NVML: NVML Shared Library Not Found")


def test_missing_samples_are_no_news_where_no_gpu_was_used(tmp_path):
    recorded_part(tmp_path, 1)
    assert messages_of(without_nvml(tmp_path), tmp_path) == ()


def test_missing_samples_of_a_used_gpu_are_told(tmp_path):
    recorded_part(tmp_path, 1, device_name="NVIDIA H200")
    sampler = without_nvml(tmp_path)
    (message,) = messages_of(sampler, tmp_path)
    assert sampler.problem in message


def test_a_full_disk_after_the_run_is_told_and_the_exit_code_stands(tmp_path, monkeypatch):
    full = "No space left on device"

    def fail(raw):
        raise OSError(28, full)

    monkeypatch.setattr(kprof.collect.launch, "compress_parts", fail)
    result = run_python(tmp_path, "raise SystemExit(7)")
    assert result.exit_code == 7
    assert full in result.messages[-1]


def test_how_a_helper_ended_is_no_news_where_the_run_has_steps(tmp_path, monkeypatch):
    def work(command, environment, **_):
        raw = tmp_path / "run.kprof/raw"
        recorded_part(raw, 1, num_steps_seen=9)
        recorded_part(raw, 2, started_by=1, num_steps_seen=2, problems=["It was killed."])
        return 0

    monkeypatch.setattr(kprof.collect.launch, "run_command", work)
    assert launch(LaunchOptions(("true",), tmp_path / "run.kprof")).messages == ()


def test_the_launch_is_described_before_the_workload_ends(tmp_path):
    launched = tmp_path / "run.kprof/raw/launch.json"
    code = f"import json; raise SystemExit(json.load(open({str(launched)!r}))['exit_code'] is None)"
    assert run_python(tmp_path, code).exit_code == 1


def test_a_script_runs_under_this_interpreter(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert command_for((str(script), "--lr", "3")) == (sys.executable, str(script), "--lr", "3")


def test_a_program_on_the_path_runs_as_it_is():
    assert command_for(("sh", "-c", "true")) == ("sh", "-c", "true")


@pytest.mark.parametrize("name", ["no_such_module_here", "", ".here"])
def test_a_missing_module_is_an_error(name):
    with pytest.raises(LaunchError, match=f"^{re.escape(name)}: .*module"):
        command_for((name,), is_module=True)


def test_a_missing_command_is_an_error():
    with pytest.raises(LaunchError, match="command not found"):
        command_for(("no-such-command-here",))


@pytest.mark.slow
def test_a_run_with_quotes_in_its_ranges_gets_its_report(tmp_path):
    script = (
        "import torch\n"
        "with torch.profiler.record_function('say \"hi\", you'):\n"
        "    torch.ones(64, 64) @ torch.ones(64, 64)\n"
    )
    events = record(tmp_path, script).events
    # Newer versions of torch write them as single ones.
    assert 'say "hi", you' in {event.get("name", "").replace("'", '"') for event in events}


@pytest.mark.slow
def test_compiled_kernels_keep_their_shapes_at_the_price_of_other_threads(monkeypatch):
    capture = pytest.importorskip("kprof.collect.recorder.kprof_recorder.capture")
    monkeypatch.delitem(sys.modules, capture.COMPILED_KERNELS, raising=False)
    assert capture.of_all_threads(memory=False) is not None
    monkeypatch.setitem(sys.modules, capture.COMPILED_KERNELS, sys)
    assert capture.of_all_threads(memory=False) is None


@pytest.mark.slow
def test_memory_and_stacks_are_recorded_where_they_are_asked_for(tmp_path):
    script = "import torch\nx = torch.ones(64, 64)\ny = x @ x\n"
    categories = {e.get("cat") for e in record(tmp_path, script, memory=True, stacks=True).events}
    assert {"cpu_instant_event", "python_function", "cpu_op"} <= categories


STEPPING = f"""{LEAN_TORCH}
import sys
model = torch.nn.Linear(4, 4)
optimizer = SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_the_user_hears_when_the_recording_begins_and_when_it_is_over(tmp_path):
    (tmp_path / "script.py").write_text(STEPPING + "import time\ntime.sleep(2)\n")
    command, heard = (sys.executable, str(tmp_path / "script.py"), "12"), []
    launch(LaunchOptions(command, tmp_path / "run.kprof", steps=2), heard.append)
    first, second = heard
    assert quantities_in(first) == ["2"]
    assert quantities_in(second)[0] == "2"
    (part,) = (tmp_path / "run.kprof" / "raw").glob("rank*")
    opened_ns, written_ns = json.loads((part / "recorder.json").read_text())["window_ns"]
    assert 0 < written_ns - opened_ns < 60e9


EVALUATING_FIRST = f"""{LEAN_TORCH}
import sys, time
model = torch.nn.Linear(4, 4)
optimizer = SGD(model.parameters(), lr=0.1)
for step in range(12):
    model.eval()(torch.ones(2, 4))
time.sleep(0.5)
for step in range(int(sys.argv[1])):
    model.train()(torch.ones(2, 4)).sum().backward()
    optimizer.step()
time.sleep(2)
"""


def test_the_user_hears_that_training_replaces_calls_that_were_recorded_before_it(tmp_path):
    (tmp_path / "script.py").write_text(EVALUATING_FIRST)
    command, heard = (sys.executable, str(tmp_path / "script.py"), "12"), []
    launch(LaunchOptions(command, tmp_path / "run.kprof", steps=2), heard.append)
    assert [quantities_in(told)[0] for told in heard] == ["2"] * 4
    (part,) = (tmp_path / "run.kprof" / "raw").glob("rank*")
    opened_ns, written_ns = json.loads((part / "recorder.json").read_text())["window_ns"]
    took_s = float(quantities_in(heard[-1])[1].removesuffix(" s"))
    assert took_s == pytest.approx((written_ns - opened_ns) / 1e9, rel=0.01)


def test_a_workload_with_an_optimizer_is_not_ended_before_its_training_is_recorded(tmp_path):
    done = record(tmp_path, EVALUATING_FIRST, "1000000000", steps=2, stops_after_recording=True)
    assert done.result.exit_code == 0
    assert done.description["optimizer"] is not None
    assert len(done.recorded_steps()) == 2


@pytest.mark.parametrize("work", ["ones @ ones", "with kprof.profile(sys.argv[1]): ones @ ones"])
def test_no_number_of_steps_is_announced_where_steps_do_not_end_the_recording(tmp_path, work):
    script = f"{LEAN_TORCH}\nimport sys, time, kprof\nones = torch.ones(8, 8)\n{work}\n"
    (tmp_path / "script.py").write_text(script + "time.sleep(0.5)\n")
    command = (sys.executable, str(tmp_path / "script.py"), str(tmp_path / "block.kprof"))
    heard = []
    launch(LaunchOptions(command, tmp_path / "run.kprof"), heard.append)
    assert len(heard) >= 1
    assert [told for told in heard if quantities_in(told) and "step" in told] == []


def test_the_user_hears_how_many_steps_there_were_where_the_warm_up_never_ended(tmp_path):
    (tmp_path / "script.py").write_text(STEPPING)
    command, heard = (sys.executable, str(tmp_path / "script.py"), "4"), []
    launch(LaunchOptions(command, tmp_path / "run.kprof"), heard.append)
    (part,) = (tmp_path / "run.kprof" / "raw").glob("rank*")
    steps = json.loads((part / "recorder.json").read_text())["steps"]
    number = sum(step["recorded"] for step in steps)
    assert number > 0
    assert [quantities_in(told) for told in heard] == [[str(number)]]


def test_a_message_stands_below_a_progress_bar_that_is_open(tmp_path):
    bar = "import tqdm\nbar = tqdm.tqdm(total=12)\n"
    (tmp_path / "script.py").write_text(bar + STEPPING + "import time\ntime.sleep(1)\n")
    command, heard = (sys.executable, str(tmp_path / "script.py"), "12"), []
    launch(LaunchOptions(command, tmp_path / "run.kprof", steps=2), heard.append)
    assert [told.startswith("\n") for told in heard] == [True, True]


def test_a_workload_is_ended_after_its_recording_where_that_was_asked_for(tmp_path):
    done = record(tmp_path, STEPPING, "1000000000", steps=2, stops_after_recording=True)
    assert done.result.exit_code == 0
    assert len(done.recorded_steps()) == 2
    description = json.loads((done.result.raw / "launch.json").read_text())
    assert description["exit_code"] == 0


def test_a_workload_that_ends_before_is_not_ended(tmp_path):
    script = STEPPING + "sys.exit(7)\n"
    done = record(tmp_path, script, "2", steps=2, stops_after_recording=True)
    assert done.result.exit_code == 7
