"""Every hostile workload behaves under the recorder as it does alone, and is recorded right."""

import re

import pytest

from tests.hostility import (
    Ending,
    Observation,
    Workload,
    differences,
    find_missing,
    observe,
    workloads,
)
from tests.samples import HOSTILE, benchmark, skip_if_left_out, tell_if_all_run

WORKLOADS = workloads()
NAMES = [workload.name for workload in WORKLOADS]


@pytest.mark.hostile
def test_a_result_speaks_for_what_a_sample_leaves_out():
    tell_if_all_run(HOSTILE, NAMES)


@pytest.mark.hostile
@pytest.mark.parametrize("workload", WORKLOADS, ids=NAMES)
def test_a_hostile_workload_does_not_feel_the_recorder(workload, tmp_path):
    pytest.importorskip("torch")
    skip_if_left_out(HOSTILE, NAMES, workload.name)
    if missing := find_missing(workload):
        pytest.skip(f"needs {missing}")
    assert differences(workload, observe(workload, tmp_path)) == []


ALIKE = Ending(exit_code=0, out=b"3.5\n", err=b"", files={}, processes=())
TRAINED = {"rank": 0, "num_steps_seen": 9, "window": [5, 5], "problems": [], "caveats": []}
TRAINED |= {"steps": [{"index": 4, "recorded": False}, {"index": 5, "recorded": True}]}


def differences_of(tmp_path, expected, recorded=ALIKE, recorders=(TRAINED,), messages=()):
    workload = Workload(tmp_path / "train.py", "none", "true", None, expected)
    return differences(workload, Observation(ALIKE, recorded, {0: list(recorders)}, messages))


def test_a_run_as_it_was_expected_differs_in_nothing(tmp_path):
    assert differences_of(tmp_path, {"recorded": ["5"], "seen": ["9"]}) == []


def test_another_last_bit_of_a_result_is_a_difference(tmp_path):
    recorded = Ending(exit_code=0, out=b"3.4\n", err=b"", files={}, processes=())
    (found,) = differences_of(tmp_path, {"recorded": ["5"]}, recorded)
    assert "-3.5\n+3.4" in found


def test_a_process_that_stays_behind_is_a_difference(tmp_path):
    recorded = Ending(exit_code=0, out=b"3.5\n", err=b"", files={}, processes=(b"sleep 9",))
    (found,) = differences_of(tmp_path, {"recorded": ["5"]}, recorded)
    assert "sleep 9" in found


def test_another_step_than_expected_is_a_difference(tmp_path):
    (found,) = differences_of(tmp_path, {"recorded": ["6"]})
    assert found.startswith("steps [5] ")


def test_a_rank_that_left_nothing_is_a_difference(tmp_path):
    (found,) = differences_of(tmp_path, {"recorded": ["5"], "ranks": ["0 1"]})
    assert re.findall(r"\[.*?\]", found)[:2] == ["[0]", "[0, 1]"]


def test_an_unexpected_message_is_a_difference(tmp_path):
    message = "The recorder stopped."
    found = differences_of(tmp_path, {"recorded": ["5"]}, messages=(message,))
    assert found == [f"kprof says: {message}"]


def test_a_message_that_does_not_come_is_a_difference(tmp_path):
    (found,) = differences_of(tmp_path, {"recorded": ["5"], "says": ["forked"]})
    assert found.endswith("not say: forked")


KILLED = Ending(exit_code=139, out=b"", err=b"Fatal Python error", files={}, processes=())
HANGS = Ending(exit_code=None, out=b"", err=b"", files={}, processes=())


def counts_of(*endings):
    return benchmark("hostile").counts_of(
        [Observation(plain, recorded, {}, ()) for plain, recorded in endings]
    )


def test_a_run_that_only_the_recorder_ends_by_a_signal_or_for_ever_is_a_death():
    endings = (ALIKE, KILLED), (ALIKE, HANGS), (ALIKE, ALIKE)
    assert counts_of(*endings) == {"runs": 3, "deaths": 2, "changed_results": 2}


def test_a_run_that_dies_without_the_recorder_as_well_is_no_death():
    assert counts_of((KILLED, KILLED)) == {"runs": 1, "deaths": 0, "changed_results": 0}
