"""The quantities that tests find in texts."""

from tests.quantities import quantities_in


def test_numbers_are_found_as_they_are_written_with_their_units():
    text = "Moved by +10.0 ms, by 1 of 2,000 (12.5 %): 48.8 KiB at 50.0 GB/s, of 40."
    assert quantities_in(text) == [
        *("+10.0 ms", "1", "2,000", "12.5 %", "48.8 KiB", "50.0 GB/s", "40"),
    ]


def test_numbers_within_names_are_none():
    assert quantities_in("FP8, H200, 4x8, float32, L1 and v1.2") == []
