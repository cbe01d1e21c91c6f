"""What a swap did, in a file: written in the workload, read where nobody needs torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import msgspec

from kprof.errors import KprofError
from kprof.kernels.swap.sites import SwapReport

# In the folder of a run, or of a comparison.
SWAP_REPORT = "swap.json"


class SwapError(KprofError):
    """A swap that cannot be made or taken back in this way."""


def write_report(report: SwapReport, path: Path) -> None:
    """Write a report as JSON, whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(asdict(report), indent=2))
    partial.replace(path)


def read_report(path: Path) -> SwapReport:
    """Read a report.

    Raises:
        SwapError: there is none, or the file is damaged.
    """
    try:
        report: SwapReport = msgspec.json.decode(path.read_bytes(), type=SwapReport)
        return report
    except (OSError, msgspec.MsgspecError) as error:
        raise SwapError(
            f"{path} is no report of a swap: {error}", fix="see whether the workload was swapped"
        ) from error
