"""How sites are recognised: by what a module computes, not by what it is called."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.kernels.swap.reasons import NO_SIZES, TRAINS_OTHERWISE, UNKNOWN_BETWEEN, WRITES_GLOBAL
from kprof.kernels.swap.sites.norms import OTHER
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import COMPILED, compiled
from tests.kernels.swap_models import GemmaNorm, Mlp, Norm, WithoutRootNorm

NORMS = ("rmsnorm=eager", "layernorm=aten")
GATED = ("swiglu=eager", "geglu=eager")


def sites_of(module, *names):
    with swapped(module, *names) as swap:
        pass
    return [(site.kernel, site.skipped) for site in swap.sites]


def same_within(module, x, *names):
    wanted = module(x)
    with swapped(module, *names) as swap:
        torch.testing.assert_close(module(x), wanted, rtol=0, atol=0)
    assert [site.num_replaced for site in swap.replaced] == [1]
    return swap.replaced[0].kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [Norm(32, 1e-3), GemmaNorm(32, 1e-4)])
def test_norms_that_round_in_their_own_order_give_the_same_bits(norm, dtype):
    module = norm.to(dtype)
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5)
    assert same_within(module, torch.randn(7, 32).to(dtype), *NORMS) == "rmsnorm"


def test_the_norms_of_torch_are_told_apart():
    assert sites_of(nn.RMSNorm(16), *NORMS) == [("rmsnorm", None)]
    assert sites_of(nn.RMSNorm(16, eps=1e-3), *NORMS) == [("rmsnorm", None)]
    assert sites_of(nn.LayerNorm(16), *NORMS) == [("layernorm", None)]
    assert sites_of(nn.LayerNorm(16, bias=False), *NORMS) == [("layernorm", None)]


def test_a_norm_with_an_epsilon_in_its_code_is_known():
    class LayerNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(16)), None

        def forward(self, x):
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)

    assert same_within(LayerNorm(), torch.randn(3, 16) * 1e-3, *NORMS) == "layernorm"


def test_a_module_that_looks_like_a_norm_and_is_none_is_left_alone_with_the_reason():
    ((kernel, why),) = sites_of(WithoutRootNorm(16), *NORMS)
    assert (kernel, why) == ("rmsnorm", OTHER)


def test_a_norm_that_differs_only_in_rows_that_are_tiny_is_left_alone():
    class OutsideNorm(Norm):
        def forward(self, x):
            root = x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon
            return self.weight * (x.float() / root).to(x.dtype)

    assert sites_of(OutsideNorm(16), *NORMS)[0][1] is not None


def test_a_norm_that_fails_on_rows_is_left_alone_with_its_error():
    class PickyNorm(Norm):
        def forward(self, x):
            raise ValueError("only images")

    assert "only images" in sites_of(PickyNorm(16), *NORMS)[0][1]


def test_a_norm_that_does_more_when_it_trains_is_left_alone():
    class NoisyNorm(Norm):
        def forward(self, x):
            return functional.dropout(super().forward(x), 0.5, self.training)

    module = NoisyNorm(16).eval()
    ((_, why),) = sites_of(module, *NORMS)
    assert why == TRAINS_OTHERWISE


def test_a_norm_with_weights_in_float64_is_left_alone():
    ((kernel, why),) = sites_of(Norm(8).double(), *NORMS)
    assert (kernel, why.split()[-1]) == ("rmsnorm", "float64")


def test_batch_norms_and_linear_layers_are_no_sites():
    assert sites_of(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)), *NORMS) == []


def test_a_layernorm_is_no_site_for_who_asked_for_rmsnorms():
    assert sites_of(nn.LayerNorm(16), "rmsnorm=eager") == []


@pytest.mark.parametrize(
    ("activation", "kernel"),
    [(nn.SiLU(), "swiglu"), (nn.GELU(), "geglu"), (nn.GELU(approximate="tanh"), "geglu")],
)
def test_gated_mlps_are_told_apart_by_their_activation(activation, kernel):
    assert same_within(Mlp(16, activation), torch.randn(3, 16), *GATED) == kernel


def test_gate_and_up_may_have_any_name_and_the_activation_may_be_a_function():
    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2, self.w3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.w2(functional.silu(self.w1(x)) * self.w3(x))

    assert same_within(FeedForward(), torch.randn(3, 8), *GATED) == "swiglu"


def test_gate_and_up_may_be_one_layer():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

        def forward(self, x):
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(up * functional.silu(gate))

    assert same_within(Packed(), torch.randn(3, 8), *GATED) == "swiglu"


def test_a_gated_mlp_with_another_activation_is_left_alone_with_the_reason():
    ((_, why),) = sites_of(Mlp(16, nn.ReLU()), *GATED)
    assert why == UNKNOWN_BETWEEN


def test_a_gated_mlp_that_drops_when_it_trains_is_left_alone():
    class Dropping(Mlp):
        def forward(self, x):
            h = functional.dropout(
                self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.5, self.training
            )
            return self.down_proj(h)

    ((_, why),) = sites_of(Dropping(16).eval(), *GATED)
    assert why == TRAINS_OTHERWISE


def test_an_mlp_without_a_gate_is_no_site():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.down(functional.silu(self.up(x)))

    assert sites_of(Plain(), *GATED) == []


def test_gates_that_lead_to_no_other_layer_are_no_mlp():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_gate, self.forget_gate = nn.Linear(24, 2), nn.Linear(24, 2)

        def forward(self, x):
            return torch.sigmoid(self.input_gate(x)) * torch.sigmoid(self.forget_gate(x))

    assert sites_of(Cell(), "swiglu=eager", "geglu=eager") == []


def test_an_mlp_whose_layers_tell_no_size_is_left_alone_with_the_reason():
    class Layer(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(outputs, inputs))

        def forward(self, x):
            return functional.linear(x, self.weight)

    mlp = Mlp(8)
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = Layer(8, 16), Layer(8, 16), Layer(16, 8)
    assert sites_of(mlp, "swiglu=eager", "geglu=eager") == [("swiglu", NO_SIZES)]


def test_a_module_that_is_replaced_by_a_function_has_no_row_that_it_is_skipped():
    class LayerNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
            self.eps, self.limit = 1e-5, 100.0

        def forward(self, x):
            x = functional.layer_norm(x, (16,), self.weight, self.bias, self.eps)
            return x.clamp(max=self.limit)

    with swapped(nn.Sequential(LayerNorm(), LayerNorm()), *NORMS) as swap:
        pass
    assert [(one.name, one.kernel, one.skipped) for one in swap.sites] == [
        ("0", "layernorm", None),
        ("1", "layernorm", None),
    ]


def test_experts_in_one_module_are_left_alone_with_the_reason():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 8, 4))
            self.down_proj = nn.Parameter(torch.zeros(2, 4, 4))
            self.act_fn = nn.SiLU()

    ((_, why),) = sites_of(Experts(), *GATED)
    assert "loop" in why


class Lossy(nn.Module):
    """Calls losses in several ways."""

    def forward(self, x, y, weight=None):
        return nn.functional.cross_entropy(x, y, weight=weight, label_smoothing=0.1)


def test_a_loss_with_options_is_replaced_and_one_with_weights_falls_back():
    module, x, y = Lossy(), torch.randn(5, 7), torch.tensor([0, 1, 2, -100, 6])
    weight = torch.rand(7)
    wanted = module(x, y), module(x, y, weight)
    with swapped(module, "cross_entropy=eager") as swap:
        torch.testing.assert_close((module(x, y), module(x, y, weight)), wanted)
    (site,) = swap.sites
    assert (site.num_replaced, site.num_fallen_back) == (1, 1)


def test_the_loss_module_of_torch_is_a_site():
    x, y = torch.randn(5, 7), torch.tensor([0, 1, 2, 3, 6])
    module = nn.CrossEntropyLoss(ignore_index=3)
    wanted = module(x, y)
    with swapped(module, "cross_entropy=eager") as swap:
        torch.testing.assert_close(module(x, y), wanted)
    assert swap.sites[0].num_replaced == 1


class Tagger(nn.Module):
    """As in BERT: its loss is a module that its forward makes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 7)

    def forward(self, x, labels):
        loss_fct = nn.CrossEntropyLoss(ignore_index=3)
        return loss_fct(self.head(x).view(-1, 7), labels.view(-1))


