"""`kprof selftest` on this machine: planted effects, disturbances, and what is kept of it."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import count

import msgspec
import numpy as np
import pytest

from kprof.ab import calibrate as selftest
from kprof.ab.calibrate import (
    Machine,
    calibrate,
    describe_calibration,
    doubt_resolution,
    host_knobs,
    keep,
    last_calibration,
)
from kprof.ab.disturbance import disturbance, share_at
from kprof.analyze.calibration.simulate import simulate
from kprof.comparison import Metric, Plan
from kprof.errors import KprofError
from kprof.report.calibration import describe, result_of_calibration, sections_of_calibration
from kprof.timing import WarmUp
from tests.commands.test_cli import kprof
from tests.quantities import quantities_in
from tests.section_traces import warnings

HOST = Machine("host", "a processor", None)


@pytest.fixture
def home(monkeypatch, tmp_path):
    """Keep what is measured in a folder of the test, as if on a host without a GPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(selftest, "this_machine", lambda: HOST)
    monkeypatch.setattr(selftest, "this_host", lambda: HOST)
    return tmp_path


@pytest.fixture
def hasty(monkeypatch):
    """Warm up and calibrate for no time to speak of, however busy this machine is."""
    monkeypatch.setattr(selftest, "WARM_UP_S", 0.0)
    monkeypatch.setattr(selftest, "SAMPLE_NS", 1e5)
    monkeypatch.setattr(selftest, "CALIBRATION_SAMPLES", 15)
    monkeypatch.setattr(selftest, "WallStopwatch", Counted)


class Counted:
    """A clock on which a call takes 1,000 ns and as much as `amount` says."""

    name, resolution_ns, num_exposed = "counted", 1.0, 0

    def time(self, work, num_calls):
        work()
        (amount,) = work.args
        return 1000.0 + amount


def test_what_a_call_costs_beside_its_amount_is_no_part_of_the_effect(hasty):
    (knob,) = host_knobs()
    assert knob.work(0.0).args == (selftest.HOST_BYTES,)
    # A byte takes 1 ns on this clock, and a call 1,000 ns more.
    more = round(0.01 * (selftest.HOST_BYTES + 1000))
    assert knob.work(0.01).args == (selftest.HOST_BYTES + more,)


def test_the_host_is_made_slower_by_more_of_the_same(hasty):
    (knob,) = host_knobs()
    amounts = [knob.work(effect).args[0] for effect in (0.0, 0.01, 0.05)]
    assert amounts == sorted(amounts)
    assert amounts[1] > amounts[0] == selftest.HOST_BYTES


class CountedGpu:
    """A GPU's clock on which 4 bytes take 1 ns, 2 cycles too, and a call 3 µs more."""

    def time(self, work, num_calls):
        (amount,) = work.args
        is_spun = work.func.__name__ == "negate_and_spin"
        num_bytes, num_cycles = (amount, 0) if not is_spun else (selftest.GPU_BYTES, amount)
        return 3_000 + num_bytes / 4 + num_cycles / 2

    resolution_ns, num_exposed = 500.0, 0


@pytest.fixture
def pretended_gpu(hasty, monkeypatch):
    """Have torch put on the host what should go to a GPU, and note what that should sleep."""
    torch, slept = pytest.importorskip("torch"), []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **rest: zeros(*size, **rest))
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(selftest, "GPU_BYTES", 1 << 20)
    monkeypatch.setattr(selftest, "GpuStopwatch", CountedGpu)
    return slept


@pytest.mark.parametrize("number", [0, 1])
def test_a_gpu_takes_as_much_longer_as_was_asked_for(pretended_gpu, number):
    knob, clock = selftest.gpu_knobs()[number], CountedGpu()
    times = [clock.time(knob.work(effect), 1) for effect in (0.0, 0.01, 0.05)]
    assert times[1] / times[0] == pytest.approx(1.01, abs=2e-5)
    assert times[2] / times[0] == pytest.approx(1.05, abs=2e-5)


def test_a_spin_on_the_gpu_follows_the_same_bytes_in_both_variants(pretended_gpu):
    _, knob = selftest.gpu_knobs()
    del pretended_gpu[:]
    knob.work(0.0)()
    knob.work(0.05)()
    least, more = pretended_gpu
    assert least == selftest.SPIN_CYCLES[0] < more


