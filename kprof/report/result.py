"""The machine-readable result: what `kprof open --json` prints and `summary.json` holds."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median

import pandas as pd

from kprof.analyze.ledger import Ledger, truth_columns
from kprof.analyze.summary import group_kernels, group_modules, split_window
from kprof.analyze.utilisation import Share, measure_utilisation, share_of_time
from kprof.trace import Recording, Trace

SCHEMA = 1
NUM_TOP = 20


def result_of(trace: Trace, ledger: Ledger) -> dict[str, object]:
    """Return the result as plain data; times in ns, shares of one, unknown as None."""
    utilisation = measure_utilisation(trace)
    return {
        "schema": SCHEMA,
        "source": trace.meta.source,
        "command": list(trace.meta.command),
        "gpus": [asdict(gpu) for gpu in trace.meta.gpus],
        "versions": trace.meta.versions,
        "num_ranks": trace.meta.num_ranks,
        "ceilings": asdict(trace.meta.device) if trace.meta.device else None,
        "recording": _recording(trace.meta.recording),
        "ledger": truth_columns(trace, ledger) | {"buckets": ledger.buckets},
        "utilisation": {
            "mfu": _share(utilisation.mfu),
            "mbu": _share(utilisation.mbu),
            "roofline_share": _share(utilisation.roofline),
            "busy_share": _share(utilisation.busy),
        },
        "coverage": _coverage(trace),
        "time": _records(split_window(trace)),
        "kernels": _records(group_kernels(trace.kernels, ["name", "kind", "dtype"]).head(NUM_TOP)),
        "modules": _records(group_modules(trace.kernels).head(NUM_TOP)),
        "caveats": list(trace.meta.caveats),
    }


def _share(share: Share) -> dict[str, object]:
    return asdict(share)


def _recording(recording: Recording | None) -> dict[str, object] | None:
    if recording is None:
        return None
    recorded, unrecorded = recording.recorded_step_ns, recording.unrecorded_step_ns
    overhead = median(recorded) / median(unrecorded) - 1 if recorded and unrecorded else None
    return {**asdict(recording), "overhead": overhead}


def _coverage(trace: Trace) -> dict[str, object]:
    """Return how much of the device time has a work model, and the largest names without one."""
    kernels = trace.kernels
    is_modelled = kernels["bytes"].notna() | kernels["flops"].notna()
    without = group_kernels(kernels[~is_modelled.to_numpy()], ["name"]).head(NUM_TOP)
    attributed = (kernels["bucket"] == "attributed").to_numpy()
    return {
        "modelled_share": share_of_time(kernels, is_modelled),
        "modelled_share_of_attributed": share_of_time(kernels[attributed], is_modelled[attributed])
        if attributed.any()
        else None,
        "largest_unmodelled": _records(without[["name", "calls", "time_ns"]]),
    }


def _records(table: pd.DataFrame) -> list[dict[str, object]]:
    plain = table.astype(object).where(table.notna(), None)
    return [dict(zip(plain.columns, row, strict=True)) for row in plain.to_numpy().tolist()]
