"""Work from recorded shapes against what torch itself sees while it runs."""

from __future__ import annotations

import pytest

import tests.kernel_interpreter  # noqa: F401 - before anything that imports Triton
from kprof.analyze.passes import analyze
from kprof.analyze.roofline.operator_work import find_model, find_work
from kprof.collect.readers.kineto import reader as kineto

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

pytestmark = pytest.mark.slow


class Llama(nn.Module):
    """One layer with grouped queries, and a head."""

    def __init__(self, *, is_causal, num_groups=2):
        super().__init__()
        self.is_causal, self.num_groups = is_causal, num_groups
        self.embedding, self.norm = nn.Embedding(50, 32), nn.RMSNorm(32)
        self.query, self.output = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(32, 8 * num_groups, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down, self.head = nn.Linear(48, 32, bias=False), nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        heads = (layer(self.norm(x)) for layer in (self.query, self.key, self.value))
        query, key, value = (y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in heads)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, enable_gqa=self.num_groups < 4
        )
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        y = self.norm(x)
        return self.head(x + self.down(F.silu(self.gate(y)) * self.up(y)))


class Loop(nn.Module):
    """A recurrent cell, step by step."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 6)

    def forward(self, x):
        state = torch.zeros(x.shape[1], 6)
        for step in x:
            state = self.cell(step, state)
        return state


def grown(*shape):
    return torch.randn(*shape, requires_grad=True)


def layer(module, *shape):
    return lambda: (module, (grown(*shape),))


def function(call, *shapes):
    return lambda: (call, tuple(grown(*shape) for shape in shapes))


def llama(**options):
    return lambda: (Llama(**options), (torch.randint(0, 50, (2, 16)),))


def attention(queries, keys, width=8, **options):
    shapes = (2, 4, queries, 8), (2, 4, keys, 8), (2, 4, keys, width)
    return function(lambda *qkv: F.scaled_dot_product_attention(*qkv, **options), *shapes)


COUNTED = {
    "mlp": layer(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), 3, 5, 16),
    "llama": llama(is_causal=False),
    "llama without groups": llama(is_causal=False, num_groups=4),
    "gru": layer(nn.GRU(4, 6, bidirectional=True), 5, 2, 4),
    "loop": layer(Loop(), 5, 2, 4),
    "attention layer": layer(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0), 7, 2, 16),
    "cross attention": attention(8, 20),
    "narrow values": attention(8, 20, width=4),
    "masked attention": attention(8, 20, attn_mask=torch.zeros(8, 20)),
    "conv1d": layer(nn.Conv1d(4, 6, 3, padding=1), 2, 4, 20),
    "conv2d": layer(nn.Conv2d(4, 6, 3, padding=1, bias=False), 2, 4, 12, 10),
    "conv2d, pointwise": layer(nn.Conv2d(4, 6, 1), 2, 4, 12, 10),
    "conv2d, strided, dilated": layer(nn.Conv2d(4, 6, 3, stride=2, dilation=2), 2, 4, 15, 17),
    "conv2d, same": layer(nn.Conv2d(4, 6, 3, padding="same"), 2, 4, 12, 10),
    "conv2d, unbatched": layer(nn.Conv2d(4, 6, (3, 1)), 4, 12, 10),
    "conv3d": layer(nn.Conv3d(4, 6, 3, padding=1), 2, 4, 6, 8, 7),
    "transposed conv1d": layer(nn.ConvTranspose1d(4, 6, 3, stride=2), 2, 4, 20),
    "transposed conv2d": layer(
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), 2, 4, 9, 7
    ),
    "transposed conv3d": layer(nn.ConvTranspose3d(4, 6, 3, stride=2), 1, 4, 5, 4, 3),
    "bmm": function(torch.bmm, (3, 4, 5), (3, 5, 6)),
    "baddbmm": function(torch.baddbmm, (3, 4, 6), (3, 4, 5), (3, 5, 6)),
    "matmul, folded": function(torch.matmul, (2, 3, 4, 5), (5, 6)),
    "matmul, broadcast": function(torch.matmul, (2, 1, 4, 5), (1, 3, 5, 6)),
    "einsum": function(
        lambda q, k: torch.einsum("bshd,bthd->bhst", q, k), (2, 7, 3, 4), (2, 6, 3, 4)
    ),
    "einsum of three": function(
        lambda a, b, c: torch.einsum("ab,bc,cd->ad", a, b, c), (4, 5), (5, 6), (6, 7)
    ),
    "linear without bias": function(F.linear, (2, 3, 4), (5, 4)),
    "linear of a vector": function(F.linear, (4,), (5, 4), (5,)),
    "nothing": function(torch.mm, (0, 5), (5, 4)),
    "embedding": lambda: (nn.Embedding(10, 4), (torch.arange(5),)),
}


def run(call, arguments):
    result = call(*arguments)
    (result[0] if isinstance(result, tuple) else result).sum().backward()


def flops_by_torch(call, arguments):
    """FLOPs of every operator while it runs, attention as the products that it consists of."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        run(call, arguments)
    return {str(name): flops for name, flops in counter.get_flop_counts().get("Global", {}).items()}


