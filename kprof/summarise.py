"""What a path holds, recognised by its saved form, in short enough to be kept in an engagement."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from kprof.analyze.calibration.result import Calibration
from kprof.analyze.cost.of_findings import with_worth
from kprof.analyze.unexplained import RULE as UNEXPLAINED
from kprof.benched import KEYS as BENCH_KEYS
from kprof.comparison import FILE as COMPARISON_FILE
from kprof.comparison import read
from kprof.engagement import (
    ALL_FINDINGS,
    ALL_SWAPS,
    AnyContent,
    BenchAdded,
    CalibrationAdded,
    ComparisonAdded,
    CostAdded,
    GateAdded,
    Predicted,
    RunAdded,
    ServiceLevelAdded,
    Source,
    TimeSpent,
    When,
)
from kprof.errors import KprofError
from kprof.finding import Diagnosis, Finding, Saving
from kprof.quotes import read_prices
from kprof.saved import FINDINGS_FILE, is_saved, load
from kprof.trace import SCHEMA, Prediction, Trace

BLOCK_BYTES = 1 << 20
LARGEST_BYTES = 1 << 26
KNOWN = (
    "a run (folder of kprof run), a comparison (folder of kprof ab), or the output of "
    "kprof sla, cost, ab, selftest, kernels check or kernels bench with --json, in a file"
)


@dataclass(frozen=True)
class Recognised:
    """What a path holds, and the name and hash of what was read."""

    content: AnyContent
    source: Source
    besides: tuple[AnyContent, ...] = ()
    """What stands in the same file: how A and B of a comparison keep targets, and what B costs."""


def recognise(path: Path, when: When) -> Recognised:
    """Read a run, a comparison, or the JSON of another command, and shorten it.

    Raises:
        KprofError: it is none of these, or damaged.
    """
    name = path.absolute().resolve().name
    if path.is_dir() and (path / COMPARISON_FILE).is_file():
        return _of_json(path / COMPARISON_FILE, name, when)
    if path.is_dir() and is_saved(path):
        run = with_worth(load(path), read_prices())
        return Recognised(_of_run(run, path, when), Source(name, _hash_of_run(path)))
    if path.is_file():
        return _of_json(path, name, when)
    if not path.exists():
        raise KprofError(f"{path} does not exist", fix=f"name {KNOWN}")
    raise KprofError(
        f"{path} is neither an analyzed run nor a complete comparison",
        fix=f"analyze a trace with kprof open first; otherwise name {KNOWN}",
    )


def _of_json(path: Path, name: str, when: When) -> Recognised:
    if path.stat().st_size > LARGEST_BYTES:
        fix = "analyze a trace with kprof open, and name the run"
        raise KprofError(f"{path} is too large for the result of a command", fix=fix)
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content)
    except (OSError, msgspec.DecodeError) as error:
        raise KprofError(f"{path} cannot be read: {error}", fix=f"name {KNOWN}") from error
    try:
        contents = tuple(_contents(found, when))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise KprofError(f"{path} cannot be used: {error}", fix="write it again") from error
    if not contents:
        raise KprofError(f"{path} holds nothing that kprof saves or prints", fix=f"name {KNOWN}")
    return Recognised(contents[0], Source(name, hashlib.sha256(content).hexdigest()), contents[1:])


def _contents(found: Any, when: When) -> Iterator[AnyContent]:  # noqa: ANN401 - any JSON
    """Yield what the JSON of a command says; nothing where it is not known."""
    keys = found.keys() if isinstance(found, dict) else set()
    reports = found if isinstance(found, list) else [found]
    if keys >= {"plan", "pairs", "claims"}:
        yield _of_comparison(found)
        yield from _besides(found)
    elif keys >= {"percentiles", "targets", "verdict"}:
        yield _of_service_level(found, when)
    elif keys >= {"figures", "as_of", "missing"}:
        yield _of_cost(found, when)
    elif keys >= {"scenarios", "num_comparisons"}:
        msgspec.convert(found, type=Calibration)
        yield CalibrationAdded(found)
    elif reports and all(isinstance(one, dict) and one.keys() >= _OF_GATE for one in reports):
        yield _of_gate(reports)
    elif reports and all(isinstance(one, dict) and one.keys() >= BENCH_KEYS for one in reports):
        benched = BenchAdded(tuple(reports))
        _require(benched.calls)
        yield benched


def _of_comparison(found: dict[str, Any]) -> ComparisonAdded:
    comparison = replace(read(found), steps_ns={})
    return ComparisonAdded(comparison, str(found.get("calibration", "")))


def _besides(found: dict[str, Any]) -> Iterator[AnyContent]:
    """Yield what `kprof ab --json` tells of targets and costs, where it was asked for them."""
    arms: dict[str, When] = {"A": "before", "B": "after"}
    for arm, level in (found.get("targets") or {}).items():
        yield _of_service_level(level, arms[arm])
    if found.get("costs") is not None:
        yield _of_cost(found["costs"], "after")


def _of_service_level(found: dict[str, Any], when: When) -> ServiceLevelAdded:
    level = ServiceLevelAdded(when, found)
    _require(level.targets)
    return level


def _of_cost(found: dict[str, Any], when: When) -> CostAdded:
    cost = CostAdded(when, found)
    _require(cost.figures)
    return cost


_OF_GATE = {"subject", "levels", "asked"}


def _of_gate(reports: list[dict[str, Any]]) -> GateAdded:
    gate = GateAdded(tuple(reports))
    _require(gate.subjects)
    return gate


def _require(told: Sized) -> None:
    """Refuse an answer without content; that it can be read was seen in reading it."""
    if not told:
        raise ValueError("nothing follows from it")


def _of_run(trace: Trace, path: Path, when: When) -> RunAdded:
    from kprof.analyze.steps import time_steps
    from kprof.analyze.summary import split_window
    from kprof.analyze.utilisation import measure_utilisation

    if trace.diagnosis is None:
        raise KprofError(
            f"{path} was analyzed before there were findings, so it predicts nothing",
            fix=f"analyze it again: kprof open --force {path}",
        )
    times = time_steps(trace)
    shares = measure_utilisation(trace)
    spent = split_window(trace)
    time = msgspec.convert(
        spent.astype(object).where(spent.notna(), None).to_dict("records"),
        type=tuple[TimeSpent, ...],
        strict=False,
    )
    return RunAdded(
        when,
        trace.meta.command_line,
        tuple(dict.fromkeys(gpu.name for gpu in trace.gpus)),
        trace.meta.versions,
        _median(times.recorded_ns),
        _median(times.unrecorded_ns),
        len(times.recorded_ns),
        sum(one.time_ns for one in time),
        time,
        {
            "mfu": shares.mfu.value,
            "mbu": shares.mbu.value,
            "roofline": shares.roofline.value,
            "busy": shares.busy.value,
        },
        tuple(_predictions(trace.diagnosis, trace.meta.what_if)),
        trace.meta.caveats,
    )


def _median(steps_ns: Sequence[int]) -> int | None:
    return round(median(steps_ns)) if steps_ns else None


def _predictions(diagnosis: Diagnosis, what_if: tuple[Prediction, ...]) -> Iterator[Predicted]:
    """Yield what every finding, all of them together, and every what-if question predict."""
    names: dict[str, int] = {}
    known = [one for one in diagnosis.findings if one.rule != UNEXPLAINED]
    for finding in known:
        number = names[finding.rule] = names.get(finding.rule, 0) + 1
        yield _of_finding(finding, f"{finding.rule}-{number}" if number > 1 else finding.rule)
    if diagnosis.together is not None and len(known) > 1:
        saving = diagnosis.together
        yield Predicted(
            ALL_FINDINGS,
            "all findings",
            f"All {len(known)} findings fixed together",
            *_interval(saving),
            worth=saving.worth,
        )
    if diagnosis.swapped is not None:
        kernels = dict.fromkeys(one.swap for one in diagnosis.findings if one.swap)
        claim = f"What {len(kernels)} kernels would take over, swapped in together"
        saving = diagnosis.swapped
        yield Predicted(
            ALL_SWAPS,
            "finding",
            claim,
            *_interval(saving),
            swap=",".join(kernels),
            worth=saving.worth,
        )
    for asked in what_if:
        if asked.predicted_step_ns is not None:
            yield _of_question(asked, asked.predicted_step_ns)


def _interval(saving: Saving) -> tuple[int, int | None, int | None, str]:
    return saving.step_ns, saving.low_ns, saving.high_ns, saving.basis


def _of_finding(finding: Finding, name: str) -> Predicted:
    saving = finding.saving or Saving(0, None, None, "no saving was predicted")
    return Predicted(
        name,
        "finding",
        finding.claim,
        *_interval(saving),
        finding.confidence,
        finding.effort,
        finding.swap or "",
        finding.command,
        saving.worth,
    )


def _of_question(asked: Prediction, predicted_step_ns: int) -> Predicted:
    missed = asked.uncertainty_ns or 0
    # Runs of earlier versions have no readings of their own.
    shortest, longest = (
        predicted_step_ns + sign * missed if told is None else told
        for sign, told in ((-1, asked.shortest_step_ns), (1, asked.longest_step_ns))
    )
    what = f"{asked.target} {asked.change}"
    basis = (
        "the recording replayed with this change, under every reading of what it does not hold, "
        "widened by the replay's error and by how the host's time varies"
    )
    least, most = asked.step_ns - longest, min(asked.step_ns - shortest, asked.step_ns)
    return Predicted(what, "what-if", what, asked.step_ns, least, most, basis)


def find_source(source: Source, folder: Path) -> Path | None:
    """Return a run that an engagement summarises, where it lies beside its folder, in it or here.

    None: nothing of that name is there, or it is not the same any more.
    """
    for place in (folder.absolute().parent, folder, Path.cwd()):
        path = place / source.name
        if is_saved(path) and _hash_of_run(path) == source.sha256:
            return path
    return None


def _hash_of_run(path: Path) -> str:
    """Return a hash of the tables and findings; answers that a run is asked for later are none."""
    whole = hashlib.sha256()
    for name in sorted([*(f"{table}.parquet" for table in SCHEMA), FINDINGS_FILE]):
        digest = hashlib.sha256()
        with (path / name).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        whole.update(f"{name} {digest.hexdigest()}\n".encode())
    return whole.hexdigest()
