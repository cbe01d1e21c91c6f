"""Every hostile workload behaves under the recorder as it does alone, and is recorded right."""

import os
import re

import pytest

from tests import hostile_sample
from tests.hostile_sample import UNHASHED, VERSIONS, benchmark, sample, sample_here
from tests.hostility import (
    Ending,
    Observation,
    Workload,
    differences,
    find_missing,
    observe,
    workloads,
)

WORKLOADS = workloads()


def sample_asked_for():
    """Return what this run leaves out: nothing, unless it says how many are enough."""
    names = tuple(workload.name for workload in WORKLOADS)
    return sample_here(names, os.environ.get("HOSTILE_SAMPLE"))


@pytest.mark.hostile
def test_a_sample_is_enough():
    drawn = sample_asked_for()
    if not drawn.left_out:
        # Listed in the summary of every run: it takes the longer, and the result is stale.
        pytest.xfail(f"all {len(WORKLOADS)} hostile workloads run: {drawn.reason}")


@pytest.mark.hostile
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_hostile_workload_does_not_feel_the_recorder(workload, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    drawn = sample_asked_for()
    if workload.name in drawn.left_out:
        pytest.skip(drawn.reason)
    # Other tests run meanwhile, and all take several times as long.
    monkeypatch.setattr("tests.hostility.TIMEOUT_S", 180)
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
    assert differences_of(tmp_path, {"recorded": ["6"]}) == ["steps [5] of rank 0 were recorded"]


def test_a_rank_that_left_nothing_is_a_difference(tmp_path):
    (found,) = differences_of(tmp_path, {"recorded": ["5"], "ranks": ["0 1"]})
    assert "ranks [0] left a recording, not [0, 1]" in found


def test_a_message_that_nobody_expects_is_a_difference(tmp_path):
    found = differences_of(tmp_path, {"recorded": ["5"]}, messages=("The recorder stopped.",))
    assert found == ["kprof says: The recorder stopped."]


def test_a_message_that_does_not_come_is_a_difference(tmp_path):
    found = differences_of(tmp_path, {"recorded": ["5"], "says": ["forked"]})
    assert found == ["kprof does not say: forked"]


COMMIT = "635d03b000000000000000000000000000000000"
FIVE = ("fork", "thread", "signal", "exit", "wait")


def measured_today(**different):
    """Return a result of today's sources and versions, with other values where it says so."""
    hostile, evidence = benchmark()
    return {
        "commit": "HEAD",
        "sources": evidence.hash_sources(hostile.SOURCES),
        "versions": evidence.installed_versions(),
        "rows": [{"name": name, "value": 0} for name in FIVE],
        **different,
    }


@pytest.fixture
def unchanged_files(monkeypatch):
    monkeypatch.setattr(hostile_sample, "_differs", lambda name, commit: False)


@pytest.mark.usefixtures("unchanged_files")
def test_where_nothing_changed_as_many_run_as_are_asked_for():
    drawn = sample(FIVE, 2, COMMIT, measured_today())
    assert len(drawn.left_out) == 3 and drawn.left_out < set(FIVE)
    assert "only 2 of 5 run, drawn by commit 635d03b" in drawn.reason


@pytest.mark.usefixtures("unchanged_files")
def test_the_same_commit_draws_the_same_and_other_commits_draw_every_workload():
    run = [set(FIVE) - sample(FIVE, 1, str(c), measured_today()).left_out for c in range(50)]
    assert run[0] == set(FIVE) - sample(FIVE, 1, "0", measured_today()).left_out
    assert set.union(*run) == set(FIVE)


@pytest.mark.usefixtures("unchanged_files")
@pytest.mark.parametrize("value", [1, None])
def test_what_did_not_behave_alike_or_did_not_run_is_not_left_out(value):
    rows = [{"name": "fork", "value": value}, *({"name": name, "value": 0} for name in FIVE[1:])]
    assert sample(FIVE, 0, COMMIT, measured_today(rows=rows)).left_out == set(FIVE[1:])


@pytest.mark.usefixtures("unchanged_files")
def test_a_new_workload_is_not_left_out():
    assert sample((*FIVE, "new"), 0, COMMIT, measured_today()).left_out == set(FIVE)


@pytest.mark.usefixtures("unchanged_files")
def test_all_run_where_a_source_is_another_than_was_measured():
    sources = {**measured_today()["sources"], "kprof/collect/launch.py": "another"}
    drawn = sample(FIVE, 2, COMMIT, measured_today(sources=sources))
    assert not drawn.left_out and "kprof/collect/launch.py" in drawn.reason


@pytest.mark.usefixtures("unchanged_files")
def test_all_run_where_a_source_is_new():
    sources = measured_today()["sources"]
    new = sources.popitem()[0]
    drawn = sample(FIVE, 2, COMMIT, measured_today(sources=sources))
    assert not drawn.left_out and new in drawn.reason


@pytest.mark.usefixtures("unchanged_files")
@pytest.mark.parametrize("name", VERSIONS)
def test_all_run_with_another_version(name):
    pytest.importorskip("torch")
    versions = {**measured_today()["versions"], name: "0"}
    drawn = sample(FIVE, 2, COMMIT, measured_today(versions=versions))
    assert not drawn.left_out and drawn.reason.endswith(name)


def test_all_run_where_nobody_knows_the_commit_that_was_measured():
    drawn = sample(FIVE, 2, COMMIT, measured_today(commit=COMMIT))
    assert not drawn.left_out and "kprof/errors.py" in drawn.reason


def test_all_run_where_nobody_asks_for_fewer():
    assert not sample_here(FIVE, None).left_out


def test_every_module_that_the_launch_imports_is_looked_at():
    launch = (hostile_sample.ROOT / "kprof" / "collect" / "launch.py").read_text()
    imported = re.findall(r"^from (kprof\.\S+) import", launch, flags=re.MULTILINE)
    paths = {f"{module.replace('.', '/')}.py" for module in imported}
    assert paths <= {*UNHASHED, *measured_today()["sources"]}
