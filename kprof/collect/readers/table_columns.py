"""Columns of a Trace's tables from arrays of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kprof.collect.readers.kineto.events import MISSING
from kprof.trace import NOT_RECORDED, Table, columns_of


def category(codes: NDArray[np.integer], texts: list[str]) -> pd.Categorical:
    """Return a categorical of the texts that occur; -1 is missing."""
    is_used = np.bincount(codes + 1, minlength=len(texts) + 1)[1:] > 0
    if not is_used.all():
        codes = np.append(np.cumsum(is_used) - 1, -1).astype(np.int32)[codes]
        texts = [text for text, used in zip(texts, is_used.tolist(), strict=True) if used]
    return pd.Categorical.from_codes(codes, categories=pd.Index(texts, dtype=str))


def nullable(values: NDArray[np.int64]) -> pd.arrays.IntegerArray:
    """Return whole numbers that are missing where they are `MISSING`."""
    return pd.arrays.IntegerArray(values, values == MISSING)


def places(numbers: Iterable[int | None]) -> NDArray[np.int64]:
    """Return devices or streams, `NOT_RECORDED` where None."""
    return np.array([NOT_RECORDED if one is None else one for one in numbers], dtype=np.int64)


def as_declared(table: Table, number: int, found: Mapping[str, object]) -> pd.DataFrame:
    """Return a table of so many rows with all that a reader adds; what was not found is missing."""
    columns = {
        column.name: found[column.name] if column.name in found else _missing(column.dtype, number)
        for column in columns_of(table, "reader")
    }
    frame: pd.DataFrame = pd.DataFrame(columns, copy=False)
    return frame


def _missing(dtype: str, number: int) -> object:
    """Return a column of so many missing values."""
    if dtype == "Int64":
        return pd.arrays.IntegerArray(np.ones(number, dtype=np.int64), np.ones(number, dtype=bool))
    if dtype == "category":
        return pd.Categorical.from_codes(np.full(number, -1), dtype=_no_category(number > 0))
    return pd.Series(index=range(number), dtype=dtype)


@cache
def _no_category(has_rows: bool) -> pd.CategoricalDtype:
    dtype = pd.Series(index=range(int(has_rows)), dtype="category").dtype
    assert isinstance(dtype, pd.CategoricalDtype)
    return dtype
