"""Load of experts: the elements that all-to-alls of an expert-parallel group bring to each rank."""

import json
from dataclasses import replace

import pytest

from kprof.analyze.condense import condensed
from kprof.analyze.expert_load import find_expert_load
from kprof.trace import ProcessGroup
from tests.traces import trace_of

EXPERTS = ProcessGroup("3", (0, 1), "EXPERT_MODEL_PARALLEL_GROUP")
# To the experts and back: rank 0's were chosen three times as often.
THERE_AND_BACK = (((100, 150), (100, 50)), ((150, 100), (50, 100)))


def exchanged(calls=THERE_AND_BACK, *, groups=(EXPERTS,), numbers=True, name="all_to_allv"):
    """Return a trace of two ranks; each call has the elements that each rank gives and gets."""
    rows, ranges = [], []
    for number, sizes in enumerate(calls):
        for rank, (given, got) in enumerate(sizes):
            message = json.dumps([name, given, got, "BFloat16", 2])
            rows.append(
                {
                    "rank": rank, "collective": name, "kind": "collective", "group": "3 [0, 1]",
                    "group_sequence": number if numbers else None, "op_row": len(ranges),
                    "start_ns": 1000 * number, "duration_ns": 100, "step": None,
                }
            )  # fmt: skip
            ranges.append({"name": "record_param_comms", "rank": rank, "message": message})
    return trace_of(*rows, ranges=ranges, num_ranks=2, process_groups=groups)


@pytest.mark.parametrize("numbers", [True, False])
def test_the_load_is_the_side_on_which_ranks_differ(numbers):
    (found,) = find_expert_load(exchanged(numbers=numbers))
    assert (found.ranks, found.load, found.calls) == ((0, 1), (1.5, 0.5), 2)
    assert found.busiest == (0, 1.5)


def test_experts_that_are_chosen_alike_are_balanced():
    (found,) = find_expert_load(exchanged([((100, 100), (100, 100))], name="alltoall"))
    assert found.load == (1.0, 1.0)


def test_condensed_ranks_have_the_same_load():
    trace = exchanged()
    assert find_expert_load(replace(trace, all_ranks=condensed(trace))) == find_expert_load(trace)


@pytest.mark.parametrize(
    "trace",
    [
        exchanged(groups=()),
        exchanged(groups=(replace(EXPERTS, description="mesh_dp"),)),
        exchanged(groups=(replace(EXPERTS, ranks=(0, 1, 2)),)),
        exchanged([((100, None), (100, 50))]),
        exchanged(name="allreduce"),
        exchanged([((0, 0), (0, 0))]),
    ],
    ids=["no groups", "no experts", "a rank is missing", "no sizes", "no all-to-all", "nothing"],
)
def test_where_the_recording_does_not_tell_the_load_is_unknown(trace):
    assert find_expert_load(trace) is None
