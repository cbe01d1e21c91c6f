"""Who holds the memory, what the allocator adds, and what would fit."""

from dataclasses import replace

import pytest

from kprof.report.section import Table
from kprof.report.sections.memory import parts_of_peaks, render, what_fits
from kprof.trace import MemoryHolder, MemoryPeak
from tests.quantities import quantities_in
from tests.section_traces import RICH
from tests.traces import analyzed_trace_of

GIB = 1 << 30
PEAK = MemoryPeak(
    device=0,
    requested_bytes=6 * GIB,
    reserved_bytes=8 * GIB,
    holders=(
        MemoryHolder("activations", "layers.0", 3 * GIB, 5, "time"),
        MemoryHolder("parameters", "", 2 * GIB, 9, "address"),
        MemoryHolder("temporaries of backward", "", GIB, 1, "time"),
    ),
    rounded_bytes=6 * GIB + 512,
    allocated_bytes=6 * GIB + 2048,
    capacity_bytes=16 * GIB,
)


def texts(parts):
    return [part.text for part in parts if hasattr(part, "text")]


def test_each_holder_has_its_bytes_and_its_share():
    (table,) = (part for part in parts_of_peaks((PEAK,)) if isinstance(part, Table))
    assert [row[:4] for row in table.rows] == [
        ("activations", "layers.0", f"{3 * GIB:,}", "50.0 %"),
        ("parameters", "—", f"{2 * GIB:,}", "33.3 %"),
        ("temporaries of backward", "—", f"{GIB:,}", "16.7 %"),
    ]


@pytest.mark.parametrize(
    ("sizes", "saved"),
    [
        ({"activations": 5, "parameters": 3, "gradients": 2}, ["5 GiB", "50.0 %"]),
        ({"allocated before the recording": 7, "optimizer state": 3}, ["3 GiB", "30.0 %"]),
        ({"allocated before the recording": 7, "buffers": 3}, []),
        ({"workspaces": 11, "gradients": 1}, []),
    ],
)
def test_the_change_is_about_the_largest_holder_that_one_is_known_for(sizes, saved):
    holders = tuple(MemoryHolder(name, "", size * GIB, 1, "time") for name, size in sizes.items())
    peak = replace(PEAK, holders=holders, requested_bytes=sum(sizes.values()) * GIB)
    told = [one.partition("saves at most")[2] for one in texts(parts_of_peaks((peak,)))]
    assert [quantity for one in told for quantity in quantities_in(one)] == saved


def test_rounding_and_unused_memory_are_told_apart():
    _, _, allocator, _ = texts(parts_of_peaks((PEAK,)))
    assert "adds 2,048 bytes" in allocator
    assert "8 GiB are reserved" in allocator


def test_rounding_is_a_lower_bound_where_the_blocks_were_not_recorded():
    _, _, allocator, _ = texts(parts_of_peaks((replace(PEAK, allocated_bytes=None),)))
    assert "adds at least 512 bytes" in allocator


def test_the_batch_that_fits_scales_activations_and_temporaries_alone():
    # 4 GiB grow, of 8 GiB reserved; 12 of 16 are left for them.
    assert "3.00 times the batch fits into 16 GiB" in what_fits(PEAK)


def test_memory_outside_of_every_phase_grows_with_the_batch_too():
    logits = MemoryHolder("allocated outside of every phase", "", 2 * GIB, 1, "time")
    peak = replace(PEAK, holders=(PEAK.holders[0], PEAK.holders[2], logits))
    # 6 GiB grow, of 8 GiB reserved; 14 of 16 are left for them.
    assert "2.33 times the batch" in what_fits(peak)


def test_nothing_is_said_of_a_batch_without_the_size_of_the_device():
    assert what_fits(replace(PEAK, capacity_bytes=None)) == ""
    assert what_fits(replace(PEAK, holders=PEAK.holders[1:2])) == ""


def test_the_terminal_shows_the_section_where_a_peak_was_recorded():
    trace = analyzed_trace_of({})
    with_peak = replace(trace, meta=replace(trace.meta, memory=(PEAK,)))
    assert (render(trace).in_terminal, render(with_peak).in_terminal) == (False, True)


def test_a_trace_with_samples_alone_is_shown_on_the_page_only():
    assert not render(RICH).in_terminal
