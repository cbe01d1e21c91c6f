"""The state of the GPUs over the run: power, clocks, reasons for throttling."""

from __future__ import annotations

from kprof.analyze.attribution.steps import find_steps
from kprof.analyze.capture_quality.unanswered import why_no_power
from kprof.analyze.energy import (
    Series,
    devices_in,
    measure_step_energy,
    readings,
    thin_out,
    throttle_shares,
)
from kprof.device import HARMLESS_REASONS, THROTTLE_REASONS
from kprof.errors import three_digits
from kprof.report.figures import (
    GREY,
    LEGEND_ABOVE,
    SERIES_COLOURS,
    Drawn,
    axis,
    curve,
    margins,
    shade_places,
)
from kprof.report.section import Column, Facts, Figure, Part, Section, Table, Text
from kprof.report.units import MISSING, UNKNOWN, format_count, format_share
from kprof.trace import Trace

TITLE = "Power and clocks"
ORDER = 80
# Curves and points, which a terminal cannot show.
FOR_PAGE_ONLY = True

MAX_POINTS = 1500
DEVICES_DRAWN = 8
PANEL_GAP = 0.06
PANELS = (
    ("power_w", "power, W"),
    ("sm_clock_mhz", "SM clock, MHz"),
    ("temperature_c", "temperature, °C"),
)


def render(trace: Trace) -> Section:
    """Render NVML's samples: figures for each GPU, the reasons of throttling, the curves."""
    devices = devices_in(trace.samples, "nvml")
    if not devices:
        why = why_no_power(trace)
        text = why.sentence if why else "No GPU was recorded, so power and clocks are not known."
        return Section(TITLE, ORDER, (Text(text),), in_terminal=False)
    parts: list[Part] = [_lead(trace, devices), _energy(trace), _table(trace, devices)]
    return Section(TITLE, ORDER, (*parts, _curves(trace, devices)), in_terminal=False)


def _lead(trace: Trace, devices: list[int]) -> Text:
    harmless = {name for bit, name in THROTTLE_REASONS.items() if bit & HARMLESS_REASONS}
    held_back: dict[str, float] = {}
    for device in devices:
        reasons = throttle_shares(readings(trace.samples, "nvml", "throttle_reasons", device))
        for name, share in reasons.items():
            if name not in harmless:
                held_back[name] = max(held_back.get(name, 0.0), share)
    if not held_back:
        return Text("No sample shows lowered clocks.")
    listed = ", ".join(f"{name} in {format_share(share)}" for name, share in held_back.items())
    return Text(f"Clocks were lowered: {listed} of the samples.", "warning")


def _energy(trace: Trace) -> Facts:
    label, energy = "Energy per step", measure_step_energy(trace)
    if energy.joules is None:
        return Facts(((label, UNKNOWN, energy.why),))
    gpus, steps = format_count(energy.num_gpus, "GPU"), energy.num_steps
    basis = f"from the energy counter of {gpus}, over {format_count(steps, 'recorded step')}"
    return Facts(((label, f"{three_digits(energy.joules)} J", basis),))


def _table(trace: Trace, devices: list[int]) -> Table:
    rows = []
    for device in devices:
        for quantity, label in PANELS:
            series = readings(trace.samples, "nvml", quantity, device)
            rows.append((f"GPU {device}", label, *_extremes(series)))
        reasons = throttle_shares(readings(trace.samples, "nvml", "throttle_reasons", device))
        for name, share in reasons.items():
            rows.append((f"GPU {device}", f"clocks: {name}", MISSING, format_share(share), MISSING))
    columns = (
        Column("GPU"),
        Column("Quantity"),
        Column("Least", "right"),
        Column("Mean", "right"),
        Column("Most", "right"),
    )
    caption = "Over the whole recording. Reasons for lower clocks: shares of the samples."
    return Table(columns, tuple(rows), caption=caption)


def _extremes(series: Series) -> tuple[str, str, str]:
    if not len(series.value):
        return MISSING, MISSING, MISSING
    values = (series.value.min(), series.value.mean(), series.value.max())
    least, mean, most = (f"{value:,.0f}" for value in values)
    return least, mean, most


def _curves(trace: Trace, devices: list[int]) -> Figure:
    """Draw a panel for each quantity, a line for each GPU, the recorded steps shaded."""
    first_ns = int(trace.samples["time_ns"].min())
    data: list[Drawn] = []
    layout: Drawn = {
        "margin": margins(),
        "legend": LEGEND_ABOVE,
        "showlegend": len(devices) > 1,
        "hovermode": "x",
        "shapes": _shaded_steps(trace, first_ns),
    }
    height = (1 - PANEL_GAP * (len(PANELS) - 1)) / len(PANELS)
    for panel, (quantity, label) in enumerate(PANELS):
        suffix = "" if panel == 0 else str(panel + 1)
        bottom = (len(PANELS) - 1 - panel) * (height + PANEL_GAP)
        domain = [bottom, min(bottom + height, 1.0)]
        layout[f"yaxis{suffix}"] = axis(label, domain=domain, rangemode="tozero", nticks=5)
        for device in devices[:DEVICES_DRAWN]:
            series = thin_out(readings(trace.samples, "nvml", quantity, device), MAX_POINTS)
            data.append(_line(series, first_ns, device, f"y{suffix}", is_named=panel == 0))
    last = f"y{len(PANELS)}"
    layout["xaxis"] = axis("seconds", anchor=last, zeroline=False)
    caption = "Samples of the whole run. Shaded: the recorded steps."
    return Figure(data, layout, caption, height_px=520)


def _line(series: Series, first_ns: int, device: int, panel: str, *, is_named: bool) -> Drawn:
    x = [round(time_ns / 1e9, 4) for time_ns in (series.time_ns - first_ns).tolist()]
    y = [round(value, 1) for value in series.value.tolist()]
    line = curve(f"GPU {device}", x, y, SERIES_COLOURS[device % len(SERIES_COLOURS)])
    return {**line, "legendgroup": f"{device}", "showlegend": is_named, "yaxis": panel}


def _shaded_steps(trace: Trace, first_ns: int) -> list[Drawn]:
    steps = find_steps(trace)
    if not steps:
        return []
    start_ns = min(step.start_ns for step in steps)
    end_ns = max(step.device_end_ns for step in steps)
    return [shade_places((start_ns - first_ns) / 1e9, (end_ns - first_ns) / 1e9, GREY, 0.25)]
