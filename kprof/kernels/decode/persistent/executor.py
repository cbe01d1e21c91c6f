"""Runs a schedule in torch, instruction by instruction: the reference of the persistent kernel.

Instructions run in any order that the waits allow. Buffers start as NaN, so a value that is read
too early shows.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from kprof.kernels.decode import _reference
from kprof.kernels.decode._model import Decoder, Layer, Weight
from kprof.kernels.decode.persistent.schedule import (
    BESTS,
    NONE,
    Instruction,
    Op,
    Schedule,
    Sizes,
)

LOG2_E = 1.4426950408889634
# Keys of a split at least.
SPLIT_KEYS = 256


@dataclass(frozen=True)
class Memory:
    """The buffers of a step, those of every layer apart, so that all values stay readable."""

    qkv: Tensor
    partial: Tensor
    lse: Tensor
    middle: Tensor
    gated: Tensor
    output: Tensor
    logits: Tensor
    bests: Tensor
    """(SMs, BESTS, 2): the largest logits, and their tokens as int32 in float32."""

    @classmethod
    def poisoned(
        cls, sizes: Sizes, num_sms: int, dtype: torch.dtype, device: torch.device
    ) -> Memory:
        """Return buffers full of NaN."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full(shape, math.nan, dtype=dtype, device=device)

        layers = sizes.layers
        return cls(
            qkv=empty(layers, sizes.qkv_width),
            partial=empty(layers, sizes.units, sizes.dim),
            lse=empty(layers, sizes.units),
            middle=empty(layers, sizes.hidden),
            gated=empty(layers, sizes.inner, dtype=dtype),
            output=empty(layers, sizes.hidden),
            logits=empty(sizes.vocabulary),
            bests=empty(num_sms, BESTS, 2),
        )