def imported(recorded, folder):
    recorded.export_chrome_trace(str(folder / "trace.json"))
    return analyze(kineto.read(folder / "trace.json"))


def flops_by_kprof(folder, call, arguments):
    """FLOPs of the products, attentions and convolutions in a recorded trace."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        run(call, arguments)
    trace = imported(recorded, folder)
    work = find_work(trace)
    carriers = {row for row in work.carrier.tolist() if row >= 0}
    families = {row: find_model(trace.ranges["name"][row])[0] for row in carriers}
    heavy = [r for r, family in families.items() if family in ("gemm", "attention", "convolution")]
    in_rows = trace.kernels.loc[trace.kernels["flops"].notna(), "flops"].sum()
    assert in_rows == sum(int(work.flops[row]) for row in carriers)
    return sum(int(work.flops[row]) for row in heavy)


@pytest.mark.parametrize("build", COUNTED.values(), ids=COUNTED)
def test_forward_and_backward_have_the_flops_that_torch_counts(tmp_path, build):
    call, arguments = build()
    expected = sum(flops_by_torch(call, arguments).values())
    assert flops_by_kprof(tmp_path, call, arguments) == expected


def test_causal_attention_counts_half_of_what_torch_counts_for_it(tmp_path):
    call, arguments = llama(is_causal=True)()
    by_operator = flops_by_torch(call, arguments)
    expected = sum(by_operator.values()) - by_operator["aten.bmm"] // 2
    assert flops_by_kprof(tmp_path, call, arguments) == expected


def each_group_alone(grouped, x):
    """The same convolution as one for each group: torch's counter overstates grouped gradients."""
    weights, inputs = grouped.weight.chunk(grouped.groups), x.chunk(grouped.groups, dim=1)
    convolve = F.conv_transpose2d if grouped.transposed else F.conv2d
    outputs = [
        convolve(one, weight, stride=grouped.stride)
        for one, weight in zip(inputs, weights, strict=True)
    ]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(
    "grouped",
    [
        nn.Conv2d(8, 16, 3, groups=4, bias=False),
        nn.Conv2d(8, 8, 3, groups=8, bias=False),
        nn.Conv2d(8, 16, 3, groups=8, stride=2, bias=False),
        nn.ConvTranspose2d(8, 12, 3, groups=2, stride=2, bias=False),
    ],
    ids=["grouped", "depthwise", "depthwise, two each", "transposed"],
)
def test_a_grouped_convolution_has_the_flops_of_its_groups(tmp_path, grouped):
    x = grown(2, 8, 12, 10)
    assert torch.allclose(each_group_alone(grouped, x), grouped(x), atol=1e-5)
    expected = sum(flops_by_torch(lambda x: each_group_alone(grouped, x), (x,)).values())
    assert flops_by_kprof(tmp_path, grouped, (x,)) == expected


def test_a_scaled_product_has_the_flops_that_torch_counts(tmp_path):
    def scaled(x):
        return torch._scaled_mm(x, x.t(), torch.tensor(1.0), torch.tensor(1.0))

    x = torch.ones(16, 32).to(torch.float8_e4m3fn)
    with FlopCounterMode(display=False) as counter:
        scaled(x)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        scaled(x)
    trace = imported(recorded, tmp_path)
    row = trace.ranges["name"].tolist().index("aten::_scaled_mm")
    assert find_work(trace).flops[row] == counter.get_total_flops()


class BytesCounter(TorchDispatchMode):
    """Adds up the sizes of the tensors that an operator is given and those that it returns."""

    def __init__(self):
        super().__init__()
        self.bytes_of = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        name = operator._schema.name
        self.bytes_of[name] = sum(t.numel() * t.element_size() for t in tensors)
        return result


