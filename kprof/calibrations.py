"""Calibrations that this machine has made, and the sentence that stands on every comparison."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kprof.analyze.calibration.result import SCHEMA, Calibration
from kprof.cache import cache_folder
from kprof.collect.machine import Machine, this_host, this_machine
from kprof.comparison import Plan
from kprof.report.calibration import badge_of, describe, result_of_calibration
from kprof.report.section import Part, Text

UNKNOWN = "How often such verdicts err on this machine is not known yet: run kprof selftest."


def describe_calibration(found: Calibration | None) -> str:
    """Return the sentence on how often verdicts err on this machine, for the reports."""
    return UNKNOWN if found is None else describe(found)


def parts_of_calibration(found: Calibration | None) -> tuple[Part, ...]:
    """Return what stands of it beside a verdict."""
    if found is None:
        return (Text(UNKNOWN, "warning"),)
    return (badge_of(found), Text(describe(found), "muted"))


def doubt_resolution(found: Calibration | None, plan: Plan) -> str:
    """Say where this machine cannot see the least effect that matters; nothing where it can."""
    if found is None or found.device != this_machine().name:
        return ""
    least = found.least_found
    if least is None or least <= plan.smallest_effect:
        return ""
    return (
        f"On this machine {found.num_pairs} pairs find only differences from {100 * least:.2g} % "
        f"on, and {100 * plan.smallest_effect:g} % is what matters: smaller ones mostly end "
        "INCONCLUSIVE."
    )


def last_calibration() -> Calibration | None:
    """Return the latest calibration of this GPU and driver, else of this host, else None."""
    return _read(this_machine()) or _read(this_host())


def _read(machine: Machine) -> Calibration | None:
    path = _path_for(machine)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration) if path else None
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found is not None and found.schema == SCHEMA else None


def json_of(calibration: Calibration) -> bytes:
    """Return the calibration as indented JSON, the worst rates on top."""
    return msgspec.json.format(msgspec.json.encode(result_of_calibration(calibration)))


def keep(calibration: Calibration, *, is_complete: bool = True) -> Path | None:
    """Keep a calibration for later reports, or beside it one that is not complete yet.

    Return where; None without a home folder, or where nothing can be written.
    """
    machine = Machine(calibration.kind, calibration.device, calibration.driver)  # type: ignore[arg-type]
    path = _path_for(machine)
    if path is None:
        return None
    unfinished = path.with_suffix(".unfinished.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
        partial.replace(path if is_complete else unfinished)
        if is_complete:
            unfinished.unlink(missing_ok=True)
    except OSError:
        return None
    return path if is_complete else unfinished


def _path_for(machine: Machine) -> Path | None:
    folder = cache_folder()
    text = f"{machine.name} {machine.driver or ''}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-").lower()
    return folder / "calibration" / f"{name}.json" if folder else None
