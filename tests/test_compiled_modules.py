"""Compiled kernels belong to the modules that the compiler noted, or to the model as a whole."""

import gzip
import json
from dataclasses import replace

import pytest

from kprof.analyze.attribute import add_attribution
from kprof.analyze.ledger import balance
from kprof.collect.readers._compiled import add_notes
from kprof.trace import CompiledCode, CompiledLaunch
from tests.test_recorded_traces import opened
from tests.traces import trace_of

CALL = "## Call CompiledFxGraph fkey ##"
NORM, MLP, HEAD = (
    (("Net", "layers.0", "layers.0.norm"),),
    (("Net", "layers.0"),),
    (("Net", "head"),),
)

# What Inductor of torch 2.13 generates, shortened.
GENERATED = """
# Topologically Sorted Source Nodes: [h], Original ATen: [aten.native_layer_norm]
# Source node to ATen node mapping:
#   h => add, mul
triton_per_fused_native_layer_norm_0 = async_compile.triton('''
def triton_per_fused_native_layer_norm_0(in_ptr0):
    other.run(in_ptr0)
''')

def partition_0(args):
    primals_1, primals_2 = args
    assert_size_stride(primals_1, (8, 16), (16, 1), 'input')
    buf0 = empty_strided_cuda((8, 16), (16, 1), torch.float32)
    # Topologically Sorted Source Nodes: [h], Original ATen: [aten.native_layer_norm]
    stream0 = get_raw_stream(0)
    triton_per_fused_native_layer_norm_0.run(primals_1, buf0, 8, 16, stream=stream0)
    return (buf0, )

class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        primals_1, primals_2 = args
        with torch.cuda._DeviceGuard(0):
            (buf0,) = self.partitions[0](partition0_args)
            # Topologically Sorted Source Nodes: [h, linear], Original ATen: [aten.t, aten.addmm]
            extern_kernels.addmm(primals_2, buf0, primals_1, alpha=1, beta=1, out=buf1)
            # Topologically Sorted Source Nodes: [attn], Original ATen: [aten.flash]
            buf2 = torch.ops.aten._flash.default(buf1, buf1, buf1, scale=0.5)
            assert_alignment(buf2, 16, 'torch.ops.aten._flash.default')
            buf3 = empty_strided_cuda((8, 16), (16, 1), torch.float32)
            # Topologically Sorted Source Nodes: [linear, add_2], Original ATen: [aten.add]
            stream0 = get_raw_stream(0)
            triton_poi_fused_add_1.run(buf2, buf3, 128, stream=stream0)
            cpp_fused_relu_2(buf3)
        return (buf3, )
"""


def launches(*names_and_stacks):
    return tuple(CompiledLaunch(name, stacks) for name, stacks in names_and_stacks)


def code(*names_and_stacks, key="fkey", is_in_order=True):
    return CompiledCode((key,), launches(*names_and_stacks), is_in_order)


def call_of(*ops, name=CALL, module="Net", at_ns=0):
    """Return the ranges of a compiled call in a module: each operator 10 ns long, with a launch."""
    rows = [
        {"kind": "module", "name": module, "start_ns": at_ns, "duration_ns": 1000},
        {"kind": "range", "name": name, "start_ns": at_ns + 1, "duration_ns": 900},
    ]
    for i, op in enumerate(ops):
        start_ns = at_ns + 10 * (i + 1)
        rows.append({"name": op, "start_ns": start_ns, "duration_ns": 9})
        rows.append(
            {
                "kind": "runtime",
                "name": "cuLaunchKernel",
                "start_ns": start_ns + 1,
                "duration_ns": 1,
                "correlation": start_ns,
            }
        )
    return rows


def attributed(ranges, compiled):
    kernels = [
        {"name": "k", "correlation": row["correlation"], "start_ns": row["start_ns"] + 2000}
        for row in ranges
        if row.get("kind") == "runtime"
    ]
    return add_attribution(trace_of(*kernels, ranges=ranges, compiled=tuple(compiled))).kernels


def test_launches_in_the_order_of_the_code_have_the_modules_that_it_notes():
    noted = code(("triton_norm", (NORM,)), ("aten::mm", (MLP,)), ("aten::mm", (HEAD,)))
    ranges = call_of("triton_norm", "aten::empty", "aten::mm", "aten::mm")
    kernels = attributed(ranges, [noted])
    assert kernels["module"].tolist() == ["layers.0.norm", "Net", "layers.0", "head"]
    assert kernels["attributed_by"].tolist() == ["compiled", "nesting", "compiled", "compiled"]


