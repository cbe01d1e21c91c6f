"""Buffers, launches and CUDA graphs of the decoding of one model, for a batch and a length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kprof.kernels.decode import _reference, _step
from kprof.kernels.decode._model import Decoder, Layer, Weight
from kprof.kernels.decode.persistent.launch import Sequence
from kprof.kernels.runtime import Launcher, kind_of, next_power_of_two, num_sms

# log2(e): powers are of 2 in the kernels.
LOG2_E = 1.4426950408889634
# Steps of a graph. A graph of many has fewer borders, over which no loads are ahead.
STEPS_OF_GRAPH = 8
# Prompts up to this length are padded to few lengths, each with a graph. Longer ones keep a GPU
# busy without.
MOST_CAPTURED = 1_024
# Keys that a CTA attends to at least; the least length of a cache.
LEAST_KEYS = 256
LEAST_LENGTH = 512
MOST_SPLITS = 32
# The largest `top_k` whose candidates one CTA holds.
MOST_TOP_K = 64
MOST_STOPS = 16
# Entries of a sequence's state that the host writes.
SLOT, START, PADDING, CALL = 0, 3, 4, 5
STATE_SIZE = 8
# Of an SM of every GPU since Volta: 32-bit registers, CTAs and warps (CUDA C++ Programming Guide,
# technical specifications).
REGISTERS, MOST_CTAS, MOST_WARPS = 65_536, 32, 64
# Of a thread beside its loads, by compilation for sm_90a.
OTHER_REGISTERS = 32
# So that a CTA of attention, which starts early, has room beside a CTA of the kernel before.
REGISTERS_OF_ATTENTION = 192
# The largest batch that is multiplied without tensor cores.
MOST_WITHOUT_DOTS = 2
# Loads of 16 bytes in a thread, of one sequence.
MOST_LOADS = 24
# Rows of weights by which a CTA multiplies its inputs.
LEAST_REUSE = 4
# No token: the rest of a list of stop tokens.
NONE = -1


@dataclass(frozen=True)
class Tiling:
    """The shape of a CTA of a matrix-vector product."""

    rows: int
    warps: int
    ahead: int
    """Tiles that are loaded before the wait."""
    tiles: int = 1
    uses_dots: bool = False
    """Whether tensor cores multiply: one part of the columns a warp."""

    @property
    def parts(self) -> int:
        """Of the columns of a tile, which tensor cores multiply; 0: without tensor cores."""
        return self.warps if self.uses_dots else 0

    def block(self, columns: int) -> int:
        """Return the inputs of a tile: 16 bytes a thread in 16 bits, fewer for short vectors."""
        return min(256 * self.warps, max(8, next_power_of_two(columns)))

    def num_chunks(self, columns: int) -> int:
        """Return how many tiles cover all inputs."""
        return -(-columns // self.block(columns))


class Tilings(NamedTuple):
    """The tilings of the products of a step."""

    qkv: Tiling
    o: Tiling
    gated: Tiling
    down: Tiling
    head: Tiling


def tiling_of(
    outputs: int, columns: int, sms: int, *, num_weights: int = 1, batch: int = 1
) -> Tiling:
    """Return the tiling with the most bytes of weights loaded before the wait, of the whole GPU.

    Registers hold the loads: as many CTAs are resident as registers allow. A grid that leaves SMs
    without work counts as much less as it does. The inputs, which every CTA reads, are at most a
    quarter of its weights where a thread can have as many loads.

    Args:
        outputs: Rows of a weight.
        columns: Its columns.
        sms: SMs of the GPU.
        num_weights: Weights that a CTA has rows of.
        batch: Sequences. Several have the weights in float32 between them, which takes twice the
            registers.
    """
    most = MOST_LOADS if batch == 1 else MOST_LOADS // 3
    found: dict[Tiling, tuple[float, ...]] = {}
    # The first of equals: four warps, and many rows.
    for warps in (4, 8, 2, 1):
        if warps > 1 and 256 * warps > next_power_of_two(columns):
            continue
        chunks = Tiling(1, warps, 1).num_chunks(columns)
        for rows in (16, 8, 4, 2, 1):
            loads = rows * chunks * num_weights
            registers = 32 * warps * (4 * loads * (1 if batch == 1 else 2) + OTHER_REGISTERS)
            resident = min(REGISTERS // registers, MOST_CTAS, MOST_WARPS // warps)
            ctas = max(1, -(-outputs // rows))
            in_flight = min(resident * sms, ctas) * rows * num_weights
            balanced = ctas / sms / math.ceil(ctas / sms)
            reuse = min(LEAST_REUSE, rows * num_weights) if loads <= most else 0
            found[Tiling(rows, warps, chunks)] = (reuse, in_flight * balanced)
    return max(found, key=lambda tiling: found[tiling])


def dotted_tiling_of(columns: int, *, num_weights: int = 1) -> Tiling:
    """Return the tiling for tensor cores: 16 loads of 16 bytes in a thread before the wait.

    Every CTA reads the inputs of all sequences, so it has many rows of weights.
    """
    warps = min(8, max(1, next_power_of_two(columns) // 256))
    return Tiling(16 // num_weights, warps, ahead=1, uses_dots=True)


def tilings_of(decoder: Decoder, batch: int, *, uses_dots: bool | None = None) -> Tilings:
    """Return the tilings for a model.

    `uses_dots`: whether tensor cores multiply; None: where that is faster, and the inputs of a
    product have the range of float32.
    """
    hidden, inner = decoder.hidden, decoder.inner
    attended = decoder.heads * decoder.group * decoder.dim
    if uses_dots is None:
        uses_dots = batch > MOST_WITHOUT_DOTS and decoder.dtype == torch.bfloat16
    if uses_dots:
        plain = dotted_tiling_of(hidden)
        # Two tiles ahead, of half the rows.
        head = replace(plain, rows=8, tiles=8, ahead=2 * plain.num_chunks(hidden))
        gated = dotted_tiling_of(hidden, num_weights=2)
        return Tilings(plain, dotted_tiling_of(attended), gated, dotted_tiling_of(inner), head)
    projected = decoder.heads * (decoder.group + 2) * decoder.dim
    tiling = partial(tiling_of, sms=num_sms(decoder.device), batch=batch)
    head = tiling(decoder.vocabulary, hidden)
    if batch <= 2:
        # Two tiles ahead, of half the rows.
        rows = max(1, head.rows // 2)
        head = replace(head, rows=rows, tiles=8, ahead=2 * head.num_chunks(hidden))
    return Tilings(
        qkv=tiling(projected, hidden),
        o=tiling(hidden, attended),
        gated=tiling(inner, hidden, num_weights=2),
        down=tiling(hidden, inner),
        head=head,
    )


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; the defaults choose the most likely one."""

    is_sampled: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


