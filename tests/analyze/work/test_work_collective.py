import json

import pytest

from kprof.analyze.roofline.operator_work import find_model
from kprof.analyze.work import Inputs, Work
from tests.analyze.calls import tensor, work_of

X = tensor("bf16", 8, 10)


def work_of_message(*message):
    _, model = find_model("record_param_comms")
    return model(Inputs((), (), message=json.dumps(message)))


def test_an_all_reduce_reads_and_writes_its_message_and_adds_its_part_of_it():
    assert work_of_message("allreduce", 800, 800, "Float", 8) == Work(700, 6400, "fp32")


def test_an_all_gather_writes_what_all_give():
    work = work_of_message("_allgather_base", 100, 800, "BFloat16", 8)
    assert work == Work(0, 2 * 900, "fp32")


def test_a_reduce_scatter_writes_its_part_of_the_sums():
    work = work_of_message("_reduce_scatter_base", 800, 100, "BFloat16", 8)
    assert work == Work(700, 2 * 900, "fp32")


@pytest.mark.parametrize("name", ["broadcast", "_broadcast_oop", "send", "recv"])
def test_a_rank_of_a_broadcast_or_of_a_pair_only_reads_or_only_writes(name):
    assert work_of_message(name, 100, 100, "Byte", 2) == Work(0, 100, "fp32")


def test_who_writes_the_result_of_a_reduction_to_one_rank_is_unknown():
    assert work_of_message("reduce", 100, 100, "Float", 4) == Work(75, 400, "fp32", "at least")


def test_without_the_number_of_ranks_additions_are_unknown():
    assert work_of_message("allreduce", 100, 100, "Float", None) == Work(None, 800, "fp32")


@pytest.mark.parametrize(
    "message", [["allreduce", None, 5, "Float", 2], ["allreduce", 5, 5, "?", 2]]
)
def test_a_message_of_unknown_size_has_unknown_work(message):
    assert work_of_message(*message) is None


def test_a_result_that_is_given_tells_what_a_rank_gets():
    assert work_of("c10d::_allgather_base_", tensor("bf16", 64, 10), X).bytes == 2 * 720
    scattered = work_of("c10d::_reduce_scatter_base_", X, tensor("bf16", 64, 10))
    assert scattered == Work(560, 2 * 720, "fp32")


def test_an_old_annotation_tells_at_least_what_a_rank_gives():
    assert work_of("nccl:all_to_all", X) == Work(None, 160, bound="at least")
    assert work_of("nccl:all_reduce", X) == Work(None, 320, "fp32")