def splits_used(sizes: Sizes, count: int) -> int:
    """Return in how many splits so many keys are attended to."""
    return min(sizes.splits, -(-count // SPLIT_KEYS))


class Executor:
    """Runs the schedule of one sequence, whose cache is (layers, heads, slots, dim)."""

    def __init__(
        self,
        decoder: Decoder,
        schedule: Schedule,
        keys: Tensor,
        values: Tensor,
        token: int,
        slot: int,
    ) -> None:
        """Continue behind `slot` cached tokens with `token`."""
        self.decoder, self.schedule, self.sizes = decoder, schedule, schedule.sizes
        self.keys, self.values = keys, values
        num_sms = len(schedule.queues)
        self.memory = Memory.poisoned(schedule.sizes, num_sms, decoder.dtype, decoder.device)
        self.cos, self.sin = decoder.rotations(keys.shape[2])
        # Of each SM.
        self.tokens, self.slots = [token] * num_sms, [slot] * num_sms
        self.counters = [0] * schedule.num_counters

    def step(self, generator: random.Random) -> int:
        """Run one step in a random order; return the token that all SMs have chosen.

        Raises:
            RuntimeError: no instruction can run.
        """
        queues = self.schedule.queues
        self.counters = [0] * len(self.counters)
        places = [0] * len(queues)
        left = [sm for sm, queue in enumerate(queues) if queue]
        while left:
            able = [sm for sm in left if self._can_run(queues[sm][places[sm]])]
            if not able:
                raise RuntimeError("every queue waits")
            sm = generator.choice(able)
            one = queues[sm][places[sm]]
            self.run(sm, one)
            if one.signal != NONE:
                self.counters[one.signal] += self.sizes.arrivals(one)
            places[sm] += 1
            if places[sm] == len(queues[sm]):
                left.remove(sm)
        if len(set(self.tokens)) > 1:
            raise RuntimeError(f"the SMs have chosen {sorted(set(self.tokens))}")
        return self.tokens[0]

    def _can_run(self, one: Instruction) -> bool:
        return one.wait == NONE or self.counters[one.wait] >= one.arrivals

    def run(self, sm: int, one: Instruction) -> None:
        """Run an instruction."""
        work = {
            Op.QKV: self._qkv,
            Op.ATTEND: self._attend,
            Op.O: self._o,
            Op.GATED: self._gated,
            Op.DOWN: self._down,
            Op.HEAD: self._head,
            Op.NEXT: self._next,
        }[one.op]
        work(sm, one, self.decoder.layers[one.layer])

    def _embedding(self, sm: int) -> Tensor:
        token = torch.tensor(self.tokens[sm], device=self.decoder.device)
        return _reference.embedded(token, self.decoder).float()

    def _before(self, sm: int, layer: int) -> Tensor:
        """Return the residual stream before a layer."""
        return self._embedding(sm) if layer == 0 else self.memory.output[layer - 1]

    def _normed(self, x: Tensor, gain: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.decoder.eps)
        return x * scale * (gain.float() + 1.0 if self.decoder.adds_one else gain.float())

    def _qkv(self, sm: int, one: Instruction, layer: Layer) -> None:
        x = self._normed(self._before(sm, one.layer), layer.before_attention)
        end, offset = one.first + one.outputs, 0
        for weight in (layer.q, layer.k, layer.v):
            rows = weight.weight.shape[0]
            first, stop = max(one.first - offset, 0), min(end - offset, rows)
            if first < stop:
                y = _product(x, weight, first, stop)
                self.memory.qkv[one.layer, offset + first : offset + stop] = y
            offset += rows

    def _attend(self, sm: int, one: Instruction, layer: Layer) -> None:
        sizes, slot = self.sizes, self.slots[sm]
        head, split = divmod(one.first, sizes.splits)
        key_head, dim = head // sizes.group, sizes.dim
        qkv = self.memory.qkv[one.layer]
        key_at = sizes.q_width + key_head * dim
        value_at = key_at + sizes.heads * dim
        q = self._rotated(qkv[head * dim : (head + 1) * dim], layer.q_norm, slot)
        k = self._rotated(qkv[key_at : key_at + dim], layer.k_norm, slot).to(self.keys.dtype)
        v = qkv[value_at : value_at + dim].to(self.values.dtype)
        oldest = max(0, slot + 1 - layer.window) if layer.window else 0
        used = splits_used(sizes, slot + 1 - oldest)
        if split >= used:
            return
        each = -(-(slot + 1 - oldest) // used)
        first = oldest + split * each
        end = min(first + each, slot + 1)
        keys = self.keys[one.layer, key_head, first:end].float().clone()
        values = self.values[one.layer, key_head, first:end].float().clone()
        if split == used - 1:
            keys[-1], values[-1] = k.float(), v.float()
            if head % sizes.group == 0:
                self.keys[one.layer, key_head, slot] = k
                self.values[one.layer, key_head, slot] = v
        scores = keys @ q * (self.decoder.scale * LOG2_E)
        largest = scores.max()
        weights = torch.exp2(scores - largest)
        total = weights.sum()
        self.memory.partial[one.layer, one.first] = weights @ values / total
        self.memory.lse[one.layer, one.first] = largest + torch.log2(total)

    def _rotated(self, x: Tensor, gain: Tensor | None, slot: int) -> Tensor:
        if gain is not None:
            x = self._normed(x, gain)
        first, second = x.chunk(2)
        return x * self.cos[slot] + torch.cat((-second, first)) * self.sin[slot]

    def _o(self, sm: int, one: Instruction, layer: Layer) -> None:
        sizes, slot = self.sizes, self.slots[sm]
        oldest = max(0, slot + 1 - layer.window) if layer.window else 0
        used = splits_used(sizes, slot + 1 - oldest)
        shape = (sizes.heads * sizes.group, sizes.splits)
        weights = torch.softmax(
            self.memory.lse[one.layer].view(shape)[:, :used] * math.log(2.0), dim=-1
        )
        partial = self.memory.partial[one.layer].view(*shape, sizes.dim)[:, :used]
        x = (weights[..., None] * partial).sum(dim=1).flatten()
        end = one.first + one.outputs
        before = self._before(sm, one.layer)[one.first : end]
        y = before + _product(x, layer.o, one.first, end)
        self.memory.middle[one.layer, one.first : end] = y

    def _gated(self, sm: int, one: Instruction, layer: Layer) -> None:
        del sm
        x = self._normed(self.memory.middle[one.layer], layer.before_mlp)
        end = one.first + one.outputs
        gate, up = (_product(x, weight, one.first, end) for weight in (layer.gate, layer.up))
        y = _reference.GATES[self.decoder.activation](gate) * up
        self.memory.gated[one.layer, one.first : end] = y.to(self.memory.gated.dtype)

    def _down(self, sm: int, one: Instruction, layer: Layer) -> None:
        del sm
        end = one.first + one.outputs
        y = _product(self.memory.gated[one.layer].float(), layer.down, one.first, end)
        before = self.memory.middle[one.layer, one.first : end]
        self.memory.output[one.layer, one.first : end] = before + y

    def _head(self, sm: int, one: Instruction, layer: Layer) -> None:
        del layer
        x = self._normed(self.memory.output[-1], self.decoder.norm)
        end = one.first + one.outputs
        logits = _product(x, self.decoder.head, one.first, end)
        self.memory.logits[one.first : end] = logits
        # The kernel has the best of each warp; here the first has all.
        bests = self.memory.bests[sm]
        bests[:, 0] = -math.inf
        tokens = bests.view(torch.int32)[:, 1]
        tokens.fill_(0)
        if one.outputs:
            place = logits.argmax()
            bests[0, 0] = logits[place]
            tokens[0] = one.first + place

    def _next(self, sm: int, one: Instruction, layer: Layer) -> None:
        del one, layer
        bests = self.memory.bests.view(-1, 2)
        found = bests.view(torch.int32)[:, 1]
        # Logits that are NaN are never the largest.
        logits = bests[:, 0].nan_to_num(nan=-math.inf)
        self.tokens[sm] = int(found[logits == logits.max()].min())
        self.slots[sm] += 1


def _product(x: Tensor, weight: Weight, first: int, end: int) -> Tensor:
    y = weight.weight[first:end].float() @ x
    return y if weight.bias is None else y + weight.bias[first:end].float()
