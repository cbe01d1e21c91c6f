"""A page that is made of several workloads or devices says so: one's verdict is not another's."""

from dataclasses import replace

import pytest

from kprof.report.partner.evidence import Evidence
from tests.report.partner_evidence import comparison_of
from tests.report.partner_pages import said
from tests.report.test_partner_host import timed
from tests.section_traces import HOST_ONLY, RICH


def page(run, a, b):
    """Return what the page says of a recorded command and a comparison of two others."""
    recorded = replace(RICH, meta=replace(RICH.meta, command=tuple(run.split())))
    compared = comparison_of(facts={"command of A": a, "command of B": b})
    return said(Evidence("t", runs=(recorded,), comparisons=(compared,)))


def test_a_run_beside_a_comparison_of_another_script_is_pointed_out():
    text = page("python3 /home/me/gan.py", "python3 mlp.py --fast", "python3 mlp.py")
    assert "measurements of different workloads: gan.py; mlp.py." in text


@pytest.mark.parametrize(
    ("run", "a", "b"),
    [
        ("python3 train.py --steps 3", "python3 elsewhere/train.py", "python3 train.py --fused"),
        ("python3 new.py", "python3 old.py", "python3 new.py"),
        ("torchrun --nproc-per-node 2 train.py", "python3 train.py", "python3 train.py"),
        ("python3 -m train.main --fast", "python3 -m train.main", "python3 -m train.main --fast"),
        ("./serve --port 1", "bin/serve", "bin/serve"),
    ],
)
def test_one_workload_however_it_was_started_is_no_doubt(run, a, b):
    assert "different workloads" not in page(run, a, b)


def test_a_comparison_of_functions_names_no_script():
    recorded = replace(RICH, meta=replace(RICH.meta, command=("python3", "train.py")))
    evidence = Evidence("t", runs=(recorded,), comparisons=(comparison_of(facts={}),))
    assert "different workloads" not in said(evidence)


def beside(run, of="train.py", **facts):
    """Return what the page says of a comparison, of 40 and 32 ms, and what lies beside it."""
    return said(Evidence("t", runs=(run,), comparisons=(comparison_of(name=of, facts=facts),)))


def measured_on(text):
    """Return what the cover says that it was measured on, and what follows."""
    return text.partition("Measured on ")[2].partition(" Confidence ")[0]


def test_the_cover_names_the_comparisons_gpu_and_never_that_of_a_run_beside_it():
    assert measured_on(beside(RICH, GPU="Square GPU")) == "Square GPU"
    assert measured_on(beside(HOST_ONLY, GPU="Square GPU")) == "Square GPU"
    assert measured_on(beside(RICH, torch="2.13.0+cpu")) == ""
    assert measured_on(beside(HOST_ONLY, torch="2.13.0+cpu")).startswith("host CPU")
    assert measured_on(said(Evidence("t", runs=(RICH,)))).startswith("Round GPU")


def test_a_host_only_run_does_not_say_that_no_gpu_took_part_in_the_comparison():
    assert "No GPU was used" not in beside(HOST_ONLY, GPU="Square GPU")
    assert "No GPU was used" in beside(HOST_ONLY)


@pytest.mark.parametrize(
    ("run", "facts", "told"),
    [
        (
            RICH,
            {"GPU": "Square GPU"},
            "names Square GPU, but the report also holds a recording on Round GPU.",
        ),
        (RICH, {}, "names no GPU, but the report also holds a recording on Round GPU."),
        (
            HOST_ONLY,
            {"gpu": "Square GPU"},
            "names Square GPU, but the report also holds a recording on no GPU.",
        ),
    ],
)
def test_a_run_on_another_device_than_the_comparison_is_pointed_out(run, facts, told):
    assert told in beside(run, **facts)


def test_another_comparison_on_another_device_is_pointed_out():
    both = comparison_of(), comparison_of(facts={"GPU": "Square GPU"})
    assert "also holds a comparison on Square GPU." in said(Evidence("t", comparisons=both))


@pytest.mark.parametrize(("run", "facts"), [(RICH, {"gpu": "Round GPU"}), (HOST_ONLY, {})])
def test_one_device_is_no_doubt(run, facts):
    assert "on one device" not in beside(run, **facts)


ANOTHER_STEP = "the definition of a step may differ"


@pytest.mark.parametrize("step_ns", [4_000_000, 400_000_000])
def test_a_single_run_whose_step_is_far_from_the_comparisons_is_pointed_out(step_ns):
    text = beside(timed(RICH, step_ns, step_ns), GPU="Round GPU")
    assert f"{step_ns / 1e6:.3g}" in text.partition("A step took ")[2].partition(",")[0]
    assert ANOTHER_STEP in text


@pytest.mark.parametrize(("recorded", "unrecorded"), [(84, 41), (45, 30), (100, 0), (33, 32)])
def test_a_step_that_recording_or_the_day_made_longer_may_be_the_same(recorded, unrecorded):
    run = timed(RICH, recorded * 10**6, unrecorded * 10**6)
    if not unrecorded:
        recording = replace(run.meta.recording, unrecorded_step_ns=())
        run = replace(run, meta=replace(run.meta, recording=recording))
    assert ANOTHER_STEP not in beside(run, GPU="Round GPU")


def test_of_a_single_run_a_step_of_another_time_is_said_beside_its_shares():
    text = beside(timed(RICH, 60_000_000, 50_000_000), GPU="Round GPU")
    told = "with them: 50.0 ms around the recording and 40.0 ms before and 32.0 ms after the change"
    assert told in text
    for alike in (39_000_000, 33_000_000):
        assert "from run to run" not in beside(timed(RICH, alike, alike), GPU="Round GPU")