X, HALF = torch.randn(64, 96), torch.randn(64, 96).bfloat16()
ROW, IMAGES = torch.randn(96), torch.randn(2, 8, 6, 6)
VOLUMES, GRID = torch.randn(2, 3, 4, 6, 6), torch.rand(2, 5, 4, 2)
SPECTRUM, MATRICES = torch.randn(6, 8, dtype=torch.complex64), torch.randn(3, 6, 6)
SORTED, FLOAT8 = ROW.sort().values, X.to(torch.float8_e4m3fn)
ONE = torch.tensor(1.0)
READ_AND_WRITTEN_ONCE = {
    "aten::reflection_pad2d": lambda: F.pad(IMAGES, (1, 2, 1, 0), mode="reflect"),
    "aten::replication_pad2d": lambda: F.pad(IMAGES, (1, 2, 1, 0), mode="replicate"),
    "aten::upsample_nearest2d": lambda: F.interpolate(IMAGES, size=(9, 7)),
    "aten::upsample_bilinear2d": lambda: F.interpolate(IMAGES, size=(9, 7), mode="bilinear"),
    "aten::upsample_linear1d": lambda: F.interpolate(IMAGES[0], size=9, mode="linear"),
    "aten::upsample_trilinear3d": lambda: F.interpolate(VOLUMES, size=5, mode="trilinear"),
    "aten::_upsample_bilinear2d_aa": lambda: F.interpolate(
        IMAGES, size=(3, 4), mode="bilinear", antialias=True
    ),
    "aten::adaptive_max_pool2d": lambda: F.adaptive_max_pool2d(IMAGES, (3, 2)),
    "aten::_adaptive_avg_pool3d": lambda: F.adaptive_avg_pool3d(VOLUMES, (2, 3, 2)),
    "aten::grid_sampler_2d": lambda: F.grid_sample(IMAGES, GRID, align_corners=False),
    "aten::im2col": lambda: F.unfold(IMAGES, 3, padding=1),
    "aten::col2im": lambda: F.fold(torch.ones(2, 72, 16), (6, 6), 3),
    "aten::_fft_c2c": lambda: torch.fft.fft(SPECTRUM),
    "aten::_fft_r2c": lambda: torch.fft.rfft(X),
    "aten::_fft_c2r": lambda: torch.fft.irfft(SPECTRUM, n=13),
    "aten::_cdist_forward": lambda: torch.cdist(X, X, p=1),
    "aten::cummax": lambda: X.cummax(1),
    "aten::logcumsumexp": lambda: X.logcumsumexp(1),
    "aten::kthvalue": lambda: X.kthvalue(3, 1),
    "aten::median": lambda: X.median(1),
    "aten::mode": lambda: X.mode(1),
    "aten::std_mean": lambda: torch.std_mean(X, dim=1),
    "aten::aminmax": lambda: torch.aminmax(X, dim=1),
    "aten::bucketize": lambda: torch.bucketize(X, SORTED),
    "aten::searchsorted": lambda: torch.searchsorted(SORTED, X),
    "aten::multinomial": lambda: torch.multinomial(X.abs(), 5),
    "aten::complex": lambda: torch.complex(X, X),
    "aten::polar": lambda: torch.polar(X, X),
    "aten::addbmm": lambda: torch.addbmm(MATRICES[0], MATRICES, MATRICES),
    "aten::addr": lambda: torch.addr(torch.ones(96, 96), ROW, ROW),
    "aten::_weight_norm_interface": lambda: torch._weight_norm(X, X[:, :1], 0),
    "aten::_scaled_mm": lambda: torch._scaled_mm(
        FLOAT8, FLOAT8.t(), ONE, ONE, out_dtype=torch.bfloat16
    ),
    "aten::_grouped_mm": lambda: torch._grouped_mm(
        HALF, torch.ones(2, 96, 32).bfloat16(), offs=torch.tensor([32, 64]).int()
    ),
    "aten::split_with_sizes_copy": lambda: torch.split_with_sizes_copy(X, [32, 32]),
    "aten::soft_margin_loss": lambda: F.soft_margin_loss(X, X),
    "aten::hardshrink": lambda: F.hardshrink(X),
    "aten::isposinf": lambda: torch.isposinf(X),
    "aten::mm": lambda: X @ X.T,
    "aten::addmm": lambda: torch.addmm(ROW, X, torch.ones(96, 96)),
    "aten::bmm": lambda: torch.bmm(IMAGES[0], IMAGES[1]),
    "aten::add": lambda: X + ROW,
    "aten::mul": lambda: HALF * X,
    "aten::gelu": lambda: F.gelu(HALF),
    "aten::gt": lambda: torch.gt(X, X),
    "aten::where": lambda: torch.where(X.bool(), X, X),
    "aten::native_layer_norm": lambda: F.layer_norm(X, (96,), ROW, ROW),
    "aten::native_group_norm": lambda: F.group_norm(IMAGES, 2, ROW[:8], ROW[8:16]),
    "aten::_softmax": lambda: F.softmax(X, -1),
    "aten::_log_softmax": lambda: F.log_softmax(HALF, -1),
    "aten::sum": lambda: X.sum(0),
    "aten::max": lambda: X.max(1),
    "aten::argmax": lambda: X.argmax(1),
    "aten::topk": lambda: X.topk(5),
    "aten::cumsum": lambda: X.cumsum(1),
    "aten::max_pool2d_with_indices": lambda: F.max_pool2d(IMAGES, 2),
    "aten::glu": lambda: F.glu(X),
    "aten::flip": lambda: X.flip(0),
}


@pytest.mark.parametrize("name", READ_AND_WRITTEN_ONCE)
def test_an_operator_moves_at_least_its_inputs_and_its_results(tmp_path, name):
    with BytesCounter() as counter:
        READ_AND_WRITTEN_ONCE[name]()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        READ_AND_WRITTEN_ONCE[name]()
    trace = imported(recorded, tmp_path)
    rows = [r for r in trace.ranges.index if trace.ranges["name"][r] == name]
    # Some are recorded twice, one inside the other, which carries the work.
    assert {int(find_work(trace).bytes[row]) for row in rows} == {counter.bytes_of[name]}