def test_a_kernel_that_fuses_modules_belongs_to_the_innermost_that_holds_them_all():
    noted = code(("triton_0", (NORM, MLP)), ("triton_1", (NORM, HEAD)))
    kernels = attributed(call_of("triton_0", "triton_1"), [noted])
    assert kernels["module"].tolist() == ["layers.0", "Net"]
    assert kernels["fused_modules"].tolist() == [
        '["layers.0","layers.0.norm"]',
        '["head","layers.0.norm"]',
    ]


def test_where_the_order_differs_a_name_tells_only_if_all_its_launches_serve_the_same():
    noted = code(("aten::mm", (MLP,)), ("aten::mm", (HEAD,)), ("triton_norm", (NORM,)))
    kernels = attributed(call_of("triton_norm", "aten::mm", "aten::mm"), [noted])
    assert kernels["module"].tolist() == ["layers.0.norm", "Net", "Net"]


def test_code_whose_order_is_not_known_tells_by_name_alone():
    noted = code(("aten::mm", (MLP,)), ("aten::mm", (HEAD,)), is_in_order=False)
    kernels = attributed(call_of("aten::mm", "aten::mm"), [noted])
    assert kernels["module"].tolist() == ["Net", "Net"]
    assert kernels["fused_modules"].isna().all()


def test_an_operator_without_a_note_belongs_to_the_compiled_model():
    kernels = attributed(call_of("aten::mm"), [code(("aten::mm", ()))])
    assert kernels["module"].tolist() == ["Net"]
    assert kernels["attributed_by"].tolist() == ["nesting"]


def test_what_runs_outside_every_module_takes_its_kernel_along():
    kernels = attributed(call_of("triton_0"), [code(("triton_0", (NORM, ())))])
    assert kernels["module"].tolist() == ["Net"]


def test_other_code_of_another_key_names_nothing():
    noted = code(("aten::mm", (HEAD,)), key="fother")
    assert attributed(call_of("aten::mm"), [noted])["module"].tolist() == ["Net"]


LAYERS = (("layers.0", "layers.0.fc"), ("layers.1", "layers.1.fc"))


def test_code_that_all_layers_share_names_the_layer_it_is_called_for():
    ranges = [
        *call_of("aten::mm", module="layers.0"),
        *call_of("aten::mm", module="layers.1", at_ns=1000),
    ]
    kernels = attributed(ranges, [code(("aten::mm", (LAYERS,)))])
    assert kernels["module"].tolist() == ["layers.0.fc", "layers.1.fc"]


def test_code_that_all_layers_share_names_none_where_the_call_does_not_tell_which():
    kernels = attributed(call_of("aten::mm", module="Net"), [code(("aten::mm", (LAYERS,)))])
    assert kernels["module"].tolist() == ["Net"]


def test_code_without_a_key_is_known_by_what_it_launches_if_only_one_does():
    uncached = CALL.replace("fkey", "None")
    codes = [
        code(("aten::mm", (MLP,)), ("aten::bmm", (MLP,)), key="None"),
        code(("aten::mm", (HEAD,)), key="None"),
    ]
    kernels = attributed(call_of("aten::mm", name=uncached), codes)
    assert kernels["module"].tolist() == ["head"]
    two_alike = [*codes, code(("aten::mm", (NORM,)), key="None")]
    assert attributed(call_of("aten::mm", name=uncached), two_alike)["module"].tolist() == ["Net"]


IN_A_GRAPH = code(
    ("triton_norm", (NORM,)), ("aten::mm", (MLP,)), ("triton_add", (MLP,)), ("aten::mm", (HEAD,))
)


def replays(*names, noted=IN_A_GRAPH, more=()):
    ranges = [
        *more,
        {"kind": "module", "name": "Net", "duration_ns": 1000},
        {"kind": "range", "name": CALL, "start_ns": 1, "duration_ns": 900},
        {"kind": "runtime", "name": "cudaGraphLaunch", "start_ns": 5, "correlation": 1},
    ]
    kernels = [{"name": n, "correlation": 1, "start_ns": 100 * i} for i, n in enumerate(names)]
    trace = trace_of(*kernels, ranges=ranges, compiled=(noted,))
    return add_attribution(trace)


