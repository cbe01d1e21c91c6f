"""A swap and torch.compile: whole graphs, never a stale one; and graphs that are exported."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

from kprof.kernels.swap.patches import Patched
from kprof.kernels.swap.providers import WITH_SITES
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import COMPILED, INTERPRETED
from tests.kernels.swap_models import NAMES, Mlp, Model, Norm, apply_rotary_pos_emb, tokens


@pytest.fixture(autouse=True)
def anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Graphs:
    """A backend that keeps what it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph, inputs):
        self.seen.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward


@pytest.mark.slow
def test_a_model_compiles_whole_within_a_swap_and_gives_the_same():
    model = Model()
    wanted = model(tokens(), tokens())
    with swapped(model, *NAMES) as swap:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        loss = compiled(tokens(), tokens())
        loss.backward()
    torch.testing.assert_close(loss, wanted)
    assert all(one.is_compiled for site in swap.replaced for one in site.calls)
    assert len([site for site in swap.replaced if site.calls]) == 10


def test_no_graph_breaks_are_added():
    model = Model()
    with swapped(model, *NAMES):
        assert torch._dynamo.explain(model)(tokens()).graph_break_count == 0


# Torch warns of its own where a layer that is compiled gets a result with gradients.
@torch.no_grad()
def num_graphs_by_layer(model, *names):
    """Return how many graphs a model has whose layers are compiled one by one."""
    torch.compiler.reset()
    graphs = Graphs()
    for layer in model.layers:
        layer.compile(backend=graphs, fullgraph=True)
    wanted = model(tokens())
    num_before = len(graphs.seen)
    with swapped(model, *names):
        torch.testing.assert_close(model(tokens()), wanted)
    return len(graphs.seen) - num_before


def test_layers_that_are_compiled_one_by_one_share_a_graph_within_a_swap():
    assert num_graphs_by_layer(Model(layers=3), *NAMES) == 1


@pytest.mark.parametrize("kernel", ["rmsnorm=eager", "swiglu=eager", "rope=eager"])
def test_layers_share_no_graph_with_those_that_a_filter_excludes(kernel):
    others = [name for name in NAMES if name != kernel]
    assert num_graphs_by_layer(Model(layers=3), f"{kernel}@layers.0.*", *others) == 2


