"""What is made of the lines that processes and NVML write: windows, their problems, energy."""

import json
import platform
import re

import pytest

from kprof.collect.nvml import Samples, Tail, read_with_processes
from kprof.collect.recorder.kprof_recorder.schedule import Schedule
from kprof.collect.windows import Sheets, Span, Window, can_count_energy, energy_of, spans_of
from tests.quantities import quantities_in

S = 10**9
GPU = {"number": 0, "name": "NVIDIA H200", "uuid": "aaaa-bbbb"}


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def begin(rank=0, pid=1, started_by=None, world_size=1, gpus=(GPU,), **more):
    about = {"rank": rank, "pid": pid, "started_by": started_by, "world_size": world_size}
    about |= {"gpus": list(gpus), "host": platform.node(), "device_name": None, "rule": "one call"}
    return {"kind": "begin", **about, **more}


def window(start_s, end_s, arm="A", first_step=0, num_steps=10):
    start_ns, end_ns = round(start_s * S), round(end_s * S)
    return {
        "kind": "window",
        "arm": arm,
        "is_unsteady": False,
        "num_steps": num_steps,
        "first_step": first_step,
        "start_ns": start_ns,
        "end_ns": end_ns,
        "time_ns": (end_ns - start_ns) / num_steps,
        "steps_ns": [1],
        "steps_clock": "device",
        "peak_memory_bytes": 7,
    }


def nvml(raw, samples, num_devices=1):
    """Write samples of GPU 0, each a time in s with its quantities, as NVML's thread does."""
    devices = [{"index": i, "uuid": "GPU-" + "abcd"[i] * 4 + "-bbbb"} for i in range(num_devices)]
    lines = [{"time_ns": round(s * S), "device": 0, **told} for s, told in samples]
    write(raw / "nvml.jsonl", {"devices": devices}, *lines)


def sheets_of(raw, *lines):
    write(raw / "rank0-pid1/windows.jsonl", *lines)
    sheets = Sheets(raw)
    sheets.look()
    return sheets


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a"')
    tail = Tail(path)
    assert list(tail.lines()) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert list(tail.lines()) == [{"a": 2}]


def test_windows_of_another_rule_are_left_out_and_counted(tmp_path):
    sheets = sheets_of(tmp_path, begin(), window(0, 1), begin(), window(1, 2))
    assert [w.start_ns for w in sheets.windows()] == [S]
    (problem,) = sheets.problems()
    assert (quantities_in(problem), "Left out" in problem) == (["1"], True)


def test_the_windows_are_those_of_rank_0(tmp_path):
    write(tmp_path / "rank1-pid2/windows.jsonl", begin(rank=1, pid=2), window(0, 9), window(9, 18))
    sheets = sheets_of(tmp_path, begin(world_size=2), window(0, 1))
    assert [w.end_ns for w in sheets.windows()] == [S]
    (problem,) = sheets.problems()
    assert quantities_in(problem) == ["2", "0"]


def test_a_helper_that_a_stepping_process_started_does_not_count(tmp_path):
    helper = tmp_path / "rank0-pid2/windows.jsonl"
    write(helper, begin(pid=2, started_by=1), window(0, 9), window(9, 18))
    sheets = sheets_of(tmp_path, begin(), window(0, 1))
    assert [w.end_ns for w in sheets.windows()] == [S]
    (problem,) = sheets.problems()
    assert (quantities_in(problem), "other process " in problem) == (["1", "1"], True)


def test_the_clock_of_a_window_is_the_mean_of_the_samples_inside(tmp_path):
    nvml(tmp_path, [(s, {"sm_clock_mhz": mhz}) for s, mhz in ((0.5, 100), (1, 1900), (2, 1960))])
    sheets = sheets_of(tmp_path, begin(), window(0.9, 2), window(2.1, 3))
    assert [w.sm_clock_mhz for w in sheets.windows()] == [1930, None]


def test_a_window_with_less_than_three_quarters_of_the_usual_clock_is_throttled(tmp_path):
    nvml(tmp_path, [(s + 0.5, {"sm_clock_mhz": 1400 if s == 1 else 1980}) for s in range(3)])
    sheets = sheets_of(tmp_path, begin(), *(window(s, s + 1) for s in range(3)))
    before, throttled, after = (w.problem for w in sheets.windows())
    assert (before, after) == ("", "")
    assert re.findall(r"75%|\d+ MHz", throttled) == ["75%", "1980 MHz"]


def test_an_arm_whose_work_needs_more_power_is_not_throttled(tmp_path):
    nvml(tmp_path, [(s + 0.5, {"sm_clock_mhz": 1980 if s % 2 else 1400}) for s in range(4)])
    lines = [window(s, s + 1, "AB"[s % 2]) for s in range(4)]
    assert [w.problem for w in sheets_of(tmp_path, begin(), *lines).windows()] == [""] * 4


