"""Columns of texts are numbered by combination, and every event is decoded in the same way."""

import gzip
import json
import random
from pathlib import Path

import pytest

from kprof.collect.readers.kineto.columns import (
    JOINT,
    TABLES,
    BlockDecoder,
    Combinations,
    Vocabulary,
)
from kprof.collect.readers.kineto.events import KNOWN_CATEGORIES, Args

TRACES = sorted((Path(__file__).parents[2] / "data").glob("**/*.json.gz"))
OF_NO_CATEGORY = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}


def texts_of(combinations, joined):
    columns = combinations.codes(joined)
    words = [[*vocabulary.values_in_order(), b""] for vocabulary in combinations.vocabularies]
    return [
        tuple(word[code] for word, code in zip(words, codes, strict=True))
        for codes in zip(*columns, strict=True)
    ]


def test_combinations_number_each_of_their_texts_apart():
    combinations = Combinations((Vocabulary(), Vocabulary()))
    rows = [(b"a", b"x"), (b"a", b"y"), (b"b", b"x"), (b"a", b"y")]
    assert texts_of(combinations, [JOINT.join(row) for row in rows]) == rows
    assert [len(one.values_in_order()) for one in combinations.vocabularies] == [2, 2]


def test_a_text_that_is_not_there_has_no_number():
    combinations = Combinations((Vocabulary(), Vocabulary()))
    codes = combinations.codes([JOINT.join((b"", b"x"))])
    assert [column.tolist() for column in codes] == [[-1], [0]]


def test_numbers_stay_from_block_to_block():
    combinations = Combinations((Vocabulary(), Vocabulary()))
    first, again = [(b"a", b"x")], [(b"b", b"x"), (b"a", b"x")]
    assert texts_of(combinations, [JOINT.join(row) for row in first]) == first
    assert texts_of(combinations, [JOINT.join(row) for row in again]) == again


def test_no_event_gives_no_numbers():
    combinations = Combinations((Vocabulary(), Vocabulary()))
    assert [column.tolist() for column in combinations.codes([])] == [[], []]


def decoded(events):
    """Return columns, words and counts of a list of events."""
    decoder = BlockDecoder()
    block = decoder.decode(json.dumps(events).encode())
    columns = {
        (table, name): column.tolist()
        for table in TABLES
        for name, column in getattr(block, table).items()
    }
    words = {name: one.values_in_order() for name, one in decoder.words.items()}
    del words["category"]  # it says what else the block holds
    return columns, words, block.counts


def random_event(draw):
    """Return an event of any category that holds any `args`, whatever its category needs."""
    names = Args.__struct_encode_fields__
    chosen = draw.sample(names, draw.randrange(len(names)))
    event = {
        "ph": draw.choice("XXXXXXiBEs"),
        "cat": draw.choice(sorted(KNOWN_CATEGORIES)),
        "name": draw.choice(["[memory]", "nn.Module: a", "dma_request", "mm"]),
        "pid": draw.choice([1, "1"]),
        "tid": draw.choice([2, "stream 7"]),
        "ts": draw.randrange(10**6) / 1000,
        "dur": draw.choice([1.5, 0, -1, None, "2"]),
        "args": {name: draw.choice([*range(9), "4", [1, 2]]) for name in chosen},
    }
    kept = draw.sample(sorted(event), len(event) - draw.randrange(2))
    return {name: event[name] for name in event if name in kept or name == "cat"}


def assert_decoded_alike(events):
    """Compare with the decoding of a block that holds an event without a category."""
    columns, words, counts = decoded(events)
    more = decoded([*events, OF_NO_CATEGORY])
    assert (columns, words) == more[:2]
    assert more[2] - counts == {"events": 1, "ph:M": 1}
    assert not counts - more[2]


def test_a_known_category_is_decoded_as_beside_events_of_none():
    draw = random.Random(0)
    assert_decoded_alike([random_event(draw) for _ in range(10_000)])


@pytest.mark.parametrize("trace", TRACES, ids=lambda path: path.name)
def test_a_recorded_trace_is_decoded_as_beside_events_of_no_category(trace):
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert_decoded_alike([one for one in events if one.get("cat")][:20_000])
