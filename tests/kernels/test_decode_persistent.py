"""The schedule of the persistent decode kernel, and its executor beside models of Hugging Face."""

import random
import re

import pytest
import torch
import transformers

from kprof.kernels.decode import _reference
from kprof.kernels.decode._model import decoder_of
from kprof.kernels.decode.persistent.executor import SPLIT_KEYS, Executor
from kprof.kernels.decode.persistent.launch import (
    INSTRUCTION_BYTES,
    LAYER_BYTES,
    MOST_STOPS,
    SOURCE,
    Parameters,
)
from kprof.kernels.decode.persistent.schedule import (
    MOST_ROWS,
    NONE,
    PARTS,
    Op,
    Schedule,
    Sizes,
    schedule_of,
    why_wrong,
)

LLAMA_1B = Sizes(16, 2_048, 8_192, 8, 4, 64, 128_256, 4)
SMALL = (
    (Sizes(2, 64, 96, 2, 2, 16, 101, 2), 4),
    (Sizes(1, 48, 80, 3, 1, 16, 50, 1), 3),
    (Sizes(2, 64, 64, 1, 3, 32, 257, 3), 5),
)
NUM_BROKEN = 6_000
EQUAL = [1.0] * 132


@pytest.mark.parametrize(
    "sizes",
    [
        LLAMA_1B,
        Sizes(28, 1_536, 8_960, 2, 6, 128, 151_936, 8),
        Sizes(2, 256, 512, 2, 4, 64, 1_000, 8),
    ],
)
def test_schedules_of_real_sizes_are_correct(sizes):
    assert why_wrong(schedule_of(sizes, EQUAL)) is None


def names_in(kind, name):
    """Return the names that a struct or an enum of the source declares, in their order."""
    body = re.search(rf"{kind} {name} {{(.*?)}}", SOURCE.read_text(), re.DOTALL)[1]
    body = re.sub(r"//.*", "", body)
    declared = [part.split("=")[0] for part in re.split(r"[,;]", body) if part.strip()]
    return [re.findall(r"\w+", one)[-1] for one in declared]


def test_parameters_and_operators_are_those_of_the_source():
    assert names_in("struct", "Parameters") == [one[0] for one in Parameters._fields_]
    assert names_in("enum", "Op") == [*Op.__members__, "OPS"]
    assert len(names_in("struct", "Instruction")) * 4 == INSTRUCTION_BYTES
    assert len(names_in("struct", "Layer")) * 8 == LAYER_BYTES


def test_the_source_says_how_many_rows_are_kept_together():
    source = SOURCE.read_text()
    for name, value in {"PARTS": PARTS, "MOST_ROWS": MOST_ROWS, "MOST_STOPS": MOST_STOPS}.items():
        assert f"constexpr int {name} = {value};" in source


def test_sms_read_the_same_bytes_but_for_one_row():
    schedule = schedule_of(LLAMA_1B, EQUAL)
    num_bytes = [schedule.bytes_of(sm) for sm in range(132)]
    assert sum(num_bytes) == 2 * (16 * (3_072 + 2_048 + 4 * 2_048 * 3) + 128_256) * 2_048
    assert max(num_bytes) - min(num_bytes) <= LLAMA_1B.row_bytes(Op.DOWN)


def test_sms_read_bytes_in_proportion_to_their_speeds():
    speeds = [1.0] * 66 + [0.8] * 66
    schedule = schedule_of(LLAMA_1B, speeds)
    assert why_wrong(schedule) is None
    num_bytes = [schedule.bytes_of(sm) for sm in range(132)]
    fast, slow = sum(num_bytes[:66]) / 66, sum(num_bytes[66:]) / 66
    assert slow / fast == pytest.approx(0.8, abs=1e-3)
    assert max(num_bytes[66:]) - min(num_bytes[66:]) <= LLAMA_1B.row_bytes(Op.DOWN)


def broken(schedule, generator):
    """Return a schedule with one change that breaks it, and the name of the change."""
    queues = [list(queue) for queue in schedule.queues]
    while True:
        sm = generator.randrange(len(queues))
        queue = queues[sm]
        at = generator.randrange(len(queue))
        kind = generator.choice(CHANGES)
        if kind(schedule, queue, at, generator):
            return Schedule(schedule.sizes, tuple(map(tuple, queues))), kind.__name__


def drop(schedule, queue, at, generator):
    del queue[at]
    return True


def repeat(schedule, queue, at, generator):
    queue.insert(generator.randint(at, len(queue)), queue[at])
    return True


def exchange(schedule, queue, at, generator):
    other = generator.randrange(len(queue))
    # Units of one attention may have any order.
    if queue[at][:2] == queue[other][:2]:
        return False
    queue[at], queue[other] = queue[other], queue[at]
    return True


def wait_for_nothing(schedule, queue, at, generator):
    # An instruction that has waited for the same counter waits for this one.
    if queue[at].wait in [NONE, *(one.wait for one in queue[:at])]:
        return False
    queue[at] = queue[at]._replace(wait=NONE, arrivals=0)
    return True


