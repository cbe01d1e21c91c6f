"""Columns of texts are numbered by combination, and mean what each text alone means."""

from kprof.collect.readers.kineto.columns import JOINT, Combinations, Vocabulary


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
