"""What hardware counters say of a launch: its traffic, and how busy memory and arithmetic were.

Counters see all traffic of a kernel that ran alone: what it read twice counts twice, and what
stayed in a cache does not count. So they tell what bounds a kernel, and no least bytes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

NOT_COUNTED = -1


def is_counted(kernels: pd.DataFrame) -> np.ndarray:
    """Tell which rows counters say anything of."""
    has_share = kernels["dram_percent"].notna() | kernels["sm_percent"].notna()
    return np.asarray(has_share.to_numpy(bool) | (counted_bytes(kernels) != NOT_COUNTED))


def counted_bytes(kernels: pd.DataFrame) -> np.ndarray:
    """Return the traffic of each row with the device's memory, -1 where it was not counted."""
    read, written = (
        kernels[f"dram_{way}_bytes"].to_numpy(np.int64, na_value=NOT_COUNTED)
        for way in ("read", "written")
    )
    is_known = (read != NOT_COUNTED) & (written != NOT_COUNTED)
    return np.asarray(np.where(is_known, read + written, NOT_COUNTED))


def counted_shares(kernels: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of their peaks that memory and arithmetic reached, NaN where not counted.

    Arithmetic is the busier of the SMs and the tensor cores; the latter are not always counted.
    """
    memory, sm, tensor = (
        kernels[f"{unit}_percent"].to_numpy(np.float64) / 100 for unit in ("dram", "sm", "tensor")
    )
    return memory, np.fmax(sm, np.where(np.isnan(sm), np.nan, tensor))