def test_a_slow_down_by_heat_is_named_and_a_power_cap_is_none(tmp_path):
    nvml(tmp_path, [(0.5, {"throttle_reasons": 0x4}), (1.5, {"throttle_reasons": 0x44})])
    sheets = sheets_of(tmp_path, begin(), window(0, 1), window(1, 2))
    capped, slowed = (w.problem for w in sheets.windows())
    assert (capped, slowed.rpartition(": ")[2]) == ("", "hardware thermal slowdown")


def test_a_window_beside_another_process_has_a_problem(tmp_path):
    counts = ((0, 1), (1.5, 1), (2.5, 2), (3.5, 1))
    nvml(tmp_path, [(s, {"num_processes": count}) for s, count in counts])
    lines = [window(s, s + 1) for s in range(1, 5)]
    windows = sheets_of(tmp_path, begin(), *lines).windows()
    assert [bool(w.problem) for w in windows] == [False, True, False, False]
    assert "another process" in windows[1].problem


@pytest.mark.parametrize(("number", "told"), [(1, "1 other process "), (2, "2 other processes ")])
def test_processes_that_were_there_before_are_told(tmp_path, number, told):
    nvml(tmp_path, [(0, {"num_processes": number}), (1.5, {"num_processes": number + 1})])
    sheets = sheets_of(tmp_path, begin(), window(1, 2))
    (problem,) = sheets.problems()
    assert problem.startswith(told)
    assert sheets.windows()[0].problem == ""


def test_a_gpu_is_found_by_its_uuid_and_else_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    nvml(tmp_path, [], num_devices=2)
    samples = Samples(tmp_path / "nvml.jsonl")
    samples.look()
    assert samples.index_of(GPU) == 0
    assert samples.index_of({"number": 0, "uuid": ""}) == 1
    assert samples.index_of({"number": 2, "uuid": ""}) is None


def sensors(power_w=500):
    """Return eight seconds at 500 W by the counter, and at `power_w` by the other sensor."""
    quarters = range(4 * 8)
    return [(q / 4, {"energy_mj": 125_000 * q, "power_w": power_w}) for q in quarters]


COUNTER = sensors()