def replayed(*names, noted=IN_A_GRAPH):
    return replays(*names, noted=noted).kernels["module"].tolist()


def test_what_a_graph_replays_between_two_known_kernels_is_the_one_launch_between_them():
    names = replayed("triton_norm", "memset", "gemm_sm90", "triton_add", "gemm_sm90")
    assert names == ["layers.0.norm", "layers.0", "layers.0", "layers.0", "head"]


def test_a_replay_in_another_order_is_known_by_its_unique_names_only():
    names = replayed("triton_add", "gemm_sm90", "triton_norm", "gemm_sm90")
    assert names == ["layers.0", "Net", "layers.0.norm", "Net"]


def test_of_two_launches_between_known_kernels_a_replay_does_not_tell_which_ran():
    noted = code(("aten::mm", (MLP,)), ("aten::bmm", (HEAD,)), ("triton_norm", (NORM,)))
    assert replayed("gemm_sm90", "triton_norm", noted=noted) == ["Net", "layers.0.norm"]


TWO_PRODUCTS = code(
    ("triton_norm", (NORM,)), ("aten::mm", (MLP,)), ("aten::bmm", (HEAD,)), ("triton_add", (MLP,))
)


def test_what_a_graph_replays_has_the_operators_that_the_code_launches():
    trace = replays("triton_norm", "gemm_sm90", "triton_add", "gemm_sm90")
    kernels = trace.kernels
    assert kernels["op"].tolist() == ["triton_norm", "aten::mm", "triton_add", "aten::mm"]
    assert set(kernels["attributed_by"]) == {"compiled"}
    assert set(kernels["bucket"]) == {"attributed"}
    assert balance(trace).balances


def test_the_range_of_a_graph_does_not_hide_the_call_that_replays_it():
    graph = {"kind": "graph", "name": "kprof.graph#0", "start_ns": 4, "duration_ns": 20}
    kernels = replays("triton_norm", "gemm_sm90", "triton_add", more=(graph,)).kernels
    assert kernels["op"].tolist() == ["triton_norm", "aten::mm", "triton_add"]
    assert kernels["module"].tolist() == ["layers.0.norm", "layers.0", "layers.0"]


def test_what_was_captured_has_its_operator_from_there_and_its_module_from_the_code():
    captured = (
        {"kind": "capture", "name": "kprof.graph#0", "start_ns": -100, "duration_ns": 50},
        {"name": "aten::norm", "start_ns": -90, "duration_ns": 30},
        {"kind": "runtime", "name": "cuLaunchKernel", "start_ns": -80, "duration_ns": 5},
        {"kind": "graph", "name": "kprof.graph#0", "start_ns": 4, "duration_ns": 20},
    )
    noted = code(("triton_norm", (NORM,)))
    (kernel,) = replays("triton_norm", noted=noted, more=captured).kernels.itertuples()
    assert (kernel.op, kernel.module) == ("aten::norm", "layers.0.norm")


def test_what_the_code_does_not_tell_of_a_graph_has_no_operator():
    kernels = replays("triton_add", "gemm_sm90", "triton_norm", "gemm_sm90").kernels
    assert kernels["op"].isna().tolist() == [False, True, False, True]
    assert kernels["bucket"].tolist() == ["attributed", "graph", "attributed", "graph"]


def test_several_launches_between_known_kernels_made_one_each_where_there_are_as_many():
    names = ("triton_norm", "gemm", "gemm", "triton_add")
    kernels = replays(*names, noted=TWO_PRODUCTS).kernels
    assert kernels["op"].tolist()[1:3] == ["aten::mm", "aten::bmm"]
    assert kernels["module"].tolist()[1:3] == ["layers.0", "head"]


def test_what_adds_up_the_parts_of_a_product_belongs_to_it():
    names = ("triton_norm", "gemm", "cublasLt::splitKreduce_kernel<32>", "gemm", "triton_add")
    kernels = replays(*names, noted=TWO_PRODUCTS).kernels
    assert kernels["op"].tolist()[1:4] == ["aten::mm", "aten::mm", "aten::bmm"]


