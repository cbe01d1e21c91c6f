"""What the partner report says of a run without a GPU: whose time, and whose limits."""

from dataclasses import replace

from kprof.analyze.energy import StepEnergy
from kprof.device import Device
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.sections.cost import energy_in_words
from tests.report.partner_evidence import comparison_of
from tests.report.partner_pages import said
from tests.section_traces import HOST_ONLY, RICH

HOST = Device("host, 2 cores", 4e9, {"fp32": 5e10}, "measured after the run: copy", True)


def told_of(trace, device):
    """Return what the whole page says of a run on a device."""
    meta = replace(trace.meta, device=device)
    return said(Evidence("t", runs=(replace(trace, meta=meta),)), level="internal")


def test_of_a_host_the_operators_time_is_traced_and_no_devices():
    text = told_of(HOST_ONLY, HOST)
    assert "of the operators' own time is" in text
    assert "of the device time is" not in text


def test_of_a_gpu_the_devices_time_is_traced():
    assert "of the device time is" in told_of(RICH, RICH.meta.device)


def test_limits_are_said_to_be_measured_once():
    text = told_of(RICH, HOST)
    assert "The limits were measured after the run: copy." in text
    assert "host, 2 cores, measured after the run: copy" in text
    assert "measured: measured" not in text


def test_limits_whose_source_does_not_say_so_are_said_to_be_measured():
    device = replace(HOST, source="memory measured on a day")
    assert "The limits were measured: memory measured on a day." in told_of(RICH, device)


def timed(trace, recorded_ns, unrecorded_ns):
    """Return the run with steps that took so long while recorded, and so long otherwise."""
    recording = replace(
        trace.meta.recording,
        recorded_step_ns=(recorded_ns,) * 2,
        unrecorded_step_ns=(unrecorded_ns,) * 2,
        step_clock="device",
    )
    return replace(trace, meta=replace(trace.meta, recording=recording))


def test_each_run_that_recording_slowed_says_by_how_much():
    slowed, not_slowed = timed(RICH, 9_000_000, 4_000_000), timed(RICH, 2_050_000, 2_000_000)
    text = said(Evidence("t", runs=(slowed, not_slowed)))
    assert "Recording slows the host, not the GPU: before, a step takes 9 ms recorded" in text
    assert "after, a step takes" not in text
    assert "These are recorded steps." not in said(Evidence("t", runs=(not_slowed,)))


def test_a_step_that_took_another_time_in_the_comparison_is_said():
    runs = timed(RICH, 9_000_000, 4_000_000), timed(RICH, 33_000_000, 32_000_000)
    text = said(Evidence("t", runs=runs, comparisons=(comparison_of(),)))
    assert "before, 4.00 ms around the recording and 40.0 ms in the comparison." in text
    alike = (timed(RICH, 40_000_000, 39_000_000), runs[1])
    told = said(Evidence("t", runs=alike, comparisons=(comparison_of(),)))
    assert "from run to run" not in told


def test_energy_of_steps_that_recording_made_longer_says_so():
    joules = StepEnergy(5.0, 1, 1)
    told = energy_in_words(timed(RICH, 9_000_000, 4_000_000), joules)
    assert told == "by the energy counter, over 1 step, which recording made 125.0 % longer: " + (
        "it takes less otherwise"
    )
    calm = timed(RICH, 2_050_000, 2_000_000)
    assert energy_in_words(calm, joules) == "by the energy counter, over 1 step"
