"""What the compiler generated tells which modules each of its launches serves."""

import gzip
import json

import pytest

from kprof.collect.readers.recorded.compiled_code import add_notes
from tests.traces import trace_of

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
    assert "compiled.json.gz" in trace.meta.caveats[0].text
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