class Smoothing(Tagger):
    def forward(self, x, labels):
        weight = torch.arange(1.0, 8.0) if self.training else None
        loss_fct = nn.CrossEntropyLoss(weight, reduction="sum", label_smoothing=0.5)
        return loss_fct(self.head(x).view(-1, 7), labels.view(-1))


class KeepingItsLoss(Tagger):
    def forward(self, x, labels):
        self.loss_fct = nn.CrossEntropyLoss()
        return self.loss_fct(self.head(x).view(-1, 7), labels.view(-1))


class AskingForItsLoss(Tagger):
    def forward(self, x, labels):
        loss_fct = nn.CrossEntropyLoss()
        assert isinstance(loss_fct, nn.CrossEntropyLoss)
        return loss_fct(self.head(x).view(-1, 7), labels.view(-1))


X_OF_TAGGER, LABELS_OF_TAGGER = torch.randn(2, 3, 4), torch.tensor([[0, 1, 3], [4, 6, 3]])


@pytest.mark.parametrize("autocast", [False, True])
def test_a_loss_that_a_forward_makes_is_a_site(autocast):
    module = Tagger()

    def trained():
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module(X_OF_TAGGER, LABELS_OF_TAGGER)
        loss.backward()
        return loss, module.head.weight.grad

    wanted = trained()
    with swapped(module, "cross_entropy=eager") as swap:
        torch.testing.assert_close(trained(), wanted)
    assert [(site.what, site.num_replaced) for site in swap.sites] == [
        ("Tagger: nn.CrossEntropyLoss", 1)
    ]
    assert type(module).forward is Tagger.forward


