"""What the partner report says of a run without a GPU: whose time, and whose limits."""

from dataclasses import replace

from kprof.analyze.energy import StepEnergy
from kprof.device import Device
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.sections import roofline, time
from kprof.report.partner.sections.cost import energy_in_words
from kprof.report.section import Text
from tests.quantities import quantities_in
from tests.report.partner_evidence import comparison_of
from tests.report.partner_pages import rows_of
from tests.section_traces import HOST_ONLY, RICH

HOST = Device("host, 2 cores", 4e9, {"fp32": 5e10}, "measured after the run: copy", True)


def on(device):
    """Return the evidence of a run on a device."""
    return Evidence("t", runs=(replace(RICH, meta=replace(RICH.meta, device=device)),))


def traced_time(run):
    """Return the note on how much of the time is traced to an operator."""
    texts = [b.text for b in time.render(Evidence("t", runs=(run,))).blocks if isinstance(b, Text)]
    return next(text for text in texts if "traced" in text)


def test_of_a_host_the_operators_time_is_traced_and_no_devices():
    assert "operators'" in traced_time(HOST_ONLY)
    assert "device" not in traced_time(HOST_ONLY)


def test_of_a_gpu_the_devices_time_is_traced():
    assert "device" in traced_time(RICH)
    assert "operators'" not in traced_time(RICH)


def test_limits_are_said_to_be_measured_once():
    *_, limits, _ = roofline.render(on(HOST)).blocks
    assert HOST.source in limits.text
    assert limits.text.count("measured") == 1
    assert rows_of(on(HOST), "ceilings", level="internal") == [(f"{HOST.name}, {HOST.source}",)]


def test_limits_whose_source_does_not_say_so_are_said_to_be_measured():
    device = replace(HOST, source="memory measured on a day")
    *_, limits, _ = roofline.render(on(device)).blocks
    assert f"measured: {device.source}" in limits.text


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
    assert ["9 ms", "4 ms"] in notes_of(Evidence("t", runs=(slowed, not_slowed)))
    assert step_times_in(notes_of(Evidence("t", runs=(not_slowed,)))) == []


def notes_of(evidence):
    """Return the amounts in each note of the section on time."""
    texts = [block for block in time.render(evidence).blocks if isinstance(block, Text)]
    return [quantities_in(text.text) for text in texts]


def step_times_in(notes):
    """Return the times of steps in notes; all others are below a millisecond here."""
    return [amount for note in notes for amount in note if amount.endswith(" ms")]


def test_a_step_that_took_another_time_in_the_comparison_is_said():
    runs = timed(RICH, 9_000_000, 4_000_000), timed(RICH, 33_000_000, 32_000_000)
    told = notes_of(Evidence("t", runs=runs, comparisons=(comparison_of(),)))
    assert ["4.00 ms", "40.0 ms"] in told
    alike = (timed(RICH, 40_000_000, 39_000_000), runs[1])
    told = notes_of(Evidence("t", runs=alike, comparisons=(comparison_of(),)))
    assert step_times_in(told) == []


def test_energy_of_steps_that_recording_made_longer_says_so():
    joules = StepEnergy(5.0, 1, 1)
    told = energy_in_words(timed(RICH, 9_000_000, 4_000_000), joules)
    assert quantities_in(told) == ["1", "125.0 %"]
    calm = timed(RICH, 2_050_000, 2_000_000)
    assert quantities_in(energy_in_words(calm, joules)) == ["1"]
