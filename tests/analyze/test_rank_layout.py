"""What each rank does in a job, by the process groups that its recording names."""

import random

import pytest

from kprof.analyze.condense import rank_totals
from kprof.analyze.passes import analyze
from kprof.analyze.rank_layout import dimension_of, places, what_they_share
from kprof.collect.merge import merge
from kprof.report.section import Table
from kprof.report.sections import ranks
from kprof.report.units import MISSING
from kprof.trace import Meta, ProcessGroup
from tests.traces import trace_of


def meta_of(*groups):
    named = (ProcessGroup(str(n), tuple(ranks), of) for n, (of, ranks) in enumerate(groups))
    return Meta("x", "kineto", process_groups=tuple(named))


# Eight ranks: two stages of two replicas of two tensor-parallel ranks.
MESH = meta_of(
    ("default_pg", range(8)),
    *(("mesh_pp", (rank, rank + 4)) for rank in range(4)),
    *(("mesh_dp", (rank, rank + 2)) for rank in (0, 1, 4, 5)),
    *(("mesh_tp", (rank, rank + 1)) for rank in (0, 2, 4, 6)),
)


@pytest.mark.parametrize(
    ("description", "dimension"),
    [
        ("mesh_tp", "tensor"),
        ("mesh_dp_shard", "data"),
        ("mesh_fsdp", "data"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", None),
        ("DATA_PARALLEL_GROUP_WITH_CP", None),
        ("mesh_dp_cp", None),
        ("default_pg", None),
        ("undefined", None),
        ("steps_deepspeed", None),
        ("", None),
    ],
)
def test_a_description_tells_along_what_a_group_splits_the_job(description, dimension):
    assert dimension_of(description) == dimension


def test_a_rank_has_a_place_along_each_dimension():
    assert places(MESH)[6] == {"data": 1, "pipeline": 1, "tensor": 0}


def test_without_words_that_tell_a_rank_has_no_place():
    assert places(meta_of(("default_pg", range(4)), ("undefined", (0, 1)))) == {}


def test_a_group_of_one_rank_splits_nothing():
    assert places(meta_of(("mesh_tp", (0,)), ("mesh_tp", (1,)))) == {}


def test_of_hybrid_sharding_each_dimension_counts_by_itself():
    hybrid = meta_of(
        *(("mesh_dp_shard", ranks) for ranks in ((0, 1), (2, 3))),
        *(("mesh_dp_replicate", ranks) for ranks in ((0, 2), (1, 3))),
    )
    assert places(hybrid)[2] == {"dp_replicate": 1, "dp_shard": 0}


def test_a_dimension_in_which_a_rank_is_in_two_groups_is_left_out():
    assert places(meta_of(("mesh_tp", (0, 1)), ("mesh_tp", (0, 2)))) == {}


@pytest.mark.parametrize(
    ("ranks", "shared"),
    [
        ({4, 5, 6, 7}, "pipeline stage 1"),
        ({2, 3}, "process group mesh_tp [2, 3]"),
        ({0, 2, 4, 6}, "rank 0 of every tensor group"),
        ({0, 3}, None),
        ({4, 5, 6}, None),
        ({3}, None),
    ],
)
def test_ranks_share_what_they_alone_have(ranks, shared):
    assert what_they_share(ranks, range(8), MESH) == shared


def test_a_stage_of_one_rank_is_named_and_its_group_is_not():
    two = meta_of(("mesh_pp", (0, 1)))
    assert what_they_share({1}, range(2), two) == "pipeline stage 1"


def test_only_ranks_that_were_recorded_need_to_share_it():
    assert what_they_share({4, 6}, {0, 2, 4, 6}, MESH) == "pipeline stage 1"


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_groups_does_not_matter(seed):
    groups = random.Random(seed).sample(MESH.process_groups, len(MESH.process_groups))
    shuffled = Meta("x", "kineto", process_groups=tuple(groups))
    assert places(shuffled) == places(MESH)


def rank_with(rank, **about):
    return trace_of({"rank": rank}, **about)


def test_ranks_merged_keep_their_nodes_gpus_and_groups_each_once():
    group = ProcessGroup("1", (0, 1), "mesh_tp")
    both = [
        rank_with(n, nodes=((n, 7),), gpu_uuids=((n, f"GPU-{n}"),), process_groups=(group,))
        for n in (0, 1)
    ]
    for order in (both, both[::-1]):
        first, second = rank_totals(analyze(merge(order, "job")))
        assert (first.node, first.gpu_uuids, first.place) == (7, ("GPU-0",), {"tensor": 0})
        assert (second.node, second.gpu_uuids, second.place) == (7, ("GPU-1",), {"tensor": 1})


def test_files_that_do_not_tell_their_ranks_have_no_places_in_groups():
    group = ProcessGroup("1", (0, 1), "mesh_tp")
    alike = [rank_with(0, gpu_uuids=((0, uuid),), process_groups=(group,)) for uuid in "ab"]
    first, second = rank_totals(analyze(merge(alike, "job")))
    assert (first.gpu_uuids, second.gpu_uuids) == (("a",), ("b",))
    assert (first.place, second.place) == ({}, {})


def test_the_table_by_rank_shows_gpu_and_place_where_they_are_recorded():
    group = ProcessGroup("1", (0, 1), "mesh_tp")
    about = {"gpu_uuids": ((0, "GPU-12345678-9abc"),), "process_groups": (group,)}
    told = analyze(merge([rank_with(0, **about), rank_with(1)], "job"))
    untold = analyze(merge([rank_with(0), rank_with(1)], "job"))
    (table,) = (part for part in ranks.render(told).parts if isinstance(part, Table))
    assert [one.header for one in table.columns][-2:] == ["GPU", "Place"]
    assert [row[-2:] for row in table.rows] == [("12345678", "tensor 0"), (MISSING, "tensor 1")]
    (table,) = (part for part in ranks.render(untold).parts if isinstance(part, Table))
    assert "GPU" not in [one.header for one in table.columns]