def test_a_made_loss_keeps_its_options():
    module = Smoothing()
    for is_training, replaced in ((True, 0), (False, 1)):
        module.train(is_training)
        wanted = module(X_OF_TAGGER, LABELS_OF_TAGGER)
        with swapped(module, "cross_entropy=eager") as swap:
            torch.testing.assert_close(module(X_OF_TAGGER, LABELS_OF_TAGGER), wanted)
        assert swap.sites[0].num_replaced == replaced


@pytest.mark.parametrize("cls", [KeepingItsLoss, AskingForItsLoss])
def test_a_loss_that_is_kept_or_asked_for_is_left_alone(cls):
    module = cls()
    with swapped(module, "cross_entropy=eager") as swap:
        module(X_OF_TAGGER, LABELS_OF_TAGGER)
    assert [site.skipped is None for site in swap.sites] == [False]


@COMPILED
def test_a_compiled_forward_makes_torchs_loss():
    module = Tagger()
    wanted = module(X_OF_TAGGER, LABELS_OF_TAGGER)
    with swapped(module, "cross_entropy=eager") as swap:
        torch.testing.assert_close(compiled(module)(X_OF_TAGGER, LABELS_OF_TAGGER), wanted)
    assert [one.provider for one in swap.sites[0].calls] == [None]


def test_a_loss_in_bfloat16_rounds_otherwise_and_falls_back():
    module = nn.CrossEntropyLoss()
    with swapped(module, "cross_entropy=eager") as swap:
        assert module(torch.randn(5, 7).bfloat16(), torch.zeros(5).long()).dtype == torch.bfloat16
    assert "bfloat16" in swap.sites[0].calls[0].why


def test_the_same_call_goes_another_way_under_autocast():
    module = nn.CrossEntropyLoss()
    x, y = torch.randn(5, 7).bfloat16(), torch.zeros(5).long()
    with swapped(module, "cross_entropy=eager") as swap:
        module(x, y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module(x, y).dtype == torch.float32
        module(x, y)
    assert (swap.sites[0].num_replaced, swap.sites[0].num_fallen_back) == (1, 2)


def test_a_forward_that_writes_a_global_variable_is_left_alone():
    ((_, why),) = sites_of(Counting(), "cross_entropy=eager")
    assert why == WRITES_GLOBAL


NUM_CALLS = 0


class Counting(nn.Module):
    def forward(self, x, y):
        global NUM_CALLS
        NUM_CALLS += 1
        return functional.cross_entropy(x, y)


def test_a_model_without_data_is_recognised():
    with torch.device("meta"):
        model = nn.Sequential(Norm(16), Mlp(16))
    assert sites_of(model, *NORMS, *GATED) == [("swiglu", None), ("rmsnorm", None)]


def test_a_provider_without_an_order_of_rounding_leaves_it_to_the_original():
    module, x = GemmaNorm(16), torch.randn(3, 16)
    wanted = module(x)
    with swapped(module, "rmsnorm=aten") as swap:
        assert torch.equal(module(x), wanted)
    (call,) = swap.sites[0].calls
    assert (call.provider, call.why.split()[0]) == (None, "aten")
