"""What was counted of launches, as columns of `kernels`."""

from __future__ import annotations

import pandas as pd

from kprof.collect.readers._ncu.launches import PERCENTS, Launch


def counted_columns(launches: list[Launch]) -> dict[str, pd.Series]:
    """Return a column for each quantity, with a row for each launch."""
    whole = {
        "counted_ns": [launch.duration_ns for launch in launches],
        "dram_read_bytes": [launch.dram_read_bytes for launch in launches],
        "dram_written_bytes": [launch.dram_written_bytes for launch in launches],
        "registers": [launch.registers for launch in launches],
    }
    names = (*PERCENTS, "tensor_percent")
    percents = {name: [launch.percent(name) for launch in launches] for name in names}
    return {
        **{name: pd.Series(values, dtype="Int64") for name, values in whole.items()},
        **{name: pd.Series(values, dtype="float64") for name, values in percents.items()},
    }