def test_only_b_is_made_slower_and_others_work_beside_both(home, hasty, monkeypatch):
    asked, beside = [], []
    (knob,) = host_knobs()

    def noted(effect):
        asked.append(effect)
        return knob.work(effect)

    def disturbed(kind, duty, period_s):
        beside.append((kind, duty, period_s))
        return nullcontext()

    monkeypatch.setattr(selftest, "host_knobs", lambda: (replace(knob, work=noted),))
    monkeypatch.setattr(selftest, "disturbance", disturbed)
    assert len(list(calibrate(8, 10, 0, print))) > 0
    assert set(asked[0::2]) == {0.0}
    assert set(asked[1::2]) == {0.0, 0.01, 0.02, 0.05}
    assert beside == [("host", (0.3, 0.3), 4.0), ("host", (0.0, 1.0), 4.0)]


def test_a_calibration_is_taken_kept_and_found_again(home, hasty):
    heard = []
    *_, found = calibrate(8, 10, 0, heard.append)
    path = keep(found)
    assert (found.kind, found.device, found.num_comparisons) == ("host", "a processor", 8)
    assert [s.name for s in found.scenarios] == ["more bytes", "co-tenant", "ramp"]
    planted, co_tenant, _ = found.scenarios
    assert planted.fixed.false_positive.of == 8
    assert planted.fixed.power["0.05"].of == 2
    assert (co_tenant.fixed.power, co_tenant.fixed.wrong_direction.of) == ({}, 0)
    assert (planted.fixed.power.keys(), found.missing) == ({"0.01", "0.02", "0.05"}, ())
    stages = [line for line in heard if line.startswith("stage ")]
    assert [quantities_in(line)[:2] for line in stages] == [[str(n), "6"] for n in range(1, 7)]
    assert "more bytes" in stages[0] and quantities_in(stages[0])[-1] == "8"
    assert path.is_relative_to(home)
    assert found.doubts[0].id == "host_clock"
    assert last_calibration() == found
    assert "(a processor)" in describe_calibration(last_calibration())


def test_after_every_stage_there_is_a_calibration_that_says_what_it_lacks(home, hasty):
    course = list(calibrate(8, 10, 0, print))
    assert [len(found.missing) for found in course] == [5, 4, 3, 2, 1, 0]
    first = course[0]
    assert (first.scenarios[0].fixed.false_positive.of, first.scenarios[0].fixed.power) == (8, {})
    assert [target.name for target in first.targets] == ["false positives", "false and material"]
    assert result_of_calibration(first)["power"] == {"0.01": None, "0.02": None, "0.05": None}
    assert result_of_calibration(first)["wrong_direction"] is None
    assert first.is_met in (None, False)
    assert scenarios_in(first.missing) == [*["more bytes"] * 3, "co-tenant", "ramp"]
    assert [quantities_in(what) for what in first.missing[:3]] == [["1 %"], ["2 %"], ["5 %"]]
    told = warnings(sections_of_calibration(first)[0])
    assert [what for what in first.missing if not any(what in text for text in told)] == []


def scenarios_in(missing):
    """Return the scenario of each stage that is missing."""
    return [what.partition(",")[0] for what in missing]


