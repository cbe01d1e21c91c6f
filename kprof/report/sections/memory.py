"""Memory of the devices over the recording, as each process's allocator saw it."""

from __future__ import annotations

from kprof.analyze.capture_quality.unanswered import why_no_memory
from kprof.analyze.energy import Series, readings, thin_out
from kprof.analyze.memory import ACTIVATIONS, OUTSIDE, OWNERS, TEMPORARIES
from kprof.report.figures import BLUE, LEGEND_ABOVE, PALE, Drawn, axis, curve, margins
from kprof.report.section import Column, Figure, Part, Section, Table, Text
from kprof.report.units import MISSING, format_memory, format_share
from kprof.trace import MemoryPeak, Trace

TITLE = "Memory"
ORDER = 90

MAX_POINTS = 1500
QUANTITIES = (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved"))
COLOURS = {"allocated_bytes": BLUE, "reserved_bytes": PALE}
# Rank and device: the GPU 0 of two ranks may be two GPUs, and each rank has an allocator.
Place = tuple[int, int]


def render(trace: Trace) -> Section:
    """Render the allocator's bytes: the peaks of each device, and the curves of the fullest."""
    of_allocator = trace.samples[(trace.samples["source"] == "profiler").to_numpy()]
    pairs = of_allocator[["rank", "device"]].drop_duplicates().sort_values(["rank", "device"])
    places = list(pairs.itertuples(index=False, name=None))
    holders = parts_of_peaks(trace.meta.memory)
    if why := why_no_memory(trace):
        parts = holders or (Text(why.sentence),)
        return Section(TITLE, ORDER, parts, in_terminal=bool(holders))
    peaks = {place: _peaks(trace, place) for place in places}
    fullest = max(places, key=lambda place: peaks[place][0] or 0)
    lead = (
        f"At its peak {_formatted(peaks[fullest][0])} was allocated{_of_capacity(trace, fullest)}."
    )
    columns = (
        Column("Device"),
        Column("Peak allocated", "right"),
        Column("Peak reserved", "right"),
    )
    rows = tuple(
        (_name(trace, place), *(_formatted(peak) for peak in peaks[place])) for place in places
    )
    table = Table(columns, rows, caption="Peaks within the recording.")
    # Curves and points, which a terminal cannot show.
    curves = _curves(trace, fullest)
    parts = (Text(lead), *holders, table, curves)
    return Section(TITLE, ORDER, parts, in_terminal=bool(holders))


HOLDERS = (
    Column("Holder", "prose"),
    Column("Where", "name"),
    Column("Bytes", "right"),
    Column("Share", "right"),
    Column("Allocations", "right", essential=False),
    Column("Known by", essential=False),
)
SCALES = (ACTIVATIONS, TEMPORARIES, OUTSIDE)
"""What grows with the batch; all else stays, for a model of the same size. Outside of every phase
lie the batch itself, the logits and the loss."""
CHANGES = {
    ACTIVATIONS: "checkpoint activations (torch.utils.checkpoint), or split the batch and "
    "accumulate gradients",
    TEMPORARIES: "split the batch and accumulate gradients",
    OWNERS["optimizer"]: "shard the optimizer state over ranks (FSDP), or keep it in 8 bits",
    OWNERS["gradients"]: "shard the gradients over ranks (FSDP)",
    OWNERS["parameters"]: "keep parameters in fewer bits, or shard them over ranks (FSDP)",
}
"""What makes a holder smaller, by its category."""
# A smaller share of the peak is worth no change.
LEAST_SHARE = 0.1
BASES = {
    "address": "address, noted while recording",
    "time": "module or phase at that time",
    "stack": "Python stack",
    "size": "size of cuBLAS's workspace",
    "unknown": "not known",
}


def parts_of_peaks(peaks: tuple[MemoryPeak, ...]) -> tuple[Part, ...]:
    """Render who holds the peak of each device, the allocator's own part, and what would fit."""
    parts: list[Part] = []
    for peak in peaks:
        name = f"GPU {peak.device}" + (f" of rank {peak.rank}" if len(peaks) > 1 else "")
        parts.append(Text(_lead(peak, name)))
        parts += [Text(change)] if (change := _change(peak)) else []
        parts += [_holders(peak, name), Text(_allocator(peak))]
        parts += [Text(fits)] if (fits := what_fits(peak)) else []
    return tuple(parts)


def _by_category(peak: MemoryPeak) -> list[tuple[str, int]]:
    """Return the categories of holders with their bytes, largest first."""
    by_category: dict[str, int] = {}
    for one in peak.holders:
        by_category[one.category] = by_category.get(one.category, 0) + one.num_bytes
    return sorted(by_category.items(), key=lambda named: -named[1])


def _change(peak: MemoryPeak) -> str:
    """Name the change that makes the largest holder smaller of those that one is known for."""
    known = [one for one in _by_category(peak) if one[0] in CHANGES]
    if not known or known[0][1] < LEAST_SHARE * peak.requested_bytes:
        return ""
    category, size = known[0]
    return (
        f"To need less: {CHANGES[category]}. It saves at most {format_memory(size)} "
        f"({format_share(size / peak.requested_bytes)}): the {category}."
    )


def _lead(peak: MemoryPeak, name: str) -> str:
    largest = _by_category(peak)[:4]
    whole = max(peak.requested_bytes, 1)
    told = ", ".join(f"{category} {format_share(size / whole)}" for category, size in largest)
    return (
        f"At the peak of {name} tensors hold {format_memory(peak.requested_bytes)} "
        f"({peak.requested_bytes:,} bytes): {told}."
    )


def _holders(peak: MemoryPeak, name: str) -> Table:
    whole = max(peak.requested_bytes, 1)
    rows = tuple(
        (
            one.category,
            one.place or MISSING,
            f"{one.num_bytes:,}",
            format_share(one.num_bytes / whole),
            f"{one.num_allocations:,}",
            BASES.get(one.basis, one.basis),
        )
        for one in peak.holders
    )
    share = tuple(one.num_bytes / whole for one in peak.holders)
    return Table(HOLDERS, rows, f"Holders of the peak of {name}; they add up to it.", share)


def _allocator(peak: MemoryPeak) -> str:
    """Say what the allocator adds: rounding, and what it has reserved and does not use."""
    least = "" if peak.allocated_bytes is not None else "at least "
    allocated = max(peak.allocated_bytes or peak.rounded_bytes, peak.rounded_bytes)
    rounding = allocated - peak.requested_bytes
    unused = max(peak.reserved_bytes - allocated, 0)
    most = "" if peak.allocated_bytes is not None else "at most "
    told = (
        f"Rounding to blocks adds {least}{rounding:,} bytes. {format_memory(peak.reserved_bytes)} "
        f"are reserved then, {most}{format_memory(unused)} of them unused: fragmentation, and what "
        "was needed before."
    )
    highest = peak.highest_requested_bytes
    if highest is not None and highest > peak.requested_bytes:
        told += (
            f" Before the recording the process needed more: {format_memory(highest)} at its peak."
        )
    return told


def what_fits(peak: MemoryPeak) -> str:
    """Say how much larger a batch could be, if what scales with it grows in proportion."""
    scaled = sum(one.num_bytes for one in peak.holders if one.category in SCALES)
    if peak.capacity_bytes is None or not scaled:
        return ""
    fixed = peak.reserved_bytes - scaled
    times = (peak.capacity_bytes - fixed) / scaled
    return (
        f"Activations, temporaries and data take {format_memory(scaled)}. If they grow with the "
        f"batch and all else stays, {times:.2f} times the batch fits into "
        f"{format_memory(peak.capacity_bytes)}; without them, {format_memory(max(fixed, 0))} are "
        "needed."
    )


def _name(trace: Trace, place: Place) -> str:
    rank, device = place
    name = "host" if device < 0 else f"GPU {device}"
    return f"{name} of rank {rank}" if trace.meta.num_ranks > 1 else name


def _formatted(num_bytes: float | None) -> str:
    return MISSING if num_bytes is None else format_memory(num_bytes)


def _recorded(trace: Trace, place: Place, quantity: str) -> Series:
    rank, device = place
    of_rank = trace.samples[(trace.samples["rank"] == rank).to_numpy()]
    return readings(of_rank, "profiler", quantity, device)


def _peaks(trace: Trace, place: Place) -> tuple[float | None, ...]:
    return tuple(
        float(series.value.max()) if len(series.value) else None
        for quantity, _ in QUANTITIES
        for series in [_recorded(trace, place, quantity)]
    )


def _of_capacity(trace: Trace, place: Place) -> str:
    sizes = {(gpu.rank, gpu.device): gpu.memory_bytes for gpu in trace.meta.gpus}
    size = sizes.get(place) or sizes.get((None, place[1]))
    return f" on {_name(trace, place)}, which has {format_memory(size)}" if size else ""


def _curves(trace: Trace, place: Place) -> Figure:
    series = {
        quantity: thin_out(_recorded(trace, place, quantity), MAX_POINTS, keep_peaks=True)
        for quantity, _ in QUANTITIES
    }
    first_ns = min((int(s.time_ns[0]) for s in series.values() if len(s.time_ns)), default=0)
    data = [
        _line(series[quantity], first_ns, label, COLOURS[quantity])
        for quantity, label in QUANTITIES
        if len(series[quantity].value)
    ]
    layout: Drawn = {
        "margin": margins(),
        "xaxis": axis("milliseconds", zeroline=False),
        "yaxis": axis("GiB", rangemode="tozero"),
        "legend": LEGEND_ABOVE,
    }
    caption = f"Memory of {_name(trace, place)} during the recording."
    return Figure(data, layout, caption, height_px=320)


def _line(series: Series, first_ns: int, label: str, colour: str) -> Drawn:
    x = [round(time_ns / 1e6, 4) for time_ns in (series.time_ns - first_ns).tolist()]
    y = [round(value / 2**30, 4) for value in series.value.tolist()]
    return curve(label, x, y, colour, shape="hv")
