"""A page that is made of several workloads or devices says so: one's verdict is not another's."""

import re
from dataclasses import replace

import pytest

from kprof.report.partner.evidence import Evidence
from kprof.report.partner.mixed import NO_GPU, say_mixed
from kprof.report.partner.sections import summary, time
from kprof.report.section import Text
from tests.quantities import quantities_in
from tests.report.partner_evidence import comparison_of
from tests.report.partner_pages import facts_of, rows_of
from tests.report.test_partner_host import timed
from tests.section_traces import HOST_ONLY, RICH


def doubts_of(run, a, b):
    """Return the doubts about a recorded command beside a comparison of two others."""
    recorded = replace(RICH, meta=replace(RICH.meta, command=tuple(run.split())))
    compared = comparison_of(facts={"GPU": "Round GPU", "command of A": a, "command of B": b})
    return say_mixed(Evidence("t", runs=(recorded,), comparisons=(compared,)))


def test_a_run_beside_a_comparison_of_another_script_is_pointed_out():
    (doubt,) = doubts_of("python3 /home/me/gan.py", "python3 mlp.py --fast", "python3 mlp.py")
    assert re.findall(r"[\w/]+\.py", doubt) == ["gan.py", "mlp.py"]


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
    assert doubts_of(run, a, b) == []


def test_a_comparison_of_functions_names_no_script():
    recorded = replace(RICH, meta=replace(RICH.meta, command=("python3", "train.py")))
    evidence = Evidence("t", runs=(recorded,), comparisons=(comparison_of(),))
    assert "command of A" not in comparison_of().facts
    assert say_mixed(evidence) == []


def beside(run, **facts):
    """Return the evidence of a comparison, of 40 and 32 ms, and of a run beside it."""
    return Evidence("t", runs=(run,), comparisons=(comparison_of(facts=facts),))


def measured_on(evidence):
    """Return what the cover says that it was measured on, and what follows."""
    return facts_of(evidence, "Measured on")


def test_the_cover_names_the_comparisons_gpu_and_never_that_of_a_run_beside_it():
    assert measured_on(beside(RICH, GPU="Square GPU")) == ["Square GPU"]
    assert measured_on(beside(HOST_ONLY, GPU="Square GPU")) == ["Square GPU"]
    assert measured_on(beside(RICH, torch="2.13.0+cpu")) == []
    assert measured_on(beside(HOST_ONLY, torch="2.13.0+cpu"))[0].startswith("host CPU")
    assert measured_on(Evidence("t", runs=(RICH,))) == ["Round GPU"]


def test_a_host_only_run_does_not_say_that_no_gpu_took_part_in_the_comparison():
    assert warnings_of(beside(HOST_ONLY, GPU="Square GPU")) == []
    (warning,) = warnings_of(beside(HOST_ONLY))
    assert "GPU" in warning


def warnings_of(evidence):
    """Return the warnings at the head of the summary."""
    texts = [block for block in summary.render(evidence).blocks if isinstance(block, Text)]
    return [block.text for block in texts if block.tone == "warning"]


@pytest.mark.parametrize(
    ("run", "facts", "named"),
    [
        (RICH, {"GPU": "Square GPU"}, ["Square GPU", "Round GPU"]),
        (RICH, {}, [NO_GPU, "Round GPU"]),
        (HOST_ONLY, {"gpu": "Square GPU"}, ["Square GPU", NO_GPU]),
    ],
)
def test_a_run_on_another_device_than_the_comparison_is_pointed_out(run, facts, named):
    (doubt,) = say_mixed(beside(run, **facts))
    assert re.findall(r"\w+ GPU", doubt) == named


def test_another_comparison_on_another_device_is_pointed_out():
    both = comparison_of(), comparison_of(facts={"GPU": "Square GPU"})
    (doubt,) = say_mixed(Evidence("t", comparisons=both))
    assert re.findall(r"\w+ GPU", doubt) == ["Round GPU", "Square GPU"]


@pytest.mark.parametrize(("run", "facts"), [(RICH, {"gpu": "Round GPU"}), (HOST_ONLY, {})])
def test_one_device_is_no_doubt(run, facts):
    assert say_mixed(beside(run, **facts)) == []


@pytest.mark.parametrize("step_ns", [4_000_000, 400_000_000])
def test_a_single_run_whose_step_is_far_from_the_comparisons_is_pointed_out(step_ns):
    evidence = beside(timed(RICH, step_ns, step_ns), GPU="Round GPU")
    (doubt,) = say_mixed(evidence)
    own, *compared = quantities_in(doubt)
    assert float(own.removesuffix(" ms")) == step_ns / 1e6
    assert compared == ["40.0 ms", "32.0 ms"]
    assert rows_of(evidence, "Report") == [(doubt,)]


@pytest.mark.parametrize(("recorded", "unrecorded"), [(84, 41), (45, 30), (100, 0), (33, 32)])
def test_a_step_that_recording_or_the_day_made_longer_may_be_the_same(recorded, unrecorded):
    run = timed(RICH, recorded * 10**6, unrecorded * 10**6)
    if not unrecorded:
        recording = replace(run.meta.recording, unrecorded_step_ns=())
        run = replace(run, meta=replace(run.meta, recording=recording))
    assert say_mixed(beside(run, GPU="Round GPU")) == []


def test_of_a_single_run_a_step_of_another_time_is_said_beside_its_shares():
    assert ["50.0 ms", "40.0 ms", "32.0 ms"] in step_times_beside(60_000_000, 50_000_000)
    assert not [times for times in step_times_beside(39_000_000, 39_000_000) if "40.0 ms" in times]
    assert not [times for times in step_times_beside(33_000_000, 33_000_000) if "40.0 ms" in times]


def step_times_beside(recorded_ns, unrecorded_ns):
    """Return the amounts in each note of the section on time, beside a comparison."""
    run = timed(RICH, recorded_ns, unrecorded_ns)
    chapter = time.render(beside(run, GPU="Round GPU"))
    return [quantities_in(block.text) for block in chapter.blocks if isinstance(block, Text)]
