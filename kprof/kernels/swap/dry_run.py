"""Dry run: which calls of one step kernels would take, and why not the others.

After the recording, `kprof run` loads this module in the workload. For one step all kernels are
swapped in as in a swap, but every call runs the original: no kernel is compiled or launched. So
the workload's results are bit for bit as without it. The findings read the table.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C import _disabled_torch_function_impl
from torch.nn import Module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kprof.findings import NOT_CALLED, DryRun, DryRunRow
from kprof.kernels.swap.providers import WITH_SITES, DryProviders
from kprof.kernels.swap.sites.function_calls import OF_PROCESS
from kprof.kernels.swap.swap_report import SiteReport, SwapError
from kprof.kernels.swap.swapping import Swap, all_roots, is_any_on

# No finding names them. They change the forward of a layer, which other kernels use.
NOT_ASKED = {"add_rmsnorm", "add_layernorm"}
# Longest search for call sites in CPU time, which holds up the workload: thousands of norms take
# seconds.
MOST_S = 1.0
CUT = f"the search for call sites was ended after {MOST_S:g} s"


class Watch:
    """A dry run under way."""

    def __init__(self, path: Path, began_ns: int) -> None:
        """Find the call sites of this process, and watch their calls from here on."""
        self._path = path
        self._kernels = sorted(WITH_SITES - NOT_ASKED)
        self._swap = Swap(None, self._kernels, providers=DryProviders, most_s=MOST_S)

        self._swap.__enter__()
        self._took_ns = time.perf_counter_ns() - began_ns

    def end(self) -> None:
        """Restore the workload, and write the table."""
        began_ns = time.perf_counter_ns()
        if self._swap.is_on:
            self._swap.__exit__(None, None, None)
        rows = tuple(rows_of(self._swap.sites))
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        took_ns = self._took_ns + time.perf_counter_ns() - began_ns
        found = DryRun(tuple(self._kernels), rows, took_ns=took_ns)
        if self._swap.is_cut:
            # What has sites is known by those; for the others, the search says nothing.
            known = tuple(one for one in self._kernels if any(row.kernel == one for row in rows))
            found = replace(found, kernels=known, why_others=CUT)
        partial.write_text(json.dumps(asdict(found)))
        partial.replace(self._path)


def rows_of(sites: tuple[SiteReport, ...]) -> Iterator[DryRunRow]:
    """Yield the table of these sites: alike outcomes of a kernel in one row, most sites first."""
    num_sites: Counter[tuple[str, str | None, str]] = Counter()
    num_calls: Counter[tuple[str, str | None, str]] = Counter()
    for site in sites:
        if site.skipped is not None:
            num_sites[site.kernel, None, site.skipped] += 1
        elif not site.calls and site.name != OF_PROCESS:
            num_sites[site.kernel, None, NOT_CALLED] += 1
        for calls in site.calls:
            outcome = (site.kernel, calls.provider, calls.why or "")
            num_sites[outcome] += 1
            num_calls[outcome] += calls.num_calls
    for outcome, number in num_sites.most_common():
        kernel, provider, why = outcome
        yield DryRunRow(kernel, provider, why, number, num_calls[outcome])


def begin(path: str, began_ns: int | None = None) -> Watch:
    """Begin a dry run of all kernels in this process, whose table goes to `path`.

    Args:
        path: Of the table.
        began_ns: When this began to hold up the workload, by `time.perf_counter_ns`; None: now.

    Raises:
        SwapError: the workload's own code would see it.
    """
    began_ns = time.perf_counter_ns() if began_ns is None else began_ns
    why = why_seen()
    if why:
        raise SwapError(why, fix="see what a swap does: kprof ab --swap auto SCRIPT")
    return Watch(Path(path), began_ns)


def why_seen() -> str:
    """Return which code of the workload would see operations of a dry run; empty: none."""
    if is_any_on():
        return "the workload swaps kernels in by itself"
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    others = [one for one in modes if not isinstance(one, DeviceContext)]
    if others:
        return f"{type(others[0]).__name__} sees every operation of torch"
    for root in all_roots():
        weights = root.parameters() if isinstance(root, Module) else ()
        for one in weights:
            if not _is_unseen(type(one)):
                return f"{type(one).__name__}, a tensor, sees every operation of its own"
    return ""


def _is_unseen(cls: Any) -> bool:
    """Return whether the functions of torch on tensors of a class run no code of its own."""
    own = cls.__torch_function__
    is_plain = getattr(own, "__func__", own) is Tensor.__torch_function__.__func__
    return is_plain or own is _disabled_torch_function_impl
