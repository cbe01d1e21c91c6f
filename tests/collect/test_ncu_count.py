"""`kprof ncu`: a run counted by Nsight Compute, which a stand-in plays here."""

import gzip
import json
import os
import sys

import pytest

from kprof.collect.readers.ncu.join import function_in
from kprof.collect.readers.ncu.program import REPORT
from kprof.collect.readers.recorded import reader as recorded
from kprof.errors import KprofError, LaunchError
from kprof.run import RunOptions, count, run, run_service, window_of
from tests.kineto_files import kernel, operator
from tests.ncu_files import DRAM, DURATION, SM, launch, raw_page
from tests.quantities import quantities_in
from tests.traces import analyzed_trace_of

# Starts the workload as Nsight Compute does, and leaves the report that lies beside it.
STAND_IN = """
import json, os, shutil, subprocess, sys
here, words = os.path.dirname(__file__), sys.argv[1:]
if words == ["--query-metrics"]:
    print("sm__pipe_tensor_op_hmma_cycles_active   cycle   of the pipe")
    print("sm__pipe_tensor_op_hmma_cycles_active_realtime   cycle   of the pipe")
    if os.path.exists(f"{here}/counts_all_pipes"):
        print("sm__pipe_tensor_cycles_active   cycle   of all of them")
    sys.exit()
if words[0] == "--import":
    sys.exit(print(open(words[1]).read(), end=""))
command = words[next(i for i, w in enumerate(words) if not w.startswith("--")):]
with open(f"{here}/said.json", "w") as file:
    json.dump({"words": words, "environment": dict(os.environ), "cwd": os.getcwd()}, file)
if os.path.exists(f"{here}/error"):
    sys.exit(open(f"{here}/error").read())
subprocess.run(command)
export = next(w for w in words if w.startswith("--export=")).removeprefix("--export=")
if os.path.exists(f"{here}/report"):
    shutil.copy(f"{here}/report", export % ())
"""

