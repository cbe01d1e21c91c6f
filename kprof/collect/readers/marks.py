"""Names of the ranges that kprof's recorder makes, in traces of any tool."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

# A step has a number of at most 18 digits, which an int64 holds; anything else is a name.
_STEP = re.compile(r"kprof\.step#([0-9]{1,18})")
_STEP_OF_TORCH = re.compile(r"ProfilerStep#[0-9]{1,18}")
_PART = re.compile(r"kprof\.(phase|module|capture|graph)#(.+)", re.DOTALL)


def mark_in(text: str) -> tuple[str, str] | None:
    """Return kind and name of a range that kprof's recorder made; None for others.

    A step of torch's own schedule is marked, too, and keeps its whole name.
    """
    if step := _STEP.fullmatch(text):
        return "step", step[1]
    if _STEP_OF_TORCH.fullmatch(text):
        return "step", text
    if part := _PART.fullmatch(text):
        return part[1], part[2]
    return None


def is_own_step(ranges: pd.DataFrame) -> np.ndarray:
    """Tell which rows are steps that kprof's recorder marked, and not torch's profiler."""
    name = ranges["name"].cat
    is_number = np.append(
        np.asarray(name.categories.astype(str).str.isdecimal(), dtype=bool), False
    )
    is_step = (ranges["kind"] == "step").to_numpy(bool)
    return np.asarray(is_step & is_number[name.codes.to_numpy()])
