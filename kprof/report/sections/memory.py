"""Memory of the device over the recording, as the allocator saw it."""

from __future__ import annotations

from kprof.analyze.energy import Series, devices_in, readings, thin_out
from kprof.report.section import Column, Figure, Section, Table, Text
from kprof.report.units import MISSING, format_memory
from kprof.trace import Trace

TITLE = "Memory"
ORDER = 90

MAX_POINTS = 1500
QUANTITIES = (("allocated_bytes", "allocated"), ("reserved_bytes", "reserved"))
COLOURS = {"allocated_bytes": "#4c78a8", "reserved_bytes": "#b3bfd1"}


def render(trace: Trace) -> Section:
    """Render the allocator's bytes: the peaks of each device, and the curves of the first."""
    devices = devices_in(trace.samples, "profiler")
    if not devices:
        why = "Not recorded: the recording has no memory samples."
        return Section(TITLE, ORDER, (Text(why),), in_terminal=False)
    peaks = {device: _peaks(trace, device) for device in devices}
    fullest = max(devices, key=lambda device: peaks[device][0] or 0)
    lead = (
        f"At its peak {_formatted(peaks[fullest][0])} was allocated{_of_capacity(trace, fullest)}."
    )
    columns = (
        Column("Device"),
        Column("Peak allocated", "right"),
        Column("Peak reserved", "right"),
    )
    rows = tuple(
        (_name(device), *(_formatted(peak) for peak in peaks[device])) for device in devices
    )
    table = Table(columns, rows, caption="Peaks within the recording.")
    parts = (Text(lead), table, _curves(trace, fullest))
    return Section(TITLE, ORDER, parts, in_terminal=False)


def _name(device: int) -> str:
    return "host" if device < 0 else f"GPU {device}"


def _formatted(num_bytes: float | None) -> str:
    return MISSING if num_bytes is None else format_memory(num_bytes)


def _peaks(trace: Trace, device: int) -> tuple[float | None, ...]:
    return tuple(
        float(series.value.max()) if len(series.value) else None
        for quantity, _ in QUANTITIES
        for series in [readings(trace.samples, "profiler", quantity, device)]
    )


def _of_capacity(trace: Trace, device: int) -> str:
    sizes = {gpu.index: gpu.memory_bytes for gpu in trace.meta.gpus}
    size = sizes.get(device)
    return f" on {_name(device)}, which has {format_memory(size)}" if size else ""


def _curves(trace: Trace, device: int) -> Figure:
    recorded = {
        quantity: readings(trace.samples, "profiler", quantity, device)
        for quantity, _ in QUANTITIES
    }
    series = {
        quantity: thin_out(curve, MAX_POINTS, keep_peaks=True)
        for quantity, curve in recorded.items()
    }
    first_ns = min((int(s.time_ns[0]) for s in series.values() if len(s.time_ns)), default=0)
    data = [
        _line(series[quantity], first_ns, label, COLOURS[quantity])
        for quantity, label in QUANTITIES
        if len(series[quantity].value)
    ]
    layout: dict[str, object] = {
        "margin": {"l": 70, "r": 20, "t": 10, "b": 46},
        "xaxis": {"title": {"text": "milliseconds"}, "zeroline": False},
        "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    caption = f"Memory of {_name(device)} during the recording."
    return Figure(data, layout, caption, height_px=320)


def _line(series: Series, first_ns: int, label: str, colour: str) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": [round(time_ns / 1e6, 4) for time_ns in (series.time_ns - first_ns).tolist()],
        "y": [round(value / 2**30, 4) for value in series.value.tolist()],
        "line": {"color": colour, "width": 1.5, "shape": "hv"},
    }
