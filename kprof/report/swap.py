"""The result of a swap: call sites, kernels that ran there, and unchanged sites with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kprof.kernels.swap.swap_report import Choice, SiteReport, SwapReport, Tried
from kprof.report.section import Column, Facts, Section, Table, Text
from kprof.report.units import MISSING, UNKNOWN

ORDER = 5
MOST_NAMES = 3


def sections_of_swap(report: SwapReport) -> list[Section]:
    """Return what the terminal and the page show."""
    parts: list[Text | Facts | Table] = [_headline(report)]
    parts += [Text(note, "warning") for note in report.notes]
    if not report.sites:
        text = "No call site was found for these kernels. "
        text += "`kprof kernels list` names the kernels that have none in any model."
        parts.append(Text(text, "warning"))
    if report.replaced or report.fallen_back:
        parts.append(_table_of_calls([*report.replaced, *report.fallen_back]))
    if report.skipped:
        parts.append(_table_of_skipped(report))
    return [Section("Swap", ORDER, tuple(parts))]


def _headline(report: SwapReport) -> Facts:
    replaced = sum(site.num_replaced for site in report.sites)
    away = sum(site.num_fallen_back for site in report.sites)
    compiled = sum(1 for site in report.replaced if any(one.is_compiled for one in site.calls))
    items = [
        ("sites", str(len(report.replaced)), "call sites where a kernel runs"),
        ("left alone", str(len(report.skipped)), "similar call sites; the reasons are below"),
        ("calls", f"{replaced:,}", "that a kernel ran"),
        ("fallen back", f"{away:,}", "calls that the original code ran"),
    ]
    if report.fallen_back:
        number = str(len(report.fallen_back))
        items.insert(1, ("sites fallen back", number, "all their calls ran the original"))
    if compiled:
        items.append(
            ("compiled", str(compiled), "sites in compiled graphs; their calls are not counted")
        )
    return Facts(tuple(items))


def _table_of_calls(found: Iterable[SiteReport]) -> Table:
    rows = []
    for (kernel, what), sites in _grouped(found).items():
        ways: Counter[tuple[str, str, bool]] = Counter()
        joined: Counter[str] = Counter()
        for site in sites:
            for one in site.calls:
                ways[one.provider or "original", one.why or "", one.is_compiled] += one.num_calls
                joined[one.provider or "original"] += one.num_joined
        shown = _names(sites)
        if not ways:
            rows.append((shown, what, kernel, "", "0", "never called"))
        for (provider, why, is_compiled), number in ways.items():
            calls = "compiled" if is_compiled else f"{number:,}"
            if joined[provider] and not is_compiled:
                why = f"{joined[provider]:,} of them found x in FP8 already"
            rows.append((shown, what, kernel, provider, calls, why))
    columns = (
        Column("site", "name"),
        Column("original", essential=False),
        Column("kernel"),
        Column("ran"),
        Column("calls", "right"),
        Column("why", "prose"),
    )
    return Table(columns, tuple(rows), terminal_rows=30)


def _table_of_skipped(report: SwapReport) -> Table:
    grouped: dict[tuple[str, str, str], list[SiteReport]] = {}
    for site in report.skipped:
        grouped.setdefault((site.kernel, site.what, site.skipped or ""), []).append(site)
    rows = tuple(
        (_names(sites), what, kernel, why) for (kernel, what, why), sites in grouped.items()
    )
    columns = (
        Column("left alone", "name"),
        Column("code", essential=False),
        Column("kernel"),
        Column("why", "prose"),
    )
    return Table(columns, rows, terminal_rows=30)


def _grouped(sites: Iterable[SiteReport]) -> dict[tuple[str, str], list[SiteReport]]:
    found: dict[tuple[str, str], list[SiteReport]] = {}
    for site in sites:
        found.setdefault((site.kernel, site.what), []).append(site)
    return found


def _names(sites: list[SiteReport]) -> str:
    """Return one name for sites that differ in numbers only, and how many they are."""
    patterns = Counter(_pattern(site.name) for site in sites)
    shown = [f"{name} ({n})" if n > 1 else name for name, n in patterns.items()]
    rest = len(shown) - MOST_NAMES
    return ", ".join(shown[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


ALONE = "Each kernel alone, against the workload as it is."
TOGETHER = (
    "Each kernel beside the others, against the step with the others alone; another provider, "
    "against the one in the swap of all."
)
NOT_MEASURED = (Column("not measured", "prose"), Column("why", "prose"))


def section_of_choice(choice: Choice, measured: float | None) -> Section:
    """Return what `--swap auto` tried, and the result beside its prediction.

    Args:
        choice: What was tried.
        measured: Step time of B over that of A in the comparison; None: unknown.
    """
    by_findings = choice.predicted_by_findings()
    items = [
        (
            "chosen",
            ", ".join(choice.names) or "none",
            "of each kernel the fastest that pays and passes the gate",
        ),
        (
            "by the findings",
            MISSING if by_findings is None else _interval(*by_findings),
            choice.why_no_findings or "step time, if single savings add up",
        ),
        ("by the choice", _change(choice.predicted), "step time, if gains multiply"),
        ("measured", MISSING if measured is None else _change(measured), "in new samples"),
    ]
    parts: list[Facts | Table] = [Facts(tuple(items))]
    joint = choice.joint
    is_joined = joint is not None and joint.is_faster
    if joint is not None and joint.ratio is not None:
        ends = _interval(joint.low or joint.ratio, joint.high or joint.ratio)
        told = f"{_change(joint.ratio)}, {ends}"
        parts[0] = Facts((*items[:-1], ("all together", told, "step time, 90 %"), items[-1]))
    if choice.findings:
        parts.append(_table_of_findings(choice))
    timed = tuple(_row_of(one, choice) for one in choice.tried if one.ratio is not None)
    if timed:
        columns = (
            Column("kernel"),
            Column("by"),
            Column("step time", "right"),
            Column("90 % interval", "right"),
            Column("windows", "right", essential=False),
            Column("outcome", "prose"),
        )
        caption = TOGETHER if is_joined else ALONE
        parts.append(Table(columns, timed, caption=caption, terminal_rows=30))
    reasons: dict[str, list[str]] = {}
    for one in choice.tried:
        if one.ratio is None:
            why = one.why or "too few windows"
            if one.name in choice.names:
                why = "chosen with the others: no time to try the step without it"
            reasons.setdefault(why, []).append(one.name)
    if reasons:
        rows = tuple((", ".join(names), why) for why, names in reasons.items())
        parts.append(Table(NOT_MEASURED, rows, terminal_rows=30))
    return Section("Choice of kernels", ORDER, tuple(parts))


def _table_of_findings(choice: Choice) -> Table:
    """Return what findings predicted for each kernel, and what it did alone."""
    rows = []
    for one in choice.findings:
        known = one.low is not None and one.high is not None
        predicted = _interval(one.low or 0.0, one.high or 0.0) if known else UNKNOWN
        tried = choice.best_of(one.kernel)
        if tried is None or tried.ratio is None:
            of_kernel = (t for t in choice.tried if t.name.partition("=")[0] == one.kernel)
            why = next((t.why for t in of_kernel if t.why), "too few windows")
            rows.append((one.kernel, predicted, MISSING, MISSING, why))
            continue
        ends = _interval(tried.low or tried.ratio, tried.high or tried.ratio)
        verdict = {True: "as predicted", False: "outside of the prediction", None: ""}
        rows.append(
            (one.kernel, predicted, _change(tried.ratio), ends, verdict[one.holds(tried.ratio)])
        )
    columns = (
        Column("finding"),
        Column("predicted", "right"),
        Column("alone", "right"),
        Column("90 % interval", "right"),
        Column("outcome", "prose"),
    )
    caption = "Step time with each kernel that a finding recommends: predicted, and measured alone."
    return Table(columns, tuple(rows), caption=caption, terminal_rows=30)


def _interval(low: float, high: float) -> str:
    return f"{_change(low)} to {_change(high)}"


def _row_of(one: Tried, choice: Choice) -> tuple[str, ...]:
    assert one.ratio is not None
    assert one.low is not None
    assert one.high is not None
    outcome = "slower" if one.is_slower else "not faster for sure"
    if one.name in choice.names:
        outcome = "chosen"
    elif not one.may_be_chosen and one.pays:
        outcome = f"left out: it {one.gate}"
    elif one.pays:
        outcome = "another provider is faster"
    elif one.instead_of and not one.is_slower:
        outcome = f"not faster for sure than {one.instead_of}"
    elif one.instead_of:
        outcome = f"slower than {one.instead_of}"
    kernel, _, provider = one.name.partition("=")
    return (
        kernel,
        provider,
        _change(one.ratio),
        _interval(one.low, one.high),
        str(one.num_windows),
        outcome,
    )


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