def test_a_calibration_that_cannot_be_written_is_kept_nowhere(home, hasty, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file"))
    *_, found = calibrate(8, 10, 0, print)
    assert keep(found) is None


def test_an_unfinished_calibration_is_kept_beside_the_last_whole_one(home, hasty):
    *_, almost, found = calibrate(8, 10, 0, print)
    whole = keep(found)
    beside = keep(almost, is_complete=False)
    assert beside != whole
    assert scenarios_in(msgspec.json.decode(beside.read_bytes())["missing"]) == ["ramp"]
    assert last_calibration() == found
    keep(found)
    assert not beside.exists()


def test_a_stage_ends_in_time_with_whole_comparisons_and_says_how_many(home, hasty, monkeypatch):
    seconds = count()
    monkeypatch.setattr(selftest.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(selftest, "warm_up", lambda *rest: WarmUp(1, is_stable=True))
    knob = selftest.Knob("more bytes", "", lambda effect: int)
    monkeypatch.setattr(selftest, "host_knobs", lambda: (knob,))
    *_, found = calibrate(50, 10, 0, print)
    same, ramp = found.scenarios[0].fixed, found.scenarios[-1].fixed
    # A second is over with every pair: 120 of them without an effect, 40 with one.
    assert (same.false_positive.of, same.power["0.01"].of, ramp.false_positive.of) == (12, 4, 4)
    assert found.doubts[-1].id == "stage_cut_short"
    assert quantities_in(found.doubts[-1].text) == ["4", "12", "40 s"]
    assert found.missing == ()


def test_a_stage_too_short_for_one_comparison_is_missing_and_not_none_of_none(
    home, hasty, monkeypatch
):
    monkeypatch.setattr(selftest, "LONGEST_S", 0.0)
    *_, found = calibrate(8, 10, 0, print)
    assert [scenario.name for scenario in found.scenarios] == ["more bytes"]
    assert scenarios_in(found.missing) == [*["more bytes"] * 3, "co-tenant", "ramp"]
    assert "; ".join(found.missing) in describe(found)


def test_a_co_tenant_that_cannot_start_costs_its_stages_and_not_the_rest(home, hasty, monkeypatch):
    monkeypatch.setattr("kprof.ab.disturbance.sys.executable", "/bin/false")
    *_, found = calibrate(8, 10, 0, print)
    assert scenarios_in(found.missing) == ["co-tenant", "ramp"]
    assert found.doubts[-1].id == "stage_failed"
    assert found.scenarios[0].fixed.power["0.05"].of == 2


def test_how_far_it_is_is_told_within_a_stage(home, hasty, monkeypatch):
    monkeypatch.setattr(selftest, "TELL_EVERY_S", 0.0)
    heard = []
    next(calibrate(8, 10, 0, heard.append))
    assert ["3", "8"] in [quantities_in(line)[:2] for line in heard]


def test_samples_of_one_work_are_shown_in_time_and_those_with_an_effect_are_not(home, hasty):
    seen = {}
    *_, found = calibrate(8, 10, 0, print, show=lambda name, logs: seen.update({name: logs.shape}))
    assert seen["more bytes"] == (8, 20)
    assert seen.keys() == {scenario.name for scenario in found.scenarios}


@cache
def simulated():
    return simulate(6, 40, 0, "2026-11-20")


def kept(home, monkeypatch, **changes):
    """Keep a calibration as if this machine had made it."""
    made = replace(simulated(), **changes)
    keep(made)
    return made


def test_before_a_self_test_nothing_is_known(home):
    assert last_calibration() is None
    assert "kprof selftest" in describe_calibration(last_calibration())


def test_what_another_driver_did_says_nothing_of_this_one(home, monkeypatch):
    kept(home, monkeypatch, kind="gpu", device="NVIDIA H200", driver="580.1")
    monkeypatch.setattr(selftest, "this_machine", lambda: Machine("gpu", "NVIDIA H200", "590.2"))
    assert last_calibration() is None
    monkeypatch.setattr(selftest, "this_machine", lambda: Machine("gpu", "NVIDIA H200", "580.1"))
    assert last_calibration().driver == "580.1"
    told = describe_calibration(last_calibration())
    assert [word for word in ("NVIDIA H200", "580.1", "2026-11-20") if word not in told] == []


def test_a_gpu_of_which_nothing_is_known_has_at_least_its_hosts_clock(home, monkeypatch):
    kept(home, monkeypatch, kind="host", device="a processor", driver=None)
    monkeypatch.setattr(selftest, "this_machine", lambda: Machine("gpu", "NVIDIA H200", "580.1"))
    assert last_calibration().kind == "host"
    assert "(a processor)" in describe_calibration(last_calibration())


@pytest.mark.parametrize(
    ("least", "device", "is_doubted"),
    [(0.016, "NVIDIA H200", True), (0.009, "NVIDIA H200", False), (0.016, "a processor", False)],
)
def test_a_machine_that_cannot_see_what_matters_is_told_of(
    home, monkeypatch, least, device, is_doubted
):
    made = kept(home, monkeypatch, kind="gpu", device="NVIDIA H200", driver="580.1")
    coarse = tuple(replace(scenario, least_found=least) for scenario in made.scenarios)
    monkeypatch.setattr(selftest, "this_machine", lambda: Machine("gpu", device, "580.1"))
    doubt = doubt_resolution(replace(made, scenarios=coarse), Plan((Metric("step time", "ns"),)))
    assert quantities_in(doubt) == (["40", "1.6 %", "1 %"] if is_doubted else [])


def test_a_gpu_that_torch_cannot_use_leaves_the_host_and_a_word_about_it(home, hasty, monkeypatch):
    monkeypatch.setattr(selftest, "this_machine", lambda: Machine("gpu", "NVIDIA H200", "580.1"))
    monkeypatch.setitem(sys.modules, "torch", None)
    found = next(calibrate(8, 10, 0, print))
    assert (found.kind, found.device) == (HOST.kind, HOST.name)
    assert found.doubts[0].id == "host_clock" and "torch" in found.doubts[0].text


@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1])
def test_a_gpu_is_made_slower_by_what_was_planted(number):
    *_, found = calibrate(8, 20, 0, print)
    planted = found.scenarios[number]
    assert found.kind == "gpu"
    assert planted.fixed.power["0.05"].count == 2
    assert found.doubts == ()