def test_of_more_kernels_than_launches_between_known_ones_nothing_tells_whose_they_are():
    names = ("triton_norm", "gemm", "other", "gemm", "triton_add")
    kernels = replays(*names, noted=TWO_PRODUCTS).kernels
    assert kernels["op"].isna().tolist() == [False, True, True, True, False]


def test_what_a_call_launches_itself_between_two_operators_is_none_of_the_codes_launches():
    ranges = call_of("triton_norm", "aten::empty", "triton_add")
    ranges[4:6] = [{**ranges[5], "start_ns": 25}]
    noted = code(("triton_norm", (NORM,)), ("aten::mm", (HEAD,)), ("triton_add", (MLP,)))
    kernels = attributed(ranges, [noted])
    assert kernels["module"].tolist() == ["layers.0.norm", "Net", "layers.0"]


def noted_by_recorder(folder, text, notes, stacks, is_backward=False):
    """Return what the reader makes of a recorder's notes on generated code."""
    about = {"keys": ["fkey"], "frame": "0/0", "is_backward": is_backward}
    content = {"codes": [{**about, "text": text, "notes": notes, "stacks": stacks}]}
    with gzip.open(folder / "compiled.json.gz", "wt") as file:
        json.dump(content, file)
    return add_notes(trace_of({}), folder).meta


NOTES = {"h": 0, "linear": 1, "attn": 2, "add_2": None}
STACKS = [[["Net", "norm"]], [["Net", "fc"]], None]


def test_launches_are_read_from_the_generated_code_in_the_order_of_its_calls(tmp_path):
    (found,) = noted_by_recorder(tmp_path, GENERATED, NOTES, STACKS).compiled
    assert found.is_in_order
    assert [launch.name for launch in found.launches] == [
        "triton_per_fused_native_layer_norm_0",
        "aten::addmm",
        "aten::_flash",
        "triton_poi_fused_add_1",
        "cpp_fused_relu_2",
    ]


def test_an_operator_serves_its_last_node_only_and_a_kernel_all_that_belong_to_modules(tmp_path):
    (found,) = noted_by_recorder(tmp_path, GENERATED, NOTES, STACKS).compiled
    norm, product, flash, addition, unnamed = (launch.stacks for launch in found.launches)
    assert norm == ((("Net", "norm"),),)
    assert product == addition == ((("Net", "fc"),),)
    assert flash == unnamed == ()


@pytest.mark.parametrize("notes", [{"h": 0, "linear": 1}, {}])
def test_code_with_names_of_another_tracing_names_nothing(tmp_path, notes):
    assert noted_by_recorder(tmp_path, GENERATED, notes, STACKS).compiled == ()


def test_in_a_backward_graph_only_what_inductor_made_itself_is_not_known(tmp_path):
    notes = {name: NOTES[name] for name in ("h", "linear")}
    (found,) = noted_by_recorder(tmp_path, GENERATED, notes, STACKS, is_backward=True).compiled
    assert [bool(launch.stacks) for launch in found.launches] == [True, True, False, False, False]


BACKWARD = """
class Runner:
    def call(self, args):
        assert_size_stride(primals_1, (8, 16), (16, 1), 'input')
        # Topologically Sorted Source Nodes: [permute, mm], Original ATen: [aten.t, aten.mm]
        extern_kernels.mm(tangents_1, primals_1, out=buf0)
        # Topologically Sorted Source Nodes: [permute_1, mm_1], Original ATen: [aten.t, aten.mm]
        extern_kernels.mm(reinterpret_tensor(tangents_1, (4, 8), (1, 4), 0), add_7, out=buf1)
        # Topologically Sorted Source Nodes: [mm_2], Original ATen: [aten.mm]
        extern_kernels.mm(buf0, relu, out=buf2)
        # Topologically Sorted Source Nodes: [mm_3], Original ATen: [aten.mm]
        extern_kernels.mm(buf2, primals_3, out=buf4)
        triton_poi_fused_add_1.run(primals_1, buf3, 128, stream=stream0)
        return (None, reinterpret_tensor(buf1, (8, 16), (16, 1), 0), buf3, )
"""