class Turning(nn.Module):
    """Calls functions of two kernels in one forward, which are one site."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        cos, sin = torch.ones(1, 5, 8), torch.zeros(1, 5, 8)
        q, _ = apply_rotary_pos_emb(x, x, cos, sin)
        return functional.layer_norm(q, (8,), self.weight, self.bias)


@torch.no_grad()
def test_layers_share_no_graph_where_a_filter_excludes_one_of_two_functions():
    model, graphs = nn.Sequential(Turning(), Turning()), Graphs()
    for layer in model:
        layer.compile(backend=graphs, fullgraph=True)
    with swapped(model, "rope=eager@0", "layernorm=aten") as swap:
        model(torch.randn(2, 3, 5, 8))
    assert len(graphs.seen) == 2
    calls = {(one.name, one.kernel): one.calls for one in swap.sites}
    providers = {key: [call.provider for call in found] for key, found in calls.items()}
    assert providers["0", "rope"] == ["eager"]
    assert providers["1", "rope"] == []


class Routed(nn.Module):
    """As mixtures of experts: the data decides how many rows an expert gets."""

    def __init__(self):
        super().__init__()
        self.norm, self.expert = Norm(16), Mlp(16)

    def forward(self, x, is_routed):
        return self.expert(self.norm(x[is_routed]))


def num_graphs_and_breaks(model, *given, is_dynamic=None):
    torch.compiler.reset()
    counters.clear()
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, dynamic=is_dynamic)
    for one in given:
        compiled(*one)
    return len(graphs.seen), sum(counters["graph_break"].values())


@pytest.mark.slow
def test_sizes_that_change_add_no_graph_and_no_break():
    model = Model()
    given = [(tokens(2, length), tokens(2, length)) for length in (5, 7)]
    wanted = num_graphs_and_breaks(model, *given, is_dynamic=True)
    with swapped(model, *NAMES) as swap:
        assert num_graphs_and_breaks(model, *given, is_dynamic=True) == wanted
    assert all(one.provider for site in swap.sites for one in site.calls if one.is_compiled)


@pytest.mark.slow
def test_rows_that_lie_apart_in_memory_add_no_break_where_sizes_change():
    model = nn.Sequential(Norm(8))
    given = [(torch.randn(2, length, 8)[:, :3],) for length in (5, 7)]
    wanted = num_graphs_and_breaks(model, *given, is_dynamic=True)
    with swapped(model, "rmsnorm=eager"):
        assert num_graphs_and_breaks(model, *given, is_dynamic=True) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("is_captured", [False, True])
def test_rows_that_data_selects_add_no_graph(is_captured):
    # Where the original breaks a graph, the frame of the swapped forward counts that break again.
    given = (torch.randn(6, 16), torch.tensor([True, False, True, True, False, True]))
    model = Routed()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=is_captured):
        wanted, _ = num_graphs_and_breaks(model, given)
        with swapped(model, *NAMES):
            num_graphs, num_breaks = num_graphs_and_breaks(model, given)
    assert num_graphs == wanted
    assert not (is_captured and num_breaks)


def test_a_graph_compiled_before_a_swap_is_not_used_in_it_nor_the_other_way_round():
    model, graphs = nn.Sequential(Norm(8)), Graphs()
    compiled, x = torch.compile(model, backend=graphs, fullgraph=True), torch.ones(2, 8)
    compiled(x)
    with swapped(model, "rmsnorm=aten"):
        compiled(x)
    compiled(x)
    assert ["rms_norm" in str(seen) for seen in graphs.seen] == [False, True]


def test_flipping_compiles_each_side_once():
    model, graphs = Model(), Graphs()
    compiled, swap = torch.compile(model, backend=graphs, fullgraph=True), swapped(model, *NAMES)
    for _ in range(4):
        compiled(tokens(), tokens())
        with swap:
            compiled(tokens(), tokens())
    assert len(graphs.seen) == 2


def test_another_provider_compiles_anew():
    model, graphs = nn.Sequential(Norm(8)), Graphs()
    compiled, x = torch.compile(model, backend=graphs, fullgraph=True), torch.ones(2, 8)
    with swapped(model, "rmsnorm=aten"):
        compiled(x)
    with swapped(model, "rmsnorm=eager"):
        compiled(x)
    assert ["rms_norm" in str(seen) for seen in graphs.seen] == [True, False]


def test_a_module_compiled_in_place_is_swapped():
    model = nn.Sequential(Norm(8), Mlp(8))
    model.requires_grad_(False)
    x = torch.randn(2, 8)
    wanted = model(x)
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(x), wanted)
    with swapped(model, *NAMES) as swap:
        torch.testing.assert_close(model(x), wanted)
    assert [site.calls[0].is_compiled for site in swap.replaced] == [True, True]


def test_a_compiled_model_is_swapped_below_its_wrapper():
    compiled = torch.compile(nn.Sequential(Norm(8)), backend="eager", fullgraph=True)
    with swapped(compiled, "rmsnorm=eager") as swap:
        compiled(torch.ones(2, 8))
    assert [site.name for site in swap.replaced] == ["0"]


def test_dtypes_that_a_kernel_refuses_compile_into_the_original():
    model = nn.Sequential(Norm(8))
    x = torch.randn(2, 8, dtype=torch.float64)
    with swapped(model, "rmsnorm=aten") as swap:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))
    assert any(one.is_compiled and one.provider is None for one in swap.sites[0].calls)


def test_an_exported_model_needs_no_kernels():
    model = nn.Sequential(Norm(8))
    x = (torch.ones(2, 8),)
    with swapped(model, "rmsnorm=aten"):
        exported = [torch.export.export(model, x, strict=strict) for strict in (False, True)]
    for program in exported:
        assert "rms_norm" not in str(program.graph)


def block():
    torch.manual_seed(0)
    return nn.Sequential(Norm(8), Mlp(8))


class EveryModule(torch.fx.Tracer):
    """Traces modules of torch, too."""

    def is_leaf_module(self, m, module_qualified_name):
        return False


@pytest.mark.parametrize("tracer", [torch.fx.Tracer, EveryModule])
def test_a_symbolic_trace_is_of_the_original(tracer):
    model = block()
    wanted = [str(node) for node in tracer().trace(model).nodes]
    with swapped(model, "rmsnorm=aten", "swiglu=eager") as swap:
        assert [str(node) for node in tracer().trace(model).nodes] == wanted
    assert len(swap.fallen_back) > 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_traced_model_is_the_original_and_later_calls_run_the_kernel():
    model, x = block(), torch.randn(2, 8)
    with swapped(model, "rmsnorm=aten", "swiglu=eager") as swap:
        model(x)
        traced = torch.jit.trace(model, (x,), check_trace=False)
        model(x)
    assert "rms_norm" not in str(traced.inlined_graph)
    torch.testing.assert_close(traced(3 * x), model(3 * x))
    counts = {call.why: call.num_calls for call in swap.sites[0].calls}
    assert counts == {None: 2, "torch.jit traces it": 1}


def test_a_compiler_that_says_it_exports_every_graph_compiles_the_kernel(monkeypatch):
    def is_exporting():
        return torch.compiler.is_dynamo_compiling()

    # As torch 2.11 does, whose `is_exporting` is true inside of all that it compiles.
    monkeypatch.setattr(torch.compiler, "is_exporting", is_exporting)
    model = nn.Sequential(Norm(8))
    with swapped(model, "rmsnorm=aten") as swap:
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 8))
    assert [one.provider for one in swap.sites[0].calls if one.is_compiled] == ["aten"]


def test_a_copy_of_a_forward_does_not_get_the_graphs_of_the_original():
    model = nn.CrossEntropyLoss()
    x, y = torch.randn(3, 5), torch.tensor([1, 2, 3])
    rewired = Patched(type(model).forward, {("F", "cross_entropy"): lambda *_, **__: x})
    original = torch.compile(type(model).forward, backend="eager", fullgraph=True)
    copied = torch.compile(rewired.function, backend="eager", fullgraph=True)
    assert copied(model, x, y) is not original(model, x, y)
    assert original(model, x, y).shape == ()


def test_a_loss_of_the_script_itself_compiles_within_a_swap_of_the_process():
    graphs = Graphs()

    @torch.compile(backend=graphs, fullgraph=True)
    def lose(x, y):
        return functional.cross_entropy(x, y)

    x, y = torch.randn(3, 5), torch.tensor([1, 2, 3])
    wanted = lose(x, y)
    with swapped(None, "cross_entropy=eager"):
        torch.testing.assert_close(lose(x, y), wanted)
    torch.testing.assert_close(lose(x, y), wanted)


def test_inside_a_compiled_transform_the_original_runs():
    norm, x = Norm(8), torch.randn(3, 8)
    weights = {"weight": torch.randn(8)}

    def loss(weights):
        return torch.func.functional_call(norm, weights, x).square().sum()

    wanted = torch.func.grad(loss)(weights)["weight"]
    with swapped(norm, "rmsnorm"):
        found = torch.compile(torch.func.grad(loss), backend="eager")(weights)["weight"]
    torch.testing.assert_close(found, wanted)
    assert float(found.abs().max()) > 0


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
IDS = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}
PIXELS = {"pixel_values": torch.ones(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
TRAINED = {
    "llama": ("AutoModelForCausalLM", {"num_key_value_heads": 2}, IDS),
    "gemma2": ("AutoModelForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}, IDS),
    "gpt_neox": ("AutoModelForCausalLM", {}, IDS),
    "bert": ("AutoModelForMaskedLM", {}, IDS),
    "vit": ("AutoModelForImageClassification", {"image_size": 16, "patch_size": 4}, PIXELS),
}


@pytest.mark.slow
@INTERPRETED
@COMPILED
@pytest.mark.parametrize("name", TRAINED)
def test_all_kernels_in_a_compiled_model_of_transformers_add_no_graph_break(name):
    transformers = pytest.importorskip("transformers")
    kind, more, inputs = TRAINED[name]
    config = transformers.AutoConfig.for_model(name, **SIZES, **more)
    model = getattr(transformers, kind).from_config(config)

    def breaks_and_loss():
        torch.compiler.reset()
        counters.clear()
        loss = torch.compile(model, backend="aot_eager")(**inputs).loss
        loss.backward()
        return sum(counters["graph_break"].values()), loss.detach()

    torch.manual_seed(1)
    num_before, wanted = breaks_and_loss()
    torch.manual_seed(1)
    with swapped(model, *sorted(WITH_SITES - {"decode", "fp8_linear", "attention_fp8"})) as swap:
        num_breaks, loss = breaks_and_loss()
    assert num_breaks <= num_before
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-3)
    assert any(one.is_compiled and one.provider for site in swap.replaced for one in site.calls)


SMALL = {**SIZES, "hidden_size": 64, "pad_token_id": 0}
LLAMA = ("llama", {"num_key_value_heads": 2, "head_dim": 16})
# Per kernel that a swap can put into models: a model of transformers that has its call sites.
HAVING = {
    **dict.fromkeys(("add_rmsnorm", "attention_forward", "cast_weights", "cross_entropy"), LLAMA),
    **dict.fromkeys(("decode", "decode_attention", "fp8_linear", "rmsnorm", "rope"), LLAMA),
    "swiglu": LLAMA,
    "attention_fp8": LLAMA,
    **dict.fromkeys(("add_layernorm", "bias_gelu", "linear_cross_entropy"), ("bert", {})),
    **dict.fromkeys(("gelu", "layernorm"), ("gpt2", {})),
    "geglu": ("gemma", LLAMA[1]),
    "moe_experts": ("mixtral", {**LLAMA[1], "num_local_experts": 4}),
    "relu_squared": ("nemotron", LLAMA[1]),
}
# Of what a kernel needs that is not there on a CPU, another provider stands in.
STANDING_IN = {
    "attention_fp8": "attention_fp8=eager",
    "fp8_linear": "fp8_linear=eager@model.layers.0.mlp.up_proj",
}


class Unet(nn.Module):
    """A part of a U-Net."""

    def __init__(self):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.nonlinearity = nn.SiLU()

    def forward(self, x):
        return self.conv1(self.nonlinearity(self.norm1(x)))


class Step(nn.Module):
    """A step of training with its optimizer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.layer.parameters())

    def forward(self, x):
        self.layer(x).sum().backward()
        self.optimizer.step()