@pytest.mark.parametrize("text", ["", "{", '{"kind": "gpu"}', "[]"])
def test_a_damaged_file_is_no_calibration(home, text):
    path = keep(replace(simulated(), kind=HOST.kind, device=HOST.name))
    assert last_calibration().device == HOST.name
    path.write_text(text)
    assert last_calibration() is None


def test_doubts_of_a_calibration_that_an_older_version_kept_keep_their_texts(home):
    path = keep(replace(simulated(), kind=HOST.kind, device=HOST.name))
    path.write_text(json.dumps({**json.loads(path.read_text()), "doubts": ["Too few."]}))
    assert [(one.id, one.text) for one in last_calibration().doubts] == [("saved", "Too few.")]


def test_a_calibration_of_an_older_form_is_none(home, monkeypatch):
    kept(home, monkeypatch, kind="host", device="a processor", schema=0)
    assert last_calibration() is None


def test_a_user_without_a_home_is_told_that_nothing_is_kept(home, hasty, monkeypatch, capsys):
    monkeypatch.setattr(selftest, "cache_folder", lambda: None)
    code = kprof("selftest", "--comparisons", "50", "--pairs", "10", "--json")
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if result["is_met"] else 1)
    assert result["kind"] == "host"


class HalfAsSlow:
    """A clock on which work with an effect of 1 % takes 0.5 % longer."""

    name, resolution_ns, num_exposed = "half as slow", 1.0, 0

    def __init__(self):
        self.noise = np.random.default_rng(0)

    def time(self, work, num_calls):
        (effect,) = work.args
        return 1e6 * (1 + effect / 2) * np.exp(self.noise.normal(0.0, 0.001))


def test_a_slow_down_that_differs_from_the_planted_one_is_a_doubt(home, hasty, monkeypatch):
    knob = selftest.Knob("more bytes", "", lambda effect: partial(float, effect))
    monkeypatch.setattr(selftest, "host_knobs", lambda: (knob,))
    monkeypatch.setattr(selftest, "stopwatch_for", lambda name: HalfAsSlow())
    *_, found = calibrate(8, 20, 0, print)
    planted = [quantities_in(one.text) for one in found.doubts if one.id == "planted_otherwise"]
    assert [one[0] for one in planted] == ["1 %", "2 %", "5 %"]
    for stated, came in planted:
        share = float(came.removesuffix(" %")) / float(stated.removesuffix(" %"))
        assert share == pytest.approx(0.5, abs=0.1)


def test_others_work_for_the_share_of_time_that_they_are_given():
    assert share_at(7.0, (0.3, 0.3), 4.0) == 0.3
    assert share_at(5.0, (0.0, 1.0), 4.0) == 0.25


@pytest.fixture
def started(monkeypatch):
    """Return the processes that are started meanwhile."""
    found, popen = [], subprocess.Popen

    def note(*words, **options):
        found.append(popen(*words, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    return found


def test_a_disturbance_ends_with_what_it_disturbs(started):
    with disturbance("host", (0.3, 0.3), 1.0):
        assert started and all(other.poll() is None for other in started)
    assert [other.returncode for other in started] == [0] * len(started)


@pytest.mark.parametrize(("kind", "count"), [("gpu", 1), ("host", 3)])
def test_one_process_disturbs_a_gpu_and_one_each_core(monkeypatch, kind, count):
    started, popen = [], subprocess.Popen

    def stand_in(words, **options):
        started.append(words[2:])
        return popen([sys.executable, "-c", "print('working'); input()"], **options)

    monkeypatch.setattr(subprocess, "Popen", stand_in)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2, 5})
    with disturbance(kind, (0.25, 0.5), 4.0):
        pass
    assert started == [["kprof.ab.disturbance", kind, "0.25", "0.5", "4.0"]] * count


def test_a_disturbance_that_cannot_start_is_no_quiet_measurement(started, monkeypatch):
    monkeypatch.setattr("kprof.ab.disturbance.sys.executable", "/bin/false")
    with pytest.raises(KprofError, match="did not start"), disturbance("host", (0.3, 0.3), 1.0):
        pass
    assert all(other.returncode for other in started)


def test_work_that_takes_no_longer_when_doubled_cannot_be_slowed_down(hasty, monkeypatch):
    monkeypatch.setattr(Counted, "time", lambda self, work, num_calls: 5.0)
    with pytest.raises(KprofError) as error:
        host_knobs()
    assert quantities_in(error.value.problem) == [
        str(2 * selftest.HOST_BYTES),
        str(selftest.HOST_BYTES),
    ]


def test_a_host_has_a_name_even_where_no_file_tells_it(monkeypatch):
    monkeypatch.setattr(selftest.Path, "read_text", lambda self: "flags : none")
    assert selftest.processor()
