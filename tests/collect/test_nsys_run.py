"""`kprof run --nsys`: the workload inside Nsight Systems, which a stand-in plays here."""

import json
import os
import subprocess
import sys
import time

import pytest

from kprof.collect.nsys import keep_window
from kprof.collect.readers.recorded import reader as recorded
from kprof.errors import LaunchError
from kprof.run import RunOptions, run
from tests.collect.nsys_files import kernel, launch, nvtx, session, write
from tests.quantities import quantities_in

# Runs the command as Nsight Systems does: with words of its own, without a umask, in a session
# of its own. It leaves the report that lies beside it.
STAND_IN = """
import json, os, shutil, subprocess, sys
here, words = os.path.dirname(__file__), sys.argv[1:]
with open(f"{here}/said.json", "w") as file:
    json.dump(words, file)
output = next(w for w in words if w.startswith("--output=")).removeprefix("--output=")
if words[0] == "export":
    sys.exit(0 if shutil.copy(words[-1], output) else 1)
print("Generating", flush=True)
print("a warning", file=sys.stderr, flush=True)
os.umask(0)
command = words[next(i for i, w in enumerate(words[1:], 1) if not w.startswith("--")):]
code = subprocess.run(command, close_fds=False, start_new_session=True).returncode
if os.path.exists(f"{here}/report"):
    shutil.copy(f"{here}/report", output.replace("%%", "%") + ".nsys-rep")
sys.exit(128 - code if code < 0 else code)
"""


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    """A folder with an `nsys` that stands first on the PATH."""
    return install(tmp_path / "bin", STAND_IN, monkeypatch)


