"""GroupNorm and SiLU of residual blocks, by the kernel in Triton's interpreter."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn

from kprof.errors import KprofError
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED


class Block(nn.Module):
    """A residual block as in diffusers: two norms, one activation."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, 4), nn.GroupNorm(4, 4, eps=1e-3)
        self.conv, self.nonlinearity = nn.Conv2d(4, 4, 3, padding=1), nn.SiLU()
        self.between = between
        for one in (self.norm1, self.norm2):
            nn.init.normal_(one.weight)
            nn.init.normal_(one.bias)

    def forward(self, x):
        h = self.norm1(x)
        h = self.nonlinearity(self.between(h))
        h = self.norm2(self.conv(h))
        return x + self.nonlinearity(h)


@pytest.fixture
def x():
    return torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0))


def made(**options):
    torch.manual_seed(1)
    return Block(**options)


@torch.no_grad()
def test_both_norms_run_with_their_activation(x):
    block = made()
    expected = block(x)
    with swapped(block, "group_norm_silu") as swap:
        found = block(x)
    torch.testing.assert_close(found, expected)
    assert [site.num_replaced for site in swap.sites] == [1, 1]


@torch.no_grad()
@pytest.mark.parametrize(
    "between",
    [
        lambda h: 2 * h,
        lambda h: h.clone(),
        lambda h: torch.cat([h[:1], h[1:]]),
        lambda h: h * (h.shape[0] - 1),
        lambda h: torch.stack([h, h]).sum(0),
    ],
)
def test_a_norm_that_is_used_in_another_way_is_torchs_bit_for_bit(x, between):
    block = made(between=between)
    nn.init.zeros_(block.norm2.weight)
    nn.init.zeros_(block.norm2.bias)
    seen = []
    block.conv.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    block(x)
    with swapped(block, "group_norm_silu") as swap:
        block(x)
    assert torch.equal(*seen)
    assert [site.num_replaced for site in swap.sites] == [0, 1]


@torch.no_grad()
def test_a_norm_that_is_kept_and_activated_has_the_same_values(x):
    kept = []
    block = made(between=lambda h: kept.append(h) or h)
    block(x)
    with swapped(block, "group_norm_silu"):
        block(x)
    assert torch.equal(kept[1] + 0, kept[0])


@torch.no_grad()
def test_an_input_that_was_written_to_before_the_norm_is_used_is_an_error(x):
    class Zeroing:
        def __call__(self, h):
            x.zero_()
            return h

    block = made(between=Zeroing())
    with swapped(block, "group_norm_silu"), pytest.raises(KprofError):
        block(x)


def test_a_call_with_gradients_is_torchs(x):
    block = made()
    with swapped(block, "group_norm_silu") as swap:
        block(x).sum().backward()
    assert [site.num_fallen_back for site in swap.sites] == [1, 1]
    assert block.norm1.weight.grad is not None


@torch.no_grad()
def test_a_norm_with_hooks_is_torchs_and_its_hooks_see_its_values(x):
    block, seen = made(), []
    block.norm1.register_forward_hook(lambda *given: seen.append(given[2]))
    with swapped(block, "group_norm_silu") as swap:
        block(x)
    assert type(seen[0]) is torch.Tensor
    assert [site.num_fallen_back for site in swap.sites] == [1, 0]


def test_in_inference_mode_norms_are_torchs(x):
    block = made()
    with swapped(block, "group_norm_silu") as swap, torch.inference_mode():
        block(x.clone())
    assert [site.num_fallen_back for site in swap.sites] == [1, 1]


@torch.no_grad()
def test_after_the_swap_no_module_has_a_forward_of_its_own(x):
    block = made()
    with swapped(block, "group_norm_silu"):
        block(x)
    assert not any("forward" in one.__dict__ for one in block.modules())


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_block_is_one_graph_of_torchs_operators(x):
    block = made()
    expected = block(x)
    torch._dynamo.reset()
    with swapped(block, "group_norm_silu") as swap:
        found = torch.compile(block, backend="eager", fullgraph=True)(x)
    assert torch.equal(found, expected)
    assert [site.num_replaced for site in swap.sites] == [0, 0]


class Writing(Block):
    """It writes to the input of its norm before it uses the result."""

    def forward(self, x):
        given = x.clone()
        h = self.norm1(given)
        given.zero_()
        return self.nonlinearity(h)


class Adding(Block):
    def forward(self, x):
        given = x.clone()
        h = self.norm1(given)
        given += 1
        return self.nonlinearity(h)


class Storing(Block):
    def forward(self, x):
        given = x.clone()
        h = self.norm1(given)
        given[0] = 0
        return self.nonlinearity(h)


class WithLayer(Block):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        given = x.clone()
        h = self.norm1(given)
        self.relu(given)
        return self.nonlinearity(h)


def scale(x, factor):
    """Write to a tensor through a variable of its own."""
    other = x
    other *= factor
    return other


def count(*values):
    """Add up what is no tensor."""
    total = 0
    names = ()
    for one in values:
        total += len(one)
        names += (one,)
    return total, names


class ByHelper(Block):
    def forward(self, x):
        given = x.clone()
        h = self.norm1(given)
        scale(given, 2)
        return self.nonlinearity(h)


class ByMethod(Block):
    def forward(self, x):
        given = x.clone()
        h = self.norm1(given)
        self.reset(given)
        return self.nonlinearity(h)

    def reset(self, given):
        self.clear(given)

    @staticmethod
    def clear(given):
        given[:] = 0


class ByAttribute(Block):
    def __init__(self):
        super().__init__(between=lambda h: h)
        self.clear = lambda given: given.zero_()

    def forward(self, x):
        given = x.clone()
        h = self.norm1(given)
        self.clear(given)
        return self.nonlinearity(h)


class Counting(Block):
    def forward(self, x):
        h = self.norm1(x)
        count("scale", "1.0.0")
        return self.nonlinearity(h)


@torch.no_grad()
def test_a_function_that_adds_up_no_tensors_is_no_reason_to_leave_a_module_alone(x):
    torch.manual_seed(1)
    block = Counting()
    with swapped(block, "group_norm_silu") as swap:
        block(x)
    assert [site.num_replaced for site in swap.sites] == [1, 0]


@torch.no_grad()
@pytest.mark.parametrize(
    "kind", [Writing, Adding, Storing, WithLayer, ByHelper, ByMethod, ByAttribute]
)
def test_a_module_that_writes_in_place_is_left_alone(kind, x):
    torch.manual_seed(1)
    block = kind()
    expected = block(x)
    with swapped(block, "group_norm_silu") as swap:
        found = block(x)
    assert torch.equal(found, expected)
    assert [bool(site.skipped) for site in swap.sites] == [True, True]
