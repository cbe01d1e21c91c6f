"""How replayed time got its names, and how sure each way is."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kprof.analyze.attribution.attribute import add_attribution
from kprof.analyze.attribution.cuda_graphs import (
    AGREES,
    CAPTURE,
    OWN_NAME,
    PLACE,
    WAYS,
    compare_names,
    how_named,
)
from kprof.analyze.attribution.ledger import balance
from kprof.analyze.passes import analyze
from kprof.collect.readers.kineto import reader as kineto
from kprof.report.result import result_of
from kprof.report.sections import ledger
from kprof.trace import CompiledCode, CompiledLaunch, NodeNote
from tests.collect.recorder.test_recorded_graph import opened
from tests.quantities import quantities_in
from tests.section_traces import tables, texts
from tests.traces import trace_of

H200 = Path(__file__).parents[2] / "data" / "h200"
CALL = {"kind": "runtime", "duration_ns": 5}
LAUNCH = {**CALL, "name": "cudaGraphLaunch", "start_ns": 5_001, "correlation": 9}
REPLAY = ({"kind": "graph", "name": "0", "start_ns": 5_000, "duration_ns": 50}, LAUNCH)


def capture_of(*operators):
    rows = [{"kind": "capture", "name": "0", "start_ns": 0, "duration_ns": 1_000}]
    for place, name in enumerate(operators):
        start_ns = 100 * place + 10
        rows.append({"name": name, "start_ns": start_ns, "duration_ns": 50})
        rows.append({**CALL, "name": "cudaLaunchKernel", "start_ns": start_ns + 5})
    return tuple(rows)


def replayed(*names, **each):
    return [
        {"name": name, "start_ns": 6_000 + 100 * i, "correlation": 9, **each}
        for i, name in enumerate(names)
    ]


def named_by(*kernels, ranges=REPLAY, **meta):
    trace = trace_of(*kernels, ranges=ranges)
    return how_named(add_attribution(replace(trace, meta=replace(trace.meta, **meta))))


def test_an_eager_run_has_no_replayed_time_to_name():
    launch = {**CALL, "name": "cudaLaunchKernel", "correlation": 9}
    assert named_by({"correlation": 9}, ranges=(launch,)) == []


def test_a_capture_whose_operators_fit_the_kernels_names_is_highly_trusted():
    ranges = capture_of("aten::mm", "aten::relu") + REPLAY
    (one,) = named_by(*replayed("nvjet_sm90_tst", "vectorized_kernel"), ranges=ranges)
    assert (one.way, one.time_ns, one.share) == ("capture", 200, 1.0)
    assert (one.confidence, one.checked_share, one.agreeing_share) == ("high", 0.5, 1.0)


def test_a_capture_whose_operators_contradict_the_kernels_names_is_hardly_trusted():
    ranges = capture_of("aten::relu", "aten::mm") + REPLAY
    (one,) = named_by(*replayed("nvjet_sm90_tst", "vectorized_kernel"), ranges=ranges)
    assert (one.confidence, one.agreeing_share) == ("low", 0.0)


def test_a_capture_that_no_kernels_name_confirms_is_fairly_trusted():
    ranges = capture_of("aten::relu") + REPLAY
    (one,) = named_by(*replayed("vectorized_kernel"), ranges=ranges)
    assert (one.confidence, one.checked_share, one.agreeing_share) == ("fair", 0.0, None)


def test_a_product_in_a_convolution_agrees_with_it():
    ranges = capture_of("aten::cudnn_convolution") + REPLAY
    (one,) = named_by(*replayed("nvjet_sm90_tst"), ranges=ranges)
    assert one.confidence == "high"


def test_what_torch_noted_of_a_node_is_highly_trusted_and_the_rest_of_its_graph_is_unnamed():
    kernels = [*replayed("one", graph_node=1), *replayed("two", graph_node=2)]
    notes = (NodeNote(rank=0, node=1, module="layers.0"),)
    found = {one.way: one for one in named_by(*kernels, graph_notes=notes)}
    assert found["annotation"].confidence == "high"
    assert found["nothing"].confidence is None
    assert [one.share for one in found.values()] == [0.5, 0.5]


def test_generated_code_is_surer_by_its_kernels_names_than_by_their_places():
    launches = tuple(map(CompiledLaunch, ("triton_norm", "aten::mm", "triton_add")))
    code = CompiledCode(("fkey",), launches, is_in_order=True)
    around = {"kind": "range", "name": "## Call CompiledFxGraph fkey ##"}
    ranges = ({**around, "start_ns": 4_000, "duration_ns": 2_000}, LAUNCH)
    names = ("triton_norm", "some_kernel", "triton_add")
    found = named_by(*replayed(*names), ranges=ranges, compiled=(code,))
    told = {one.way: (one.confidence, one.time_ns) for one in found}
    assert told == {OWN_NAME: ("high", 200), PLACE: ("fair", 100)}


@pytest.mark.parametrize("name", ["llama_train", "convnet_dataloader", "hf_generate"])
def test_kernels_names_agree_with_the_operators_of_eager_steps_and_not_with_their_neighbours(name):
    kernels = add_attribution(kineto.read(H200 / f"{name}.json.gz")).kernels
    kernels = kernels[(kernels["activity"] == "kernel") & kernels["op"].notna()]
    checked_ns, agreeing_ns = compare_names(kernels)
    assert agreeing_ns == checked_ns > 0.3 * kernels["duration_ns"].sum()
    beside = kernels.assign(op=np.roll(kernels["op"].astype(object), 1))
    checked_ns, agreeing_ns = compare_names(beside)
    assert agreeing_ns < 0.55 * checked_ns < AGREES * checked_ns


def test_a_recorded_capture_agrees_with_the_names_of_all_that_its_replays_ran():
    (one,) = how_named(opened())
    assert (one.way, one.confidence, one.agreeing_share) == ("capture", "high", 1.0)
    assert one.checked_share > 0.4


def test_the_report_and_the_result_say_how_replays_were_named_and_how_sure_that_is():
    ranges = capture_of("aten::relu") + REPLAY
    trace = analyze(trace_of(*replayed("vectorized_kernel"), ranges=ranges))
    section = ledger.render(trace)
    (said,) = [text for text in texts(section).splitlines() if "by capture (" in text]
    assert ("fair" in said, quantities_in(said)) == (True, ["100.0 %"])
    assert tables(section)[-1].rows[0][:4] == ("capture", "fair", "100.0 %", "100 ns")
    (told,) = json.loads(json.dumps(result_of(trace, balance(trace))))["replayed"]
    assert (told["way"], told["confidence"], told["share"]) == ("capture", "fair", 1.0)
    assert told["because"].startswith(f"{WAYS[CAPTURE][0]}; ")
