"""Memory of the devices over the recording, as each process's allocator saw it."""

from __future__ import annotations

from kprof.analyze.capture_quality.unanswered import why_no_memory
from kprof.analyze.energy import Series, readings, thin_out
from kprof.report.figures import BLUE, LEGEND_ABOVE, PALE, Drawn, axis, curve, margins
from kprof.report.section import Column, Figure, Section, Table, Text
from kprof.report.units import MISSING, format_memory
from kprof.trace import Trace

TITLE = "Memory"
ORDER = 90
# Curves and points, which a terminal cannot show.
FOR_PAGE_ONLY = True

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
    if why := why_no_memory(trace):
        return Section(TITLE, ORDER, (Text(why.sentence),), in_terminal=False)
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
    parts = (Text(lead), table, _curves(trace, fullest))
    return Section(TITLE, ORDER, parts, in_terminal=False)


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
