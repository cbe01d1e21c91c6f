import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import pytest

from kprof.analyze.work import Work
from tests.analyze.calls import tensor, tensors, work_of

torch = pytest.importorskip("torch")
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

RELU, TANH, LSTM, GRU = range(4)
X, STATE = tensor("fp32", 5, 2, 4), tensor("fp32", 1, 2, 6)


def cudnn(mode, *, projected=0, layers=1, both=False):
    """The arguments of cuDNN's recurrent layers."""
    cell = STATE if mode == LSTM else None
    shape = [mode, 6, projected, layers, False, 0.0, True, both, []]
    return [X, tensors(), 4, None, STATE, cell, *shape, None]


def test_a_layer_reads_its_matrices_once_and_multiplies_them_at_every_position():
    # Four gates of 6 over 4 inputs and 6 states; ten positions.
    moved = 4 * (40 + 240 + 60 + 2 * 24)
    assert work_of("aten::_cudnn_rnn", *cudnn(LSTM)) == Work(2 * 240 * 10, moved, "fp32")


def test_the_gradients_take_twice_the_products_where_matrices_learn():
    call = [*cudnn(GRU)[:6], X, X, STATE, None, *cudnn(GRU)[6:], None]
    learning = work_of("aten::_cudnn_rnn_backward", *call, [True, True, False, True])
    frozen = work_of("aten::_cudnn_rnn_backward", *call, [True, True, False, False])
    assert (learning.flops, frozen.flops) == (2 * 2 * 180 * 10, 2 * 180 * 10)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(("layers", "projected"), [(1, 0), (3, 0), (1, 3), (2, 3)])
@pytest.mark.parametrize(("mode", "layer"), [(TANH, "RNN"), (LSTM, "LSTM"), (GRU, "GRU")])
def test_stacks_move_the_matrices_that_torch_makes_of_them(mode, layer, layers, projected, both):
    options = {"proj_size": projected} if mode == LSTM else {}
    projected = options.get("proj_size", 0)
    module = getattr(torch.nn, layer)(4, 6, layers, bidirectional=both, **options)
    matrices = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    results = 10 * (projected or 6) * (2 if both else 1)
    states = 2 * 6 * (2 if mode == LSTM else 1)
    given = cudnn(mode, projected=projected, layers=layers, both=both)
    forward = work_of("aten::_cudnn_rnn", *given)
    assert forward == Work(20 * matrices, 4 * (40 + matrices + results + 2 * states), "fp32")
    call = [*given[:6], X, X, STATE, None, *given[6:], None]
    read, written = matrices + 2 * results + 2 * states, 40 + states
    for learns in (True, False):
        work = work_of("aten::_cudnn_rnn_backward", *call, [True, True, False, learns])
        moved = 4 * (40 + read + written + matrices * learns)
        assert work == Work(20 * matrices * (1 + learns), moved, "fp32")


def test_a_fused_cell_reads_gates_and_state_and_writes_the_state():
    gates, state = tensor("fp32", 2, 18), tensor("fp32", 2, 6)
    work = work_of("aten::_thnn_fused_gru_cell", gates, gates, state)
    assert work.bytes == 4 * (36 + 36 + 12 + 6 * 12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"bidirectional": True}])
@pytest.mark.parametrize(("mode", "layer"), [(TANH, "RNN"), (LSTM, "LSTM"), (GRU, "GRU")])
def test_recurrent_layers_have_the_flops_that_torch_counts(mode, layer, options):
    module = getattr(torch.nn, layer)(4, 6, **options)
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as counter:
        module(torch.randn(5, 2, 4))
    layers, both = options.get("num_layers", 1), options.get("bidirectional", False)
    call = cudnn(mode, layers=layers, both=both)
    assert work_of("aten::_cudnn_rnn", *call).flops == counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_projected_state_has_the_flops_that_torch_counts():
    module = torch.nn.LSTM(4, 6, num_layers=2, proj_size=3)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(5, 2, 4))
    call = cudnn(LSTM, layers=2, projected=3)
    assert work_of("aten::_cudnn_rnn", *call).flops == counter.get_total_flops()


def test_an_unknown_cell_has_unknown_work():
    assert work_of("aten::_cudnn_rnn", *cudnn(7)) is None


def test_a_layer_of_the_host_is_given_its_matrices():
    weights = tensor("fp32", 24, 4), tensor("fp32", 24, 6), tensor("fp32", 24), tensor("fp32", 24)
    work = work_of("aten::mkldnn_rnn_layer", X, *weights, STATE, STATE, False, [], LSTM)
    assert work == Work(2 * 240 * 10, 4 * (40 + 240 + 48 + 60 + 2 * 24), "fp32")


def test_the_gradients_of_a_layer_of_the_host_take_twice_its_products():
    weights = tensor("fp32", 24, 4), tensor("fp32", 24, 6), tensor("fp32", 24), tensor("fp32", 24)
    result, state = tensor("fp32", 5, 2, 6), tensor("fp32", 2, 6)
    call = [X, *weights, state, state, result, state, state, result, None, None, False, LSTM]
    work = work_of("aten::mkldnn_rnn_layer_backward", *call)
    # Input, matrices and states are read, and their gradients written; the result and its gradient.
    moved = 4 * (2 * (40 + 240 + 2 * 12) + 2 * 60)
    assert work == Work(2 * 2 * 240 * 10, moved, "fp32")
    call[11] = state
    assert work_of("aten::mkldnn_rnn_layer_backward", *call).bytes == moved + 4 * 12
    assert work_of("aten::mkldnn_rnn_layer_backward", *call[:7], None, *call[8:]) is None