class Engine:
    """Decodes with one model: its cache, its buffers and its graphs."""

    def __init__(  # noqa: PLR0915
        self,
        decoder: Decoder,
        batch: int,
        length: int,
        tilings: Tilings | None = None,
    ) -> None:
        """Allocate for `batch` sequences of at most `length` tokens."""
        self.decoder, self.batch = decoder, batch
        self.length = max(LEAST_LENGTH, next_power_of_two(length))
        self.tilings = tilings or tilings_of(decoder, batch)
        device, dtype = decoder.device, decoder.dtype
        self.is_cuda = device.type == "cuda"
        # The GPU has not answered: waiting for it might not end.
        self.is_lost = False
        self.pdl = launches_early(device)
        self.stream = torch.cuda.Stream(device) if self.is_cuda else None

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        heads, group, dim = decoder.heads, decoder.group, decoder.dim
        shape = (len(decoder.layers), batch, heads, self.length, dim)
        self.keys, self.values = empty(*shape, dtype=dtype), empty(*shape, dtype=dtype)
        kinds = {layer.rotation for layer in decoder.layers}
        self.rotations = {kind: decoder.rotations(self.length, kind) for kind in kinds}
        # What a norm takes before it is added to the residual stream.
        self.added = empty(batch, decoder.hidden)
        self.residual = empty(batch, decoder.hidden)
        self.copy = empty(batch, decoder.hidden, dtype=dtype)
        self.qkv = empty(batch, (group + 2) * heads * dim)
        self.attended = empty(batch, group * heads * dim, dtype=dtype)
        self.gated = empty(batch, decoder.inner, dtype=dtype)
        self.logits = empty(batch, decoder.vocabulary)
        head = self.tilings.head
        self.num_groups = triton.cdiv(decoder.vocabulary, head.rows * head.tiles)
        self.best = empty(batch, self.num_groups)
        self.candidates = empty(batch, self.num_groups, dtype=torch.int32)
        self.chosen = empty(batch, 1, dtype=torch.int32)
        self.top_groups = empty(batch, MOST_TOP_K, dtype=torch.int32)
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.likeliest = torch.zeros(batch, 1, device=device)
        self.num_splits = min(MOST_SPLITS, max(1, 2 * num_sms(device) // (batch * heads)))
        self.num_splits = min(self.num_splits, self.length // LEAST_KEYS)
        self.partial = empty(batch * heads * self.num_splits * group * (dim + 1))
        self.counter = torch.zeros(batch * heads, dtype=torch.int32, device=device)
        self.state = torch.zeros(batch, STATE_SIZE, dtype=torch.int32, device=device)
        self.stops = torch.full((MOST_STOPS,), NONE, dtype=torch.int32, device=device)
        # The GPU writes tokens into memory of the host, which polls it. The upper half of a token
        # is the number of the call: steps that an earlier call launched may still run.
        self.tokens = torch.zeros(batch, self.length, dtype=torch.int64)
        self._call = 0
        if self.is_cuda:
            self.tokens = self.tokens.pin_memory()
        self._seen = self.tokens.numpy()
        self._graphs: dict[Any, torch.cuda.CUDAGraph] = {}
        self._prompts: dict[tuple[int, bool], tuple[Tensor, Tensor | None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.is_cuda else None

    def __del__(self) -> None:
        """Wait for steps that still run, before their memory is freed."""
        with suppress(Exception):
            if self.stream is not None and not self.is_lost:
                self.stream.synchronize()

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run on the stream of the engine, behind what the caller's stream has to do.

        Steps behind a stop do not delay the caller's stream.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.decoder.device))
        with torch.cuda.stream(self.stream):
            yield

    def wait(self) -> None:
        """Let the caller's stream wait for the stream of the engine."""
        if self.stream is not None:
            torch.cuda.current_stream(self.decoder.device).wait_stream(self.stream)

    def begin(
        self,
        tokens: Tensor,
        starts: Tensor | None,
        stops: list[int],
        padding: int,
        *,
        is_sampled: bool = False,
    ) -> None:
        """Read the prompts (B, T), whose padding ends where they start; the next step continues.

        All but the last token are read here. The step of the last one chooses the first new token.
        """
        batch, count = tokens.shape
        self._call += 1
        state = torch.zeros(batch, STATE_SIZE, dtype=torch.int32)
        state[:, SLOT], state[:, PADDING], state[:, CALL] = count - 1, padding, self._call
        state = state.to(tokens.device, non_blocking=True)
        if starts is not None:
            state[:, START] = starts.to(torch.int32)
        self.state.copy_(state)
        if is_sampled:
            # From torch's generator: a seed of the caller decides.
            self.seed.copy_(torch.randint(2**31, (1,), device=self.seed.device))
        listed = torch.full((MOST_STOPS,), NONE, dtype=torch.int32)
        listed[: len(stops)] = torch.tensor(stops, dtype=torch.int32)
        self.stops.copy_(listed, non_blocking=True)
        if count > 1:
            self._read(tokens[:, :-1], starts)
        x = _reference.embedded(tokens[:, -1], self.decoder)
        self.copy.copy_(x)
        self.residual.copy_(x)

    def _read(self, tokens: Tensor, starts: Tensor | None) -> None:
        count = tokens.shape[1]
        padded = _padded_length(count)
        if not self.is_cuda or padded > min(MOST_CAPTURED, self.length):
            self._forward(tokens, starts)
            return
        key = (padded, starts is not None)
        # By the graph: an interrupt may have come between the prompt and it.
        if key not in self._graphs:
            kept = tokens.new_zeros(self.batch, padded)
            kept_starts = None if starts is None else starts.clone()
            self._prompts[key] = kept, kept_starts
            self._capture(key, lambda: self._forward(kept, kept_starts))
        kept, kept_starts = self._prompts[key]
        kept[:, :count].copy_(tokens)
        if kept_starts is not None and starts is not None:
            kept_starts.copy_(starts)
        self._graphs[key].replay()

    def _forward(self, tokens: Tensor, starts: Tensor | None) -> None:
        with torch.no_grad():
            _reference.forward(
                self.decoder, tokens, self.keys, self.values, self.rotations, starts=starts
            )

    def arrived(self, step: int) -> list[int] | None:
        """Return the tokens of a step of this call; None: not all have arrived."""
        row = self._seen[:, step]
        if (row >> 32 != self._call).any():
            return None
        tokens: list[int] = (row & 0xFFFFFFFF).tolist()
        return tokens

    def run(self, count: int, sampling: Sampling = GREEDY) -> None:
        """Choose `count` more tokens, without waiting for them."""
        if not self.is_cuda:
            for _ in range(count):
                self.step(sampling)
            return
        while count:
            steps = STEPS_OF_GRAPH if count >= STEPS_OF_GRAPH else 1
            key = (sampling, steps)
            if key not in self._graphs:
                self._capture_steps(key, sampling, steps)
            self._graphs[key].replay()
            count -= steps

    def _capture_steps(self, key: Any, sampling: Sampling, steps: int) -> None:
        """Capture steps; the warm-up changes the state, which is restored."""
        kept = [one.clone() for one in (self.state, self.residual, self.copy)]

        def work() -> None:
            for _ in range(steps):
                self.step(sampling)

        self._capture(key, work, lambda: self.step(sampling))
        torch.cuda.current_stream().synchronize()
        for one, before in zip((self.state, self.residual, self.copy), kept, strict=True):
            one.copy_(before)

    def _capture(
        self, key: Any, work: Callable[[], None], warm_up: Callable[[], None] | None = None
    ) -> None:
        """Capture `work` on the current stream, which is not the default one."""
        (warm_up or work)()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            work()
        self._graphs[key] = graph

    def sequence(self) -> Sequence:
        """Return the cache and the state of the only sequence, for the persistent kernel."""
        cache = (self.keys[:, 0], self.values[:, 0], *self.rotations[None])
        return Sequence(*cache, self.state[0], self.stops, self.tokens[0])

    def is_busy(self) -> bool:
        """Return whether steps still run, without waiting for them.

        Raises:
            RuntimeError: a kernel has failed.
        """
        return self.stream is not None and not self.stream.query()

    def step_ms(self) -> float:
        """Return the time of a step behind an empty prompt: the best of several."""
        tokens = torch.zeros(self.batch, 1, dtype=torch.int64, device=self.decoder.device)
        count, times = 4 * STEPS_OF_GRAPH, []
        with self.on_stream():
            self.begin(tokens, None, [], 0)
            self.run(STEPS_OF_GRAPH)
            for _ in range(4):
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                self.run(count)
                after.record()
                after.synchronize()
                times.append(before.elapsed_time(after) / count)
        return min(times)

    def step(self, sampling: Sampling = GREEDY) -> None:
        """Launch the kernels of one step."""
        for index, layer in enumerate(self.decoder.layers):
            self.launch_qkv(layer)
            self.launch_attention(layer, index)
            self.launch_added(layer.o, self.attended, self.tilings.o, layer.after_attention)
            self.launch_gated(layer)
            self.launch_added(layer.down, self.gated, self.tilings.down, layer.after_mlp)
        self.launch_head(keeps_logits=sampling.is_sampled)
        if sampling.is_sampled:
            self.launch_sample(sampling)
            self.launch_next(self.likeliest, self.chosen)
        else:
            self.launch_next(self.best, self.candidates)

    def _options(self, warps: int) -> dict[str, Any]:
        return launch_options(warps, self.pdl)

    def launch_qkv(self, layer: Layer) -> None:
        """Normalise the residual stream and project it to queries, keys and values."""
        weights, tiling = (layer.q, layer.k, layer.v), self.tilings.qkv
        launch_linear(
            self.copy,
            layer.before_attention,
            weights,
            self.qkv,
            tiling,
            self._options(tiling.warps),
            eps=self.decoder.eps,
            adds_one=self.decoder.adds_one,
            is_first=layer is self.decoder.layers[0],
        )

    def launch_added(
        self, weight: Weight, x: Tensor, tiling: Tiling, after: Tensor | None = None
    ) -> None:
        """Add the product of x to the residual stream; normalised with the gain `after`."""
        options = self._options(tiling.warps)
        if after is None:
            launch_linear(x, None, (weight,), self.residual, tiling, options, copy=self.copy)
            return
        launch_linear(x, None, (weight,), self.added, tiling, options)
        hidden = self.decoder.hidden
        _step.add_normed_kernel[(self.batch,)](
            self.added,
            after,
            self.residual,
            self.copy,
            self.decoder.eps,
            K=hidden,
            BLOCK=next_power_of_two(hidden),
            ADD_ONE=self.decoder.adds_one,
            **self._options(8),
        )

    def launch_attention(self, layer: Layer, index: int) -> None:
        """Append to the cache of a layer, and attend to it."""
        decoder = self.decoder
        norms = (layer.q_norm, layer.k_norm)
        gains = [self.qkv if one is None else one for one in norms]
        _step.attend_kernel[(self.num_splits, decoder.heads, self.batch)](
            self.qkv,
            *self.rotations[layer.rotation],
            *gains,
            self.keys[index],
            self.values[index],
            self.attended,
            self.partial,
            self.counter,
            self.state,
            self.length,
            decoder.scale * LOG2_E,
            decoder.eps,
            layer.window or 0,
            decoder.score_cap or 0.0,
            HEADS=decoder.heads,
            GROUP=decoder.group,
            DIM=decoder.dim,
            ROWS=16,
            EARLY=max(64, min(LEAST_KEYS, 32_768 // decoder.dim)),
            BLOCK=32 if decoder.dim > 128 else 64,
            LEAST=LEAST_KEYS,
            MERGED_ROWS=next_power_of_two(decoder.group),
            MERGED=min(next_power_of_two(self.num_splits), max(1, 1024 // decoder.dim)),
            HAS_NORM=layer.q_norm is not None,
            ADD_ONE=decoder.adds_one,
            HAS_WINDOW=layer.window is not None,
            HAS_CAP=decoder.score_cap is not None,
            **self._options(8),
            **({"maxnreg": REGISTERS_OF_ATTENTION} if self.is_cuda else {}),
        )

    def launch_gated(self, layer: Layer) -> None:
        """Normalise the residual stream, and compute the inner activations of the MLP."""
        decoder, tiling = self.decoder, self.tilings.gated
        biases = [self.copy if one.bias is None else one.bias for one in (layer.gate, layer.up)]
        _step.gated_kernel[(triton.cdiv(decoder.inner, tiling.rows),)](
            self.copy,
            layer.before_mlp,
            layer.gate.weight,
            layer.up.weight,
            *biases,
            self.gated,
            n=decoder.inner,
            eps=decoder.eps,
            K=decoder.hidden,
            BLOCK=tiling.block(decoder.hidden),
            ROWS=tiling.rows,
            AHEAD=tiling.ahead,
            BATCH=self.batch,
            ADD_ONE=decoder.adds_one,
            HAS_BIAS=layer.gate.bias is not None,
            ACTIVATION=decoder.activation,
            PARTS=tiling.parts,
            **self._options(tiling.warps),
        )

    def launch_head(self, *, keeps_logits: bool) -> None:
        """Compute the logits, and the largest of each CTA."""
        decoder, tiling = self.decoder, self.tilings.head
        _step.head_kernel[(self.num_groups,)](
            self.copy,
            decoder.norm,
            decoder.head.weight,
            self.logits,
            self.best,
            self.candidates,
            n=decoder.vocabulary,
            eps=decoder.eps,
            cap=decoder.logit_cap or 0.0,
            K=decoder.hidden,
            BLOCK=tiling.block(decoder.hidden),
            ROWS=tiling.rows,
            TILES=tiling.tiles,
            AHEAD=tiling.ahead,
            BATCH=self.batch,
            ADD_ONE=decoder.adds_one,
            KEEPS_LOGITS=keeps_logits,
            HAS_CAP=decoder.logit_cap is not None,
            PARTS=tiling.parts,
            **self._options(tiling.warps),
        )

    def launch_sample(self, sampling: Sampling) -> None:
        """Choose random tokens: by one kernel for few candidates, otherwise by torch."""
        if not 0 < sampling.top_k <= MOST_TOP_K:
            self.chosen.copy_(sampled(self.logits, sampling))
            return
        head = self.tilings.head
        _step.sample_kernel[(self.batch,)](
            self.logits,
            self.best,
            self.chosen,
            self.top_groups,
            self.state,
            self.seed,
            self.decoder.vocabulary,
            self.num_groups,
            sampling.top_k,
            sampling.top_p,
            sampling.temperature,
            GROUPS=next_power_of_two(self.num_groups),
            SIZE=head.rows * head.tiles,
            MOST=MOST_TOP_K,
            **self._options(8),
        )

    def launch_next(self, best: Tensor, candidates: Tensor) -> None:
        """Choose the tokens, and read their embeddings."""
        decoder, num_groups = self.decoder, best.shape[1]
        _step.next_token_kernel[(self.batch,)](
            best,
            candidates,
            self.tokens,
            decoder.embedding,
            self.residual,
            self.copy,
            self.state,
            self.stops,
            num_groups,
            self.length,
            self.tokens.shape[1],
            decoder.embedding_scale,
            K=decoder.hidden,
            BLOCK=min(2_048, next_power_of_two(decoder.hidden)),
            GROUPS=next_power_of_two(num_groups),
            STOPS=MOST_STOPS,
            **self._options(8),
        )


def launches_early(device: torch.device) -> bool:
    """Return whether a kernel may start before the one before it ends: from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(warps: int, pdl: bool) -> dict[str, Any]:
    """Return what each launch has in common."""
    options: dict[str, Any] = {"PDL": pdl, "num_warps": warps}
    return {**options, "launch_pdl": True} if pdl else options


def launch_linear(
    x: Tensor,
    gain: Tensor | None,
    weights: tuple[Weight, ...],
    y: Tensor,
    tiling: Tiling,
    options: dict[str, Any],
    *,
    copy: Tensor | None = None,
    eps: float = 0.0,
    adds_one: bool = False,
    is_first: bool = False,
) -> None:
    """Multiply rows x by weights into y; with a copy, add to y, and copy the sum in its dtype.

    With the gain of a norm, x is normalised before.
    """
    others = 3 - len(weights)
    sizes = [one.weight.shape[0] for one in weights] + [0] * others
    matrices = [one.weight for one in weights] + [weights[0].weight] * others
    biases = [x if one.bias is None else one.bias for one in weights] + [x] * others
    columns = x.shape[1]
    has_norm, is_stacked, has_bias = gain is not None, len(weights) > 1, weights[0].bias is not None
    constants = (
        *(columns, tiling.block(columns), tiling.rows, tiling.ahead, x.shape[0], has_norm),
        *(adds_one, is_stacked, has_bias, copy is not None, is_first, tiling.parts, options["PDL"]),
    )
    tensors = (
        *(x, x if gain is None else gain, *matrices, *biases, y),
        y if copy is None else copy,
    )
    grid = sum(triton.cdiv(size, tiling.rows) for size in sizes)
    key = (kind_of(*tensors), *sizes, constants, options["num_warps"])
    triton_options = {name: value for name, value in options.items() if name != "PDL"}
    _launch_linear(key, grid, (*tensors, *sizes, eps, *constants), triton_options)


_launch_linear = Launcher(_step.linear_kernel)


def _padded_length(count: int) -> int:
    """Return the length that a prompt is padded to: four lengths between powers of two."""
    step = max(16, next_power_of_two(count) // 8)
    return -(-count // step) * step


def sampled(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return a random token of each row, (B, 1), as the logits processors of Hugging Face filter.

    The largest of p / e, with e exponentially distributed, is distributed as p.
    """
    scores = logits / sampling.temperature
    tokens = None
    if sampling.top_k or sampling.top_p < 1.0:
        count = min(sampling.top_k or scores.shape[-1], scores.shape[-1])
        scores, tokens = torch.topk(scores, count, dim=-1)
    shares = torch.softmax(scores, dim=-1)
    if sampling.top_p < 1.0:
        # Of the tokens before each; the first is always kept.
        before = shares.cumsum(dim=-1) - shares
        is_kept = before < sampling.top_p
        shares = shares * is_kept
    chosen = (shares / torch.empty_like(shares).exponential_()).argmax(dim=-1, keepdim=True)
    return chosen if tokens is None else tokens.gather(-1, chosen)
