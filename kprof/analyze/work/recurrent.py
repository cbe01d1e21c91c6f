"""Work of recurrent layers: at every position of every sequence, the gates' GEMMs.

Biases, activations and what is kept for the backward pass are left out of the FLOPs and of the
bytes: small against the products of a layer, or not needed by the mathematics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from kprof.analyze.work import Inputs, Model, Tensor, Work

# Gates by the number that names the cell: plain with ReLU, plain with tanh, LSTM, GRU.
_NUM_GATES = (1, 1, 4, 3)
_LSTM = 2


@dataclass(frozen=True)
class Layout:
    """Positions of the arguments of a library's recurrent layers."""

    mode: int
    """Which cell; the hidden size comes next."""
    layers: int
    is_bidirectional: int
    projection: int | None = None


@dataclass(frozen=True)
class _Stack:
    """A stack of recurrent layers over some positions."""

    x: Tensor
    num_weights: int
    """Elements of all matrices, each of which every position meets once."""
    num_out: int
    num_states: int
    """Elements of the states before the first position, and as many after the last."""

    @property
    def flops(self) -> int:
        """FLOPs of the forward operation."""
        return 2 * self.num_weights * (self.x.numel // max(self.x.shape[-1], 1))

    def bytes_of(self, num_elements: int) -> int:
        """Return the bytes of so many elements."""
        return math.ceil(num_elements * self.x.element_bytes)


def _read(inputs: Inputs, layout: Layout) -> _Stack | None:
    """Return the layers, or None where a size was not recorded."""
    x, hidden_state = inputs.tensor(0), inputs.tensor(4 if layout.projection is not None else 3)
    mode, hidden = inputs.value(layout.mode), inputs.value(layout.mode + 1)
    layers, both = inputs.value(layout.layers), inputs.value(layout.is_bidirectional)
    projected = inputs.value(layout.projection) if layout.projection is not None else 0
    sizes = (mode, hidden, layers, projected)
    if (
        x is None
        or not x.shape
        or not all(isinstance(n, int) for n in sizes)
        or mode not in range(4)
    ):
        return None
    ways, out = 2 if both else 1, projected or hidden
    num_weights = 0
    for layer in range(layers):
        width = x.shape[-1] if layer == 0 else out * ways
        num_weights += ways * _NUM_GATES[mode] * hidden * (width + out)
        num_weights += ways * hidden * projected
    positions = x.numel // max(x.shape[-1], 1)
    states = hidden_state.numel if hidden_state is not None else 0
    num_states = states * (2 if mode == _LSTM else 1)
    return _Stack(x, num_weights, positions * out * ways, num_states)


def _forward(inputs: Inputs, layout: Layout) -> Work | None:
    """Model the forward operation: input, matrices and states read, results and states written."""
    stack = _read(inputs, layout)
    if stack is None:
        return None
    others = stack.num_weights + stack.num_out + 2 * stack.num_states
    return Work(stack.flops, stack.x.bytes + stack.bytes_of(others), stack.x.dtype)


def _backward(inputs: Inputs, layout: Layout, mask: int) -> Work | None:
    """Model the gradients of the input and, where the mask asks for them, of the matrices.

    Each of the two is as many products as the forward operation.
    """
    stack = _read(inputs, layout)
    if stack is None:
        return None
    wanted = inputs.value(mask)
    to_weights = not isinstance(wanted, list) or bool(wanted[-1])
    read = stack.num_weights + 2 * stack.num_out + 2 * stack.num_states
    written = stack.num_weights * to_weights + stack.num_states
    moved = stack.x.bytes + stack.x.written_as() + stack.bytes_of(read + written)
    return Work(stack.flops * (1 + to_weights), moved, stack.x.dtype)


def _given_matrices(inputs: Inputs) -> Work | None:
    """Model one layer that is given its matrices, then two biases and two states."""
    x, to_gates, between = (inputs.tensor(i) for i in range(3))
    if x is None or to_gates is None or between is None or not x.shape:
        return None
    rest = [t for i in range(3, 7) if (t := inputs.tensor(i)) is not None]
    states = sum(t.written_as() for t in rest[2:])
    positions = x.numel // max(x.shape[-1], 1)
    written = math.ceil(positions * between.shape[-1] * x.element_bytes) + states
    num_weights = to_gates.numel + between.numel
    moved = x.bytes + to_gates.bytes + between.bytes + sum(t.bytes for t in rest) + written
    return Work(2 * num_weights * positions, moved, x.dtype)


def _backward_given_matrices(inputs: Inputs) -> Work | None:
    """Model all gradients of such a layer, given its result too, and gradients of what it returned.

    The last states are left out: they are part of the result, or of what was kept.
    """
    forward = _given_matrices(inputs)
    x, to_gates, between, result = (inputs.tensor(i) for i in (0, 1, 2, 7))
    if forward is None or x is None or to_gates is None or between is None or result is None:
        return None
    states, gradients = ([inputs.tensor(i) for i in places] for places in ((5, 6), (10, 11, 12)))
    wanted = [t for t in (x, to_gates, between, *states) if t is not None]
    read = [*wanted, result, *(t for t in gradients if t is not None)]
    written = sum(t.written_as() for t in wanted)
    return Work(2 * (forward.flops or 0), sum(t.bytes for t in read) + written, x.dtype)


def _fused_cell(inputs: Inputs, num_kept: int) -> Work | None:
    """Model what follows a cell's products: both gates and the state read, the new state written.

    `num_kept` counts tensors of the state's size that are written besides, for the backward pass.
    """
    gates = [inputs.tensor(i) for i in (0, 1)]
    state = inputs.tensor(2)
    known = [t for t in gates if t is not None]
    if len(known) < 2 or state is None:
        return None
    biases = [t for i in (3, 4) if (t := inputs.tensor(i)) is not None]
    read = sum(t.bytes for t in (*known, state, *biases))
    return Work(6 * known[0].numel, read + (1 + num_kept) * state.written_as(), "fp32")


_CUDNN = Layout(mode=6, layers=9, is_bidirectional=13, projection=8)
_CUDNN_BACKWARD = Layout(mode=10, layers=13, is_bidirectional=17, projection=12)
_MIOPEN = Layout(mode=5, layers=7, is_bidirectional=11)

MODELS: dict[str, Model] = {
    "aten::_cudnn_rnn": partial(_forward, layout=_CUDNN),
    "aten::_cudnn_rnn_backward": partial(_backward, layout=_CUDNN_BACKWARD, mask=21),
    "aten::miopen_rnn": partial(_forward, layout=_MIOPEN),
    "aten::mkldnn_rnn_layer": _given_matrices,
    "aten::mkldnn_rnn_layer_backward": _backward_given_matrices,
    "aten::_thnn_fused_gru_cell": partial(_fused_cell, num_kept=5),
    "aten::_thnn_fused_lstm_cell": partial(_fused_cell, num_kept=5),
}
