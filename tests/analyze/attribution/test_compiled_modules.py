"""Compiled kernels belong to the modules that the compiler noted, or to the model as a whole."""

from dataclasses import replace

from kprof.analyze.attribution.attribute import add_attribution
from kprof.analyze.attribution.ledger import balance
from kprof.trace import CompiledCode, CompiledLaunch
from tests.collect.readers.test_recorded_traces import opened
from tests.traces import trace_of

CALL = "## Call CompiledFxGraph fkey ##"
NORM, MLP, HEAD = (
    (("Net", "layers.0", "layers.0.norm"),),
    (("Net", "layers.0"),),
    (("Net", "head"),),
)


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
