"""A sample of cases leaves out only what a committed result speaks for."""

import re

import pytest

pytest.importorskip("torch")

from tests.samples import HOSTILE, VERSIONS, benchmark, draw, ran_today, sample

COMMIT = "635d03b000000000000000000000000000000000"
FIVE = ("fork", "thread", "signal", "exit", "wait")
RECORDER = "code/kprof/collect/recorder"


def measured_today(**different):
    """Return a result of today's sources and versions, with other values where it says so."""
    return {
        "commit": "HEAD",
        "ran": ran_today(HOSTILE),
        "versions": benchmark("evidence").installed_versions(),
        "rows": [{"name": name, "met": True} for name in FIVE],
        **different,
    }


def drawn_from(names=FIVE, every=5, commit=COMMIT, **different):
    return draw(HOSTILE, measured_today(**different), names, every, commit)


@pytest.mark.parametrize(("every", "num_run"), [(1, 5), (2, 3), (3, 2), (5, 1), (6, 1)])
def test_where_nothing_changed_one_of_as_many_runs_as_are_asked_for(every, num_run):
    drawn = drawn_from(every=every)
    assert len(drawn.left_out) == 5 - num_run
    assert re.search(rf"\b{num_run} of 5\b", drawn.reason)
    assert COMMIT[:7] in drawn.reason


def test_the_same_commit_draws_the_same_and_other_commits_draw_every_case():
    run = [set(FIVE) - drawn_from(commit=str(number)).left_out for number in range(50)]
    assert run[0] == set(FIVE) - drawn_from(commit="0").left_out
    assert set.union(*run) == set(FIVE)


@pytest.mark.parametrize("met", [False, None])
def test_what_did_not_run_or_not_as_it_should_is_not_left_out(met):
    rows = [{"name": "fork", "met": met}, *({"name": name, "met": True} for name in FIVE[1:])]
    assert all("fork" not in drawn_from(commit=str(c), rows=rows).left_out for c in range(20))


def test_what_is_new_is_not_left_out():
    assert all("new" not in drawn_from((*FIVE, "new"), commit=str(c)).left_out for c in range(20))


def test_all_run_where_a_source_is_another_than_was_measured():
    drawn = drawn_from(ran={**ran_today(HOSTILE), RECORDER: "another"})
    assert not drawn.left_out and drawn.reason.endswith(f".json: {RECORDER}")


def test_all_run_where_a_source_is_new():
    ran = ran_today(HOSTILE)
    del ran[RECORDER]
    drawn = drawn_from(ran=ran)
    assert not drawn.left_out and drawn.reason.endswith(f".json: {RECORDER}")


def test_all_run_where_a_source_is_gone():
    drawn = drawn_from(ran={**ran_today(HOSTILE), "code/kprof/gone.py": "0"})
    assert not drawn.left_out and drawn.reason.endswith(".json: code/kprof/gone.py")


@pytest.mark.parametrize("name", VERSIONS)
def test_all_run_with_another_version(name):
    versions = {**measured_today()["versions"], name: "0"}
    drawn = drawn_from(versions=versions)
    assert not drawn.left_out and drawn.reason.endswith(f".json: {name}")


def test_all_run_where_no_number_is_given():
    assert not sample(HOSTILE, FIVE, None).left_out