NAME = "void at::native::add_kernel<4, (anonymous namespace)::Add<float>>(int, float)"
COUNTED = {DRAM: "81.5", SM: "10", "dram__bytes_read.sum": "400", "dram__bytes_write.sum": "100"}
LARGE, SMALL = {"grid": "(8, 1, 1)"}, {"grid": "(1, 1, 1)"}


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A folder with an `ncu` that stands first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ncu").write_text(f"#!{sys.executable} -I\n{STAND_IN}")
    (folder / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def report(folder, *launches):
    (folder / "report").write_text(raw_page(*launches))


def said(folder):
    return json.loads((folder / "said.json").read_text())


def on_gpu(name, ts, grid=(8, 1, 1), dur=2.0):
    args = {"device": 0, "stream": 7, "correlation": 1, "grid": list(grid), "block": [128, 1, 1]}
    return kernel(name=name, ts=ts, dur=dur, args=args)


def run_in(folder, *kernels, steps=(5, 6), command=("true",)):
    """Make a run folder as `kprof run` leaves it."""
    raw = folder / "50%.kprof" / "raw"
    part = raw / "rank0-pid9"
    part.mkdir(parents=True)
    launched = {"command": list(command), "cwd": str(folder), "started_ns": 1, "ended_ns": 5}
    (raw / "launch.json").write_text(json.dumps({**launched, "exit_code": 0}))
    marked = [{"index": i, "start_ns": 0, "end_ns": 9, "recorded": True} for i in steps]
    (part / "recorder.json").write_text(json.dumps({"rank": 0, "skip": 5, "steps": marked}))
    content = {"traceEvents": [operator(), *kernels]}
    (part / "window-0.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    return raw.parent


def test_each_launch_gets_what_was_counted_of_the_launch_in_its_place(tmp_path, ncu):
    folder = run_in(tmp_path, *(on_gpu(NAME, ts) for ts in (10, 20, 30)))
    second = {**COUNTED, DRAM: "40"}
    report(ncu, launch("add_kernel", metrics=COUNTED), launch("add_kernel", metrics=second))
    kernels = count(folder).trace.kernels
    assert kernels["dram_percent"].tolist()[:2] == [81.5, 40.0]
    assert kernels["dram_read_bytes"].tolist()[:2] == [400, 400]
    assert kernels[["dram_percent", "dram_read_bytes"]].iloc[2].isna().all()


def test_times_stay_those_of_the_recording(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    report(ncu, launch("add_kernel", metrics={DURATION: "999999"}))
    assert count(folder).trace.kernels["duration_ns"].tolist() == [2000]


def test_launches_over_another_grid_are_other_launches(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10), on_gpu(NAME, 20, grid=(1, 1, 1)))
    small = launch("add_kernel", metrics={**COUNTED, DRAM: "5"}, **SMALL)
    report(ncu, small, launch("add_kernel", metrics=COUNTED, **LARGE))
    assert count(folder).trace.kernels["dram_percent"].tolist() == [81.5, 5.0]


def test_launches_without_counterpart_are_told(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    report(ncu, launch("add_kernel", metrics=COUNTED), launch("mul_kernel", metrics=COUNTED))
    opened = count(folder)
    (told,) = [one.text for one in opened.trace.meta.caveats if one.id == "unmatched_counts"]
    assert quantities_in(told) == ["1", "2"]


def test_a_run_that_was_counted_keeps_it_when_opened_again(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    report(ncu, launch("add_kernel", metrics=COUNTED))
    count(folder)
    assert recorded.read(folder).kernels["dram_percent"].tolist() == [81.5]


def test_the_first_recorded_step_of_the_same_command_is_profiled(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10), command=("touch", "made"))
    report(ncu, launch("add_kernel", metrics=COUNTED))
    count(folder)
    words, environment = said(ncu)["words"], said(ncu)["environment"]
    assert words[-2:] == ["touch", "made"]
    assert (tmp_path / "made").is_file()
    assert "--profile-from-start=off" in words
    assert (environment["KPROF_SKIP"], environment["KPROF_STEPS"]) == ("5", "1")
    assert environment["KPROF_TRACER"] == "nsys"


def test_clocks_are_left_alone_and_caches_flushed(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    report(ncu, launch("add_kernel", metrics=COUNTED))
    count(folder)
    assert {"--clock-control=none", "--cache-control=all"} <= set(said(ncu)["words"])


def test_the_tensor_pipes_of_this_gpu_are_asked_for(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    report(ncu, launch("add_kernel", metrics=COUNTED))
    count(folder)
    (metrics,) = [word for word in said(ncu)["words"] if word.startswith("--metrics=")]
    pipes = [name for name in metrics.split(",") if "tensor" in name]
    assert pipes == ["sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed"]


def test_where_one_metric_is_of_all_tensor_pipes_no_other_is_asked_for(tmp_path, ncu):
    (ncu / "counts_all_pipes").touch()
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    report(ncu, launch("add_kernel", metrics=COUNTED))
    count(folder)
    (metrics,) = [word for word in said(ncu)["words"] if word.startswith("--metrics=")]
    pipes = [name for name in metrics.split(",") if "tensor" in name]
    assert pipes == ["sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"]


def test_a_recording_without_steps_is_profiled_from_its_start(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10), steps=())
    report(ncu, launch("add_kernel", metrics=COUNTED))
    count(folder)
    assert "--profile-from-start=off" not in said(ncu)["words"]
    assert "KPROF_RAW" not in said(ncu)["environment"]


def test_the_functions_that_take_most_time_are_profiled(tmp_path):
    trace = analyzed_trace_of(
        {"name": "a", "duration_ns": 10},
        {"name": "b<1>", "duration_ns": 20},
        {"name": "b<2>", "duration_ns": 20},
        {"name": "c", "duration_ns": 30},
    )
    assert window_of(trace, 2, 99).functions == ("b", "c")


def test_collectives_and_copies_are_not_run_alone(tmp_path):
    trace = analyzed_trace_of(
        {"name": "ncclDevKernel", "kind": "collective", "duration_ns": 900},
        {"name": "Memcpy DtoD", "activity": "memcpy", "duration_ns": 900},
        {"name": "gemm"},
    )
    assert window_of(trace, 10, 99).functions == ("gemm",)


def test_several_ranks_are_refused(tmp_path):
    trace = analyzed_trace_of({}, num_ranks=2)
    with pytest.raises(KprofError, match="2 ranks"):
        window_of(trace, 10, 99)


def test_without_permission_the_fix_is_told(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    (ncu / "error").write_text("==ERROR== ERR_NVGPUCTRPERM - The user has no permission")
    with pytest.raises(LaunchError, match="may not read") as caught:
        count(folder)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in caught.value.fix


def test_what_the_program_said_last_is_the_problem(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    (ncu / "error").write_text("==ERROR== LibraryNotLoaded")
    with pytest.raises(LaunchError, match="LibraryNotLoaded"):
        count(folder)


def test_a_window_without_these_kernels_is_an_error(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    with pytest.raises(LaunchError, match="profiled nothing"):
        count(folder)


def test_without_the_program_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="not installed"):
        count(run_in(tmp_path, on_gpu(NAME, 10)))


def test_nothing_is_left_of_the_window_but_report_export_and_log(tmp_path, ncu):
    folder = run_in(tmp_path, on_gpu(NAME, 10))
    report(ncu, launch("add_kernel", metrics=COUNTED))
    count(folder)
    left = {path.name for path in (folder / "raw").iterdir() if path.name.startswith("ncu")}
    assert left == {REPORT, "ncu.csv", "ncu.log"}


def test_a_folder_that_kprof_did_not_record_is_refused(tmp_path):
    with pytest.raises(KprofError, match="not a recording"):
        count(tmp_path)


def test_a_folder_that_is_not_there_is_said_not_to_exist(tmp_path):
    with pytest.raises(KprofError, match="does not exist"):
        count(tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_run_without_counters_goes_on_and_says_why(tmp_path, monkeypatch):
    """Without a GPU there is nothing to count, and the report is there all the same."""
    script = tmp_path / "work.py"
    script.write_text("import torch\nfor _ in range(9): torch.ones(8).sum()\n")
    outcome = run(RunOptions((str(script),), out=tmp_path / "out.kprof", ncu=True))
    assert outcome.exit_code == 0
    assert outcome.opened is not None
    assert any(message.startswith("Nothing was counted:") for message in outcome.messages)


def test_a_service_is_not_run_once_more():
    with pytest.raises(LaunchError, match="--ncu"):
        run_service(RunOptions(("work.py",), ncu=True), "signal")


def test_the_function_of_a_kernel_is_its_bare_name():
    expected = {
        "gemm": "gemm",
        "void at::native::reduce<4, Op<float, (int)3>>(int, float*)": "reduce",
        "(anonymous namespace)::softmax<float>(int)": "softmax",
        "<unnamed>::softmax<float>(int)": "softmax",
        "void cutlass::Kernel2<cutlass::gemm::Tile<128>>(cutlass::Params)": "Kernel2",
        "void f<decltype(g()), {lambda(int)#1}>(h)": "f",
    }
    assert {name: function_in(name) for name in expected} == expected
