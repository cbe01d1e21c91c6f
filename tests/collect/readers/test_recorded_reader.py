"""What `kprof run` left in `raw/` becomes a trace."""

import gzip
import json
import re

import pytest

from kprof.collect.readers.marks import is_own_step
from kprof.collect.readers.recorded import reader as recorded
from kprof.errors import TraceError
from kprof.trace import Caveat
from tests.kineto_files import annotation, kernel
from tests.quantities import quantities_in

BASE_NS = 1_790_000_000_000_000_000


def step(index, ns, *, is_recorded=False, device_ns=None):
    on_device = {} if device_ns is None else {"device_ns": device_ns}
    return {"index": index, "start_ns": 0, "end_ns": ns, "recorded": is_recorded, **on_device}


@pytest.fixture
def run(tmp_path):
    """A run folder with one process and one window; returns a writer of its recorder.json."""
    folder = tmp_path / "train.kprof"
    part = folder / "raw" / "rank0-pid9"
    part.mkdir(parents=True)
    launch = {"command": ["python", "train.py"], "host": "box", "started_ns": 1, "ended_ns": 5}
    (folder / "raw" / "launch.json").write_text(json.dumps({**launch, "exit_code": 3}))
    content = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [kernel()]}
    (part / "window-0.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))

    def write(**recorder):
        (part / "recorder.json").write_text(json.dumps({"rank": 0, "skip": 1, **recorder}))
        return folder

    return write


def test_the_launch_and_the_recorder_tell_what_was_run(run):
    meta = recorded.read(run(torch="2.11", caveats=["one thing"])).meta
    assert meta.command == ("python", "train.py")
    assert meta.versions["torch"] == "2.11"
    assert Caveat("recorder", "one thing") in meta.caveats
    assert (meta.recording.exit_code, meta.recording.wall_ns) == (3, 4)


def test_the_cost_of_recording_is_told_by_steps_after_it_but_the_first(run):
    steps = [step(0, 90), step(1, 20, is_recorded=True), step(2, 70), step(3, 10), step(4, 11)]
    recording = recorded.read(run(steps=steps)).meta.recording
    assert (recording.recorded_step_ns, recording.unrecorded_step_ns) == ((20,), (10, 11))


def test_steps_before_the_recording_tell_its_cost_where_none_came_after(run):
    steps = [step(0, 90), step(1, 10), step(2, 70), step(3, 20, is_recorded=True)]
    assert recorded.read(run(steps=steps)).meta.recording.unrecorded_step_ns == (10,)


def test_the_devices_clock_times_steps_where_it_was_read(run):
    steps = [
        step(1, 5, is_recorded=True, device_ns=20),
        step(2, 5, device_ns=70),
        step(3, 6, device_ns=10),
        step(4, 7),
    ]
    recording = recorded.read(run(steps=steps)).meta.recording
    assert recording.step_clock == "device"
    assert (recording.recorded_step_ns, recording.unrecorded_step_ns) == ((20,), (10,))
    assert recording.unrecorded_host_ns == (6,)


def test_the_hosts_time_stands_beside_no_other_clock_than_the_devices(run):
    steps = [step(1, 5, is_recorded=True), step(2, 70), step(3, 10)]
    assert recorded.read(run(steps=steps)).meta.recording.unrecorded_host_ns == ()


def test_nvml_samples_come_onto_the_traces_clock(run):
    folder = run()
    lines = [
        {"devices": [{"index": 0, "driver": "580.1"}]},
        {"time_ns": BASE_NS + 1500, "device": 0, "power_w": 80.5},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"time_ns": 12'
    (folder / "raw" / "nvml.jsonl").write_text(text)
    trace = recorded.read(folder)
    samples = trace.samples
    assert trace.meta.versions["driver"] == "580.1"
    assert samples["time_ns"].tolist() == [1500]
    assert (samples["quantity"][0], samples["value"][0]) == ("power_w", 80.5)


def test_samples_that_cannot_be_placed_are_a_caveat(run):
    folder = run()
    content = {"traceEvents": [kernel()]}
    part = folder / "raw" / "rank0-pid9"
    (part / "window-0.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    (folder / "raw" / "nvml.jsonl").write_text('{"time_ns": 5, "device": 0, "power_w": 80}\n')
    trace = recorded.read(folder)
    assert len(trace.samples) == 0
    assert any(one.id == "power_left_out" for one in trace.meta.caveats)


def test_a_run_without_any_recording_is_one_clear_error(run):
    folder = run()
    for path in folder.glob("raw/rank0-pid9/*"):
        path.unlink()
    with pytest.raises(TraceError, match="no process"):
        recorded.read(folder)


def test_a_damaged_recorder_file_is_one_clear_error(run):
    folder = run()
    (folder / "raw" / "rank0-pid9" / "recorder.json").write_text('{"rank": 0,')
    with pytest.raises(TraceError, match=r"^rank0-pid9/recorder\.json"):
        recorded.read(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("launch.json", '{"command": 5}'),
        ("launch.json", "[]"),
        ("rank0-pid9/recorder.json", '{"steps": [{"index": 1}]}'),
        ("rank0-pid9/recorder.json", '{"caveats": null}'),
        ("ceilings.json", "{"),
        ("nvml.jsonl", '{"time_ns": "noon"}'),
    ],
)
def test_any_damaged_part_of_a_recording_is_one_clear_error(run, name, content):
    folder = run()
    (folder / "raw" / name).write_text(content)
    with pytest.raises(TraceError, match="cannot be read") as error:
        recorded.read(folder)
    assert "again" in error.value.fix


def test_a_process_without_gpu_activity_is_left_out_beside_others(run):
    folder = run(caveats=["of the main process"])
    part = folder / "raw" / "rank1-pid10"
    part.mkdir()
    host = kernel(cat="cpu_op")
    content = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [host]}
    (part / "window-0.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    (part / "recorder.json").write_text('{"rank": 1}')
    trace = recorded.read(folder)
    assert (len(trace.kernels), len(trace.ranges)) == (1, 0)
    (told,) = [one.text for one in trace.meta.caveats if one.id == "processes_without_gpu"]
    assert quantities_in(told) == ["1"]


def test_a_command_of_bytes_that_are_no_text_is_kept(run):
    folder = run()
    (folder / "raw" / "launch.json").write_text('{"command": ["train\\udcff.py"]}')
    assert recorded.read(folder).meta.command == ("train\udcff.py",)


def window_of(folder, part, number, *, ts=1.0):
    (folder / "raw" / part).mkdir(exist_ok=True)
    content = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [kernel(ts=ts)]}
    path = folder / "raw" / part / f"window-{number}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


def test_of_several_windows_of_a_process_the_newest_counts_and_the_others_are_named(run):
    folder = run()
    window_of(folder, "rank0-pid9", 2, ts=3.0)
    window_of(folder, "rank0-pid9", 10, ts=4.0)
    trace = recorded.read(folder)
    assert trace.kernels["start_ns"].tolist() == [4000]
    assert trace.meta.num_ranks == 1
    assert re.findall(r"\S+\.json\.gz", trace.meta.caveats[-1].text) == [
        "rank0-pid9/window-0.json.gz",
        "rank0-pid9/window-2.json.gz",
    ]


def test_of_several_processes_the_newest_window_counts_that_all_have(run):
    folder = run()
    window_of(folder, "rank0-pid9", 1, ts=3.0)
    window_of(folder, "rank1-pid10", 0, ts=2.0)
    (folder / "raw" / "rank1-pid10" / "recorder.json").write_text('{"rank": 1}')
    (folder / "raw" / "rank2-pid11").mkdir()
    (folder / "raw" / "rank2-pid11" / "recorder.json").write_text('{"rank": 2}')
    trace = recorded.read(folder)
    assert trace.kernels["start_ns"].tolist() == [1000, 2000]
    assert trace.meta.num_ranks == 2


def test_processes_without_a_window_in_common_count_with_their_newest(run):
    folder = run()
    window_of(folder, "rank1-pid10", 3, ts=2.0)
    window_of(folder, "rank1-pid10", 4, ts=5.0)
    (folder / "raw" / "rank1-pid10" / "recorder.json").write_text('{"rank": 1}')
    assert recorded.read(folder).kernels["start_ns"].tolist() == [1000, 5000]


def test_a_step_that_the_recording_cut_is_no_step_of_the_trace(tmp_path, run):
    folder = run(steps=[step(3, 40, is_recorded=True), step(4, 90)])
    window = folder / "raw" / "rank0-pid9" / "window-0.json.gz"
    marks = [annotation(f"kprof.step#{number}", ts=100 * number, dur=50) for number in (3, 4)]
    content = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [kernel(), *marks]}
    window.write_bytes(gzip.compress(json.dumps(content).encode()))
    ranges = recorded.read(folder).ranges
    assert ranges["name"][is_own_step(ranges)].tolist() == ["3"]


def test_a_process_that_was_killed_may_have_taken_more_steps_than_were_counted(run):
    killed = recorded.read(run(num_steps_seen=8, is_count_final=False)).meta.recording
    assert (killed.num_steps_seen, killed.is_count_final) == (8, False)