def from_cache(folder, *shapes, returned=3):
    """Return the stacks of a backward graph's launches, of which only the inputs are known."""
    inputs = [{"stack": 0, "shape": shapes[0]}, {"stack": 1, "shape": None}, {"stack": None}]
    about = {"keys": ["fkey"], "frame": "0/0", "is_backward": True, "notes": {}}
    code = {**about, "text": BACKWARD, "stacks": STACKS, "inputs": inputs[:returned]}
    with gzip.open(folder / "compiled.json.gz", "wt") as file:
        json.dump({"codes": [code]}, file)
    (found,) = add_notes(trace_of({}), folder).meta.compiled
    return [launch.stacks for launch in found.launches]


def test_without_notes_an_operator_serves_what_alone_uses_its_parameter_or_gets_its_gradient(
    tmp_path,
):
    norm, fc = ((("Net", "norm"),),), ((("Net", "fc"),),)
    assert from_cache(tmp_path, [8, 16]) == [norm, fc, (), (), ()]


def test_inputs_of_other_shapes_are_not_those_of_the_graph(tmp_path):
    assert from_cache(tmp_path, [16, 8]) == [()] * 5


def test_gradients_of_another_number_than_the_inputs_tell_nothing(tmp_path):
    norm = ((("Net", "norm"),),)
    assert from_cache(tmp_path, [8, 16], returned=2) == [norm, (), (), (), ()]


@pytest.mark.parametrize("text", ["no code(", "", "def other(): pass"])
def test_code_of_an_unknown_form_names_nothing(tmp_path, text):
    assert noted_by_recorder(tmp_path, text, {}, []).compiled == ()


def test_a_kernel_is_not_known_by_a_part_of_its_nodes(tmp_path):
    text = GENERATED.replace("[linear, add_2]", "[linear, attn]")
    (found,) = noted_by_recorder(tmp_path, text, NOTES, STACKS).compiled
    assert found.launches[3].stacks == ()


def test_launches_in_branches_have_no_order(tmp_path):
    text = GENERATED.replace("def partition_0", "def true_graph_0").replace(
        "self.partitions[0]", "true_graph_0"
    )
    (found,) = noted_by_recorder(tmp_path, text, NOTES, STACKS).compiled
    assert not found.is_in_order
    assert len(found.launches) == 5


def test_damaged_notes_are_said_and_lose_nothing_else(tmp_path):
    (tmp_path / "compiled.json.gz").write_bytes(b"\x1f\x8bnothing")
    trace = add_notes(trace_of({}), tmp_path)
    assert "compiled.json.gz" in trace.meta.caveats[0]
    assert len(trace.kernels) == 1


def test_a_part_without_notes_is_read_as_it_is(tmp_path):
    trace = trace_of({})
    assert add_notes(trace, tmp_path) is trace


def test_the_last_round_of_a_reduction_serves_what_its_kernel_serves(tmp_path):
    kernel = "triton_poi_fused_add_1.run(buf2, buf3, 128, stream=stream0)"
    last_round = "buf4 = workspace_0[0 : 1024].view(8, 128).sum(dim=0).to(torch.bfloat16)"
    text = GENERATED.replace(kernel, f"{kernel}\n            {last_round}")
    (found,) = noted_by_recorder(tmp_path, text, NOTES, STACKS).compiled
    assert [launch.name for launch in found.launches[4:6]] == ["aten::sum", "aten::to"]
    assert found.launches[4].stacks == found.launches[5].stacks == ((("Net", "fc"),),)


def test_every_kernel_of_a_real_compiled_call_is_found_in_code_that_launches_the_same():
    trace = opened("compiled")
    calls = trace.ranges["name"].str.startswith("## Call CompiledFxGraph").to_numpy().nonzero()[0]
    is_of_first = trace.ranges["parent"] == calls[0]
    launched = trace.ranges[is_of_first & (trace.ranges["kind"] == "op")].sort_values("start_ns")
    names = [name for name in launched["name"] if name not in ("aten::slice", "aten::view")]
    key = trace.ranges["name"][calls[0]].split()[3]
    noted = code(*((n, ((("Net", f"{i}"),),)) for i, n in enumerate(names)), key=key)
    again = add_attribution(replace(trace, meta=replace(trace.meta, compiled=(noted,)))).kernels
    found = again[again["attributed_by"] == "compiled"].sort_values("start_ns")
    in_order = [str(i) for i in range(len(names))]
    assert len(names) == 143
    assert [list(part.unique()) for _, part in found.groupby("step")["module"]] == [in_order] * 2
