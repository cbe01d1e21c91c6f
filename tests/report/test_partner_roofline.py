"""How close to the device's limits the partner report says that work comes, and of which run."""

from dataclasses import replace

import pytest

from kprof.device import DERIVED, OF_ATTRIBUTES
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.parts import Picture
from kprof.report.partner.sections import appendix, roofline
from tests.quantities import quantities_in
from tests.section_traces import HOST_ONLY, RICH


def replayed(run):
    """Return the run as it is where a CUDA graph replays the work: nobody knows what it is."""
    return run.with_kernels(flops=None, bytes=None)


def timed(run, recorded_ns, unrecorded_ns):
    """Return the run with steps that took so long while recorded, and so long otherwise."""
    times = {"recorded_step_ns": (recorded_ns,) * 2, "unrecorded_step_ns": (unrecorded_ns,) * 2}
    recording = replace(run.meta.recording, **times)
    return replace(run, meta=replace(run.meta, recording=recording))


def told_of(*runs):
    """Return what the section says of runs, in their order of time."""
    chapter = roofline.render(Evidence("t", runs=runs))
    return " ".join(part.text for part in chapter.blocks if hasattr(part, "text"))


def test_the_run_before_a_change_is_drawn_where_the_work_after_it_is_unknown():
    chapter = roofline.render(Evidence("t", runs=(RICH, replayed(RICH))))
    assert chapter.blocks[0].text == roofline.EARLIER
    assert isinstance(chapter.blocks[-1], Picture)


def test_what_is_known_after_a_change_is_drawn_of_it():
    assert told_of(RICH) == told_of(HOST_ONLY, RICH) == told_of(RICH, RICH)
    assert roofline.EARLIER not in told_of(RICH, RICH)


def test_without_known_work_in_any_run_it_is_said_how_to_get_it():
    missing = roofline.render(Evidence("t", runs=(replayed(RICH), HOST_ONLY)))
    assert missing.how == roofline.HOW


def test_a_step_that_recording_made_longer_has_the_share_of_an_unrecorded_one():
    slowed = quantities_in(told_of(timed(RICH, 8_000_000, 4_000_000)))
    calm = quantities_in(told_of(timed(RICH, 4_000_000, 4_000_000)))
    assert (slowed[0], slowed[1:]) == ("25 %", ["50 %", *calm[1:]])
    assert calm[0] == "25 %"


@pytest.mark.parametrize("chapter", [appendix, roofline])
def test_rates_that_follow_from_the_gpus_attributes_are_none_of_a_datasheet(chapter):
    def told(source):
        device = replace(RICH.meta.device, source=source, is_measured=False)
        run = replace(RICH, meta=replace(RICH.meta, device=device))
        return str(chapter.render(Evidence("t", runs=(run,))))

    derived, listed = told(OF_ATTRIBUTES), told("a revision")
    assert DERIVED in derived
    assert "datasheet" not in derived
    assert DERIVED not in listed
    assert "datasheet" in listed