def test_energy_is_taken_between_the_readings_around_a_span(tmp_path):
    nvml(tmp_path, COUNTER)
    samples = Samples(tmp_path / "nvml.jsonl")
    samples.look()
    assert samples.joules(0, (S // 2, 3 * S)) == pytest.approx(1250)
    assert samples.joules(0, (1 * S, 2 * S)) is None
    assert samples.joules(0, (5 * S, 9 * S)) is None
    assert samples.joules(1, (1 * S, 5 * S)) is None


def timed(start_s, end_s, first_step, num_steps=10, arm="A"):
    time_ns = (end_s - start_s) * S / num_steps
    return Window(arm, num_steps, start_s * S, end_s * S, time_ns, (), first_step)


def test_neighbouring_windows_are_one_span_with_the_step_between():
    windows = [timed(0, 10, 0), timed(11, 21, 11)]
    assert spans_of(windows, 1) == [Span(0, 21 * S, 21)]


def test_windows_with_something_else_between_are_two_spans():
    windows = [timed(0, 10, 0), timed(31, 41, 11)]
    assert spans_of(windows, 1) == [Span(0, 10 * S, 10), Span(31 * S, 41 * S, 10)]


def test_windows_of_two_arms_are_two_spans():
    windows = [timed(0, 10, 0), timed(11, 21, 11, arm="B")]
    assert len(spans_of(windows, 1)) == 2


def test_a_steps_energy_is_that_of_a_span_of_several_windows(tmp_path):
    nvml(tmp_path, COUNTER)
    lines = [window(1, 2, first_step=0), window(2.1, 3.1, first_step=11)]
    sheets = sheets_of(tmp_path, begin(), *lines)
    joules, why = energy_of(sheets.windows(), Schedule("AA"), sheets)
    assert (joules, why) == (pytest.approx(2.1 * 500 / 21), "")


@pytest.mark.parametrize(("power_w", "is_believed"), [(480, True), (520, True), (460, False)])
def test_energy_is_believed_where_the_counter_and_the_power_agree(tmp_path, power_w, is_believed):
    nvml(tmp_path, sensors(power_w))
    sheets = sheets_of(tmp_path, begin(), window(1, 6))
    joules, why = energy_of(sheets.windows(), Schedule("A"), sheets)
    assert (joules is not None) is is_believed
    assert ("differ by 8 %" in why) is not is_believed


def test_energy_that_nothing_could_check_is_missing(tmp_path):
    nvml(tmp_path, [(q / 4, {"energy_mj": 125_000 * q}) for q in range(32)])
    sheets = sheets_of(tmp_path, begin(), window(1, 6))
    joules, why = energy_of(sheets.windows(), Schedule("A"), sheets)
    assert (joules, "power" in why, quantities_in(why)) == (None, True, [])


def test_energy_of_short_windows_is_refused(tmp_path):
    nvml(tmp_path, COUNTER)
    sheets = sheets_of(tmp_path, begin(), window(1, 2))
    joules, why = energy_of(sheets.windows(), Schedule("A"), sheets)
    assert (joules, quantities_in(why)) == (None, ["2 s"])


def test_of_two_arms_in_one_process_each_window_has_its_own_energy(tmp_path):
    nvml(tmp_path, COUNTER)
    lines = [window(1, 3), window(3, 5.5, arm="B", first_step=11)]
    sheets = sheets_of(tmp_path, begin(), *lines)
    assert energy_of(sheets.windows(), Schedule("AB"), sheets) == (None, "")
    assert [w.joules for w in sheets.windows()] == [pytest.approx(1000), pytest.approx(1250)]


def test_one_short_window_of_two_arms_is_one_too_many(tmp_path):
    nvml(tmp_path, COUNTER)
    lines = [window(1, 3.5), window(3.5, 5, arm="B", first_step=11)]
    sheets = sheets_of(tmp_path, begin(), *lines)
    why = "the windows do not last 2 s, which the energy counter needs"
    assert energy_of(sheets.windows(), Schedule("AB"), sheets) == (None, why)


@pytest.mark.parametrize(("power_w", "is_believed"), [(480, True), (460, False)])
def test_energy_of_two_arms_is_checked_over_all_of_their_turns(tmp_path, power_w, is_believed):
    nvml(tmp_path, sensors(power_w))
    lines = [window(1, 3), window(3, 5.5, arm="B", first_step=11)]
    sheets = sheets_of(tmp_path, begin(), *lines)
    _, why = energy_of(sheets.windows(), Schedule("AB"), sheets)
    assert ("differ by 8 %" not in why) is is_believed


def test_energy_of_a_partitioned_gpu_is_refused(tmp_path):
    write(
        tmp_path / "nvml.jsonl",
        {"devices": [{"index": 0, "uuid": "GPU-aaaa-bbbb", "is_mig": True}]},
    )
    write(tmp_path / "nvml.jsonl", *({"time_ns": int(s * S), "device": 0, **t} for s, t in COUNTER))
    sheets = sheets_of(tmp_path, begin(), window(1, 5))
    joules, why = energy_of(sheets.windows(), Schedule("A"), sheets)
    assert joules is None
    assert "partitioned" in why


class Counting:
    """An NVML of so many GPUs, with energy counters or without."""

    def __init__(self, *counters_mj):
        self.handles = dict(enumerate(counters_mj))
        self.is_closed = False

    def ask(self, name, handle):
        assert name == "nvmlDeviceGetTotalEnergyConsumption"
        return handle

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize(("counters", "can"), [((), False), ((None,), False), ((None, 7), True)])
def test_energy_can_be_counted_where_one_gpu_tells_it(counters, can):
    nvml = Counting(*counters)
    assert can_count_energy(lambda: nvml) is can
    assert nvml.is_closed


def test_energy_without_a_counter_is_missing(tmp_path):
    nvml(tmp_path, [(s, {"power_w": 300}) for s in range(8)])
    sheets = sheets_of(tmp_path, begin(), window(1, 5))
    joules, why = energy_of(sheets.windows(), Schedule("A"), sheets)
    assert (joules, "energy counter" in why) == (None, True)


def test_energy_of_ranks_elsewhere_is_missing(tmp_path):
    nvml(tmp_path, COUNTER)
    write(tmp_path / "rank1-pid2/windows.jsonl", begin(rank=1, pid=2, host="another"))
    sheets = sheets_of(tmp_path, begin(world_size=2), window(1, 5))
    assert energy_of(sheets.windows(), Schedule("A"), sheets)[0] is None


def test_energy_is_that_of_all_gpus_of_the_ranks(tmp_path):
    nvml(tmp_path, COUNTER, num_devices=2)
    second = [{"time_ns": int(s * S), "device": 1, **told} for s, told in COUNTER]
    write(tmp_path / "nvml.jsonl", *second)
    other = {**GPU, "number": 1, "uuid": "bbbb-bbbb"}
    write(tmp_path / "rank1-pid2/windows.jsonl", begin(rank=1, pid=2, gpus=[other]))
    sheets = sheets_of(tmp_path, begin(world_size=2), window(1, 5))
    assert sheets.windows()[0].joules == pytest.approx(4000)


def test_energy_is_missing_where_one_gpu_has_no_counter(tmp_path):
    nvml(tmp_path, COUNTER, num_devices=2)
    other = {**GPU, "number": 1, "uuid": "bbbb-bbbb"}
    sheets = sheets_of(tmp_path, begin(gpus=[GPU, other]), window(1, 5))
    assert sheets.windows()[0].joules is None


class NvmlOf:
    """An NVML with one GPU, on which these processes are."""

    def __init__(self, processes):
        self.handles = {0: "gpu"}
        self._processes = processes

    def ask(self, name, *arguments):
        return self._processes if name == "nvmlDeviceGetComputeRunningProcesses" else None

    def constant(self, name):
        return name


def test_a_sample_counts_the_processes_on_the_gpu():
    assert read_with_processes(NvmlOf(["one", "another"]), 0)["num_processes"] == 2
    assert read_with_processes(NvmlOf([]), 0)["num_processes"] == 0


def test_processes_that_nvml_cannot_tell_are_missing():
    assert "num_processes" not in read_with_processes(NvmlOf(None), 0)