def wait_for_another(schedule, queue, at, generator):
    others = [one for queue in schedule.queues for one in queue if one.wait != NONE]
    other = generator.choice(others)
    if other.wait == queue[at].wait or queue[at].wait in [one.wait for one in queue[:at]]:
        return False
    queue[at] = queue[at]._replace(wait=other.wait, arrivals=other.arrivals)
    return True


def wait_for_fewer_or_more(schedule, queue, at, generator):
    if queue[at].wait == NONE:
        return False
    change = generator.choice((-2, -1, 1, 2))
    queue[at] = queue[at]._replace(arrivals=queue[at].arrivals + change)
    return True


def signal_another(schedule, queue, at, generator):
    signal = generator.randrange(NONE, schedule.num_counters + 1)
    if signal == queue[at].signal:
        return False
    queue[at] = queue[at]._replace(signal=signal)
    return True


def shift(schedule, queue, at, generator):
    if queue[at].op == Op.HEAD and not queue[at].outputs:
        return False
    change = generator.choice((-3, -2, -1, 1, 2, 3))
    queue[at] = queue[at]._replace(first=queue[at].first + change)
    return True


def resize(schedule, queue, at, generator):
    change = generator.choice((-3, -2, -1, 1, 2, 3))
    queue[at] = queue[at]._replace(outputs=queue[at].outputs + change)
    return True


def change_layer(schedule, queue, at, generator):
    if queue[at].op in (Op.HEAD, Op.NEXT):
        return False
    layer = generator.randrange(-1, schedule.sizes.layers + 1)
    if layer == queue[at].layer:
        return False
    queue[at] = queue[at]._replace(layer=layer)
    return True


def change_operator(schedule, queue, at, generator):
    op = generator.randrange(-1, 9)
    if op == queue[at].op:
        return False
    queue[at] = queue[at]._replace(op=op)
    return True


CHANGES = (
    *(drop, repeat, exchange, wait_for_nothing, wait_for_another, wait_for_fewer_or_more),
    *(signal_another, shift, resize, change_layer, change_operator),
)


def test_no_broken_schedule_is_accepted():
    generator = random.Random(0)
    schedules = [schedule_of(sizes, [1.0] * num_sms) for sizes, num_sms in SMALL]
    assert [why_wrong(one) for one in schedules] == [None] * len(SMALL)
    accepted = []
    for _ in range(NUM_BROKEN):
        schedule, change = broken(generator.choice(schedules), generator)
        if why_wrong(schedule) is None:
            accepted.append(change)
    assert accepted == []


def model_of(family, **others):
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=101,
        max_position_embeddings=1_024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **others,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for one in model.parameters():
        one.data.mul_(4) if one.dim() == 2 else one.data.add_(0.1 * torch.randn_like(one))
    return model


@pytest.mark.parametrize(
    ("family", "others"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 40}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Gemma", {}),
    ],
)
def test_the_executor_computes_the_logits_of_the_model_in_any_order(family, others):
    model = model_of(family, **others)
    decoder = decoder_of(model)
    # Two splits of the keys.
    tokens = torch.randint(3, 101, (1, SPLIT_KEYS + 9))
    slot = tokens.shape[1] - 1
    sizes = Sizes(2, 64, 96, 2, decoder.group, 16, 101, splits=2)
    cache = torch.full((2, 2, 1, 2, 512, 16), float("nan"))
    _reference.forward(decoder, tokens[:, :-1], cache[0], cache[1], {None: decoder.rotations(512)})
    executor = Executor(
        decoder,
        schedule_of(sizes, [1.0] * 5),
        cache[0, :, 0],
        cache[1, :, 0],
        int(tokens[0, -1]),
        slot,
    )
    with torch.no_grad():
        for step in range(2):
            expected = model(tokens).logits[0, -1]
            token = executor.step(random.Random(step))
            torch.testing.assert_close(executor.memory.logits, expected, atol=1e-5, rtol=1e-4)
            assert token == int(expected.argmax())
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)


def test_the_executor_shows_a_schedule_that_reads_too_early():
    model = model_of("Llama")
    decoder = decoder_of(model)
    schedule = schedule_of(Sizes(2, 64, 96, 2, 2, 16, 101, 1), [1.0] * 4)
    queues = [
        tuple(
            one._replace(wait=NONE) if one.op == Op.DOWN and one.layer == 0 else one
            for one in queue
        )
        for queue in schedule.queues
    ]
    early = Schedule(schedule.sizes, tuple(queues))
    assert why_wrong(early) is not None
    cache = torch.full((2, 2, 2, 512, 16), float("nan"))
    executor = Executor(decoder, early, cache[0], cache[1], token=3, slot=0)
    with torch.no_grad():
        executor.step(random.Random(0))
    assert executor.memory.logits.isnan().any()