def install(folder, program, monkeypatch):
    folder.mkdir()
    (folder / "nsys").write_text(f"#!{sys.executable} -I\n{program}")
    (folder / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def script_in(folder, text):
    (folder / "work.py").write_text(text)
    return folder / "work.py"


def run_nsys(folder, text, *arguments, **options):
    script = script_in(folder, text)
    words = (str(script), *arguments)
    return run(RunOptions(words, out=folder / "50%.kprof", nsys=True, **options))


def kprof_run(folder, *words, **streams):
    command = [sys.executable, "-m", "kprof", "run", "--nsys", "--out", str(folder / "out.kprof")]
    return subprocess.run([*command, *words], capture_output=True, check=False, **streams)


def start(folder, text):
    command = [sys.executable, "-m", "kprof", "run", "--nsys", "--out", str(folder / "o.kprof")]
    return subprocess.Popen(
        [*command, str(script_in(folder, text))],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def await_file(path, process):
    while not path.exists() and process.poll() is None:
        time.sleep(0.05)


def test_nsight_systems_is_asked_for_the_window_alone_and_for_nodes_of_graphs(tmp_path, nsys):
    run_nsys(tmp_path, "pass", "--lr", "3")
    said = json.loads((nsys / "said.json").read_text())
    assert said[0] == "profile"
    assert {"--trace=cuda,nvtx,osrt", "--cuda-graph-trace=node", "--sample=none"} <= {*said}
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=repeat"} <= {*said}
    assert said[-4:] == [sys.executable, str(tmp_path / "work.py"), "--lr", "3"]
    # A % in its output would stand for something else.
    assert f"--output={tmp_path}/50%%.kprof/raw/nsys" in said


def test_streams_and_exit_code_are_the_workloads(tmp_path, nsys):
    text = "import sys; print(sys.stdin.read()); print('oh', file=sys.stderr); sys.exit(7)"
    done = kprof_run(tmp_path, str(script_in(tmp_path, text)), input=b"given")
    assert (done.returncode, done.stdout) == (7, b"given\n")
    assert done.stderr.startswith(b"oh\nkprof: ")
    assert b"a warning" not in done.stderr


def test_a_death_by_a_signal_is_128_and_its_number(tmp_path, nsys):
    assert run_nsys(tmp_path, "import os; os.kill(os.getpid(), 9)").exit_code == 137


def test_the_workload_has_its_own_umask(tmp_path, nsys):
    run_nsys(tmp_path, f"import os; print(os.umask(0), file=open({str(tmp_path / 'mask')!r}, 'w'))")
    before = os.umask(0)
    os.umask(before)
    assert int((tmp_path / "mask").read_text()) == before


def test_a_signal_reaches_the_workload_and_not_what_is_around_it(tmp_path, nsys):
    ready = tmp_path / "ready"
    text = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.3)\n    sys.exit(5)\n"
        f"signal.signal(signal.SIGTERM, end)\nopen({str(ready)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    process = start(tmp_path, text)
    await_file(ready, process)
    process.terminate()
    assert process.wait() == 5


def test_a_signal_ends_what_still_writes_the_trace(tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    stays = f"open({str(ready)!r}, 'w').close()\nimport time; time.sleep(60)\nsys.exit"
    program = STAND_IN.replace("sys.exit(128", f"{stays}(128")
    install(tmp_path / "bin", program, monkeypatch)
    process = start(tmp_path, "pass")
    await_file(ready, process)
    process.terminate()
    assert process.wait(timeout=30) == 143


def test_the_report_of_the_window_becomes_the_runs(tmp_path, nsys):
    write(nsys, kernel(), launch(), nvtx("kprof.step#5"), session(), name="report")
    outcome = run_nsys(tmp_path, "pass")
    assert outcome.trouble is None
    assert outcome.opened.trace.kernels["name"].tolist() == ["gemm"]
    assert outcome.opened.trace.meta.command == (sys.executable, str(tmp_path / "work.py"))
    assert outcome.opened.report.is_file()
    assert (outcome.folder / "raw" / "nsys.nsys-rep").is_file()
    assert not (outcome.folder / "raw" / "nsys.pid").exists()


def test_the_newest_of_several_windows_is_kept(tmp_path, nsys):
    for number, name in ((1, "dropped"), (2, "kept")):
        write(tmp_path, kernel(demangledName=name), name=f"nsys.{number}.nsys-rep")
        os.utime(tmp_path / f"nsys.{number}.nsys-rep", (number, number))
    assert keep_window(tmp_path, is_explained=False) == ()
    assert (tmp_path / "nsys.sqlite").read_bytes() == (tmp_path / "nsys.2.nsys-rep").read_bytes()


def test_a_report_that_cannot_be_exported_is_told_and_kept(tmp_path, monkeypatch):
    install(tmp_path / "bin", "import sys; sys.exit('too new')", monkeypatch)
    (tmp_path / "nsys.nsys-rep").touch()
    (message,) = keep_window(tmp_path, is_explained=False)
    assert [part for part in ("nsys.nsys-rep", "exported", "too new") if part not in message] == []


def test_a_run_without_a_window_says_so_and_leaves_no_folder(tmp_path, nsys):
    outcome = run_nsys(tmp_path, "pass")
    assert outcome.opened is None
    assert any("wrote no report" in message for message in outcome.messages)
    assert not outcome.folder.exists()


@pytest.mark.slow
def test_steps_that_used_no_gpu_are_the_reason_for_no_report(tmp_path, nsys):
    pytest.importorskip("torch")
    text = "import torch\nm = torch.nn.Linear(2, 2).eval()\nfor _ in range(9): m(torch.ones(1, 2))"
    messages = run_nsys(tmp_path, text).messages
    assert any("after the warm-up" in message for message in messages)
    assert not any("wrote no report" in message for message in messages)


@pytest.mark.slow
def test_a_script_that_ends_before_its_window_is_the_reason_for_no_report(tmp_path, nsys):
    pytest.importorskip("torch")
    text = "import torch\nm = torch.nn.Linear(2, 2).eval()\nfor _ in range(4): m(torch.ones(1, 2))"
    messages = run_nsys(tmp_path, text).messages
    assert any("--skip less than 4" in message for message in messages)


def test_without_nsight_systems_nothing_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="not installed here"):
        run_nsys(tmp_path, "raise SystemExit(1)")
    assert not (tmp_path / "50%.kprof").exists()


def test_a_missing_nsight_systems_ends_the_command_with_2(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = kprof_run(tmp_path, str(script_in(tmp_path, "print(1)")), env=environment)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"nsight-systems-cli" in done.stderr


def test_an_nsight_systems_that_cannot_start_the_workload_is_an_error(tmp_path, monkeypatch):
    install(tmp_path / "bin", "import sys; sys.exit('unrecognised option')", monkeypatch)
    with pytest.raises(LaunchError, match=r"workload: unrecognised option"):
        run_nsys(tmp_path, "pass")


@pytest.mark.parametrize("option", ["stacks", "memory"])
def test_what_nsight_systems_does_not_record_is_refused(tmp_path, nsys, option):
    with pytest.raises(LaunchError, match=option):
        run_nsys(tmp_path, "pass", **{option: True})


def test_recording_on_demand_is_refused(tmp_path, nsys):
    done = kprof_run(tmp_path, "--trigger", "signal", str(script_in(tmp_path, "print(1)")))
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"do not go together" in done.stderr


def part(raw, *, rank, pid, steps):
    folder = raw / f"rank{rank}-pid{pid}"
    folder.mkdir(parents=True)
    told = [{"index": i, "start_ns": 0, "end_ns": 9, "recorded": True} for i in steps]
    text = json.dumps({"rank": rank, "pid": pid, "steps": told, "caveats": [], "torch": "2.9"})
    (folder / "recorder.json").write_text(text)


@pytest.fixture
def run_of_two(tmp_path):
    """A run of two ranks, of which one was in its window when the trace was made."""
    raw = tmp_path / "train.kprof" / "raw"
    part(raw, rank=0, pid=300, steps=[5])
    part(raw, rank=1, pid=200, steps=[5])
    (raw / "launch.json").write_text(json.dumps({"command": ["python", "train.py"]}))
    step = nvtx("kprof.step#5", pid=300, tid=300)
    write(raw, kernel(pid=200), kernel(pid=300, start=2000, end=2100), step, name="nsys.sqlite")
    return tmp_path / "train.kprof"


def test_processes_have_the_ranks_that_the_recorder_saw(run_of_two):
    trace = recorded.read(run_of_two)
    assert trace.kernels["rank"].tolist() == [1, 0]
    assert trace.meta.tool == "nsys"
    assert trace.meta.versions["torch"] == "2.9"
    assert trace.meta.recording.steps_recorded == (5,)


def test_steps_that_the_trace_lacks_are_told_by_rank(run_of_two):
    caveats = recorded.read(run_of_two).meta.caveats
    told = [one.text for one in caveats if one.id == "steps_outside_window"]
    assert len(told) == 1
    assert quantities_in(told[0])[:3] == ["1", "1", "0"]