def model_having(kernel):
    """Return a model with call sites of a kernel, its inputs, and the root of the swap."""
    if kernel == "group_norm_silu":
        model = Unet()
        return model, (torch.ones(1, 8, 4, 4),), {}, model
    if kernel == "adamw":
        model = Step()
        return model, (torch.ones(2, 8),), {}, model.optimizer
    transformers = pytest.importorskip("transformers")
    name, more = HAVING[kernel]
    config = transformers.AutoConfig.for_model(name, **SMALL, **more)
    kind = "AutoModelForMaskedLM" if name == "bert" else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config).train()
    model = model.bfloat16() if kernel == "fp8_linear" else model
    return model, (), IDS, model


@pytest.mark.slow
@INTERPRETED
@COMPILED
@pytest.mark.parametrize("kernel", sorted(WITH_SITES))
def test_a_kernel_in_a_compiled_model_adds_no_graph_break(kernel):
    model, args, kwargs, root = model_having(kernel)

    def breaks_and_graphs():
        torch.compiler.reset()
        counters.clear()
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=kernel == "cast_weights")
        with warnings.catch_warnings(), autocast:
            # Of torch, where a graph is broken.
            warnings.simplefilter("ignore")
            torch.compile(model, backend="eager")(*args, **kwargs)
        # Torch's own step of an optimizer breaks graphs, once for each function around it: breaks
        # are counted where there are none.
        num_breaks = sum(counters["graph_break"].values())
        return num_breaks > 0, counters["stats"]["unique_graphs"]

    before = breaks_and_graphs()
    with swapped(root, STANDING_IN.get(kernel, kernel)) as swap:
        found = breaks_and_graphs()
    assert [one for one in swap.sites if one.kernel == kernel and one.skipped is None]
    assert found == before
