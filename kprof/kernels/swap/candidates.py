"""Candidates of `--swap auto`: swaps of one kernel each, entered one after the other.

`kprof ab` times windows of the workload with and without the patch `next_candidate`. Each entry
swaps the next candidate in; a log says when which of them was in, and what it replaced. Beside the
log, `kprof ab` writes the names of candidates that need no more windows.

The first entry of a candidate is not timed: its kernels are compiled there. It records the sorts of
calls, for the correctness gate, and looks whether results are numbers. Then two candidates take
turns until both may be judged, and the next two follow: a workload of long steps, which has not
enough windows for all, has them for some.

With several ranks, rank 0 decides whose turn it is, and writes it behind the number of the entry.
The others read the line of theirs: all swap the same kernel in at the same step.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from kprof.errors import KprofError
from kprof.kernels import OURS, Kernel, Provider, kernel_named
from kprof.kernels.swap.providers import WITH_SITES, Chosen, Providers
from kprof.kernels.swap.swap_report import DECIDED, FIRST_LOOK, TURNS, CallSort, SwapReport
from kprof.kernels.swap.swapping import Swap, all_roots


def candidate_names() -> list[str]:
    """Return KERNEL=PROVIDER of all kernels that keep the precision, by kprof and by torch.

    Torch's come last. Providers whose results differ from run to run are left out.
    """
    found = []
    for name in sorted(WITH_SITES):
        kernel = kernel_named(name)
        if kernel.stated_error is None:
            found += [f"{name}={one.name}" for one in kernel.providers if _is_candidate(one)]
    return sorted(found, key=lambda name: name.endswith(f"={ATEN}"))


def _is_candidate(provider: Provider) -> bool:
    return provider.repeats and (provider.distribution == OURS or provider.name == ATEN)


# Candidates that take turns. One alone would have one window in three for nothing: two differences
# of a candidate share no window.
TAKING_TURNS = 2
# Torch's own fused operator.
ATEN = "aten"
NO_NUMBERS = "its results are no numbers where its inputs are"
NO_WEIGHTS = "weights became NaN or infinite with it"


class WatchedProviders(Providers):
    """Chooses as `Providers` does, records the sorts of calls, and looks at their first results."""

    def __init__(self, kernels: Mapping[str, Kernel], forced: Mapping[str, str]) -> None:
        super().__init__(kernels, forced)
        self.is_on = False
        """Whether calls are the workload's; sites try the kernel on random rows before."""
        self.sorts: dict[CallSort, None] = {}
        self.problem = ""
        """What is wrong with results; empty: nothing was seen."""

    def choose(
        self,
        kernel: Kernel,
        x: Tensor,
        shape: tuple[int, ...],
        *,
        is_default: bool,
        arguments: tuple[Any, ...] | None = None,
    ) -> Chosen:
        """Return the function, with a look at the results of its first call."""
        function, provider, why = super().choose(
            kernel, x, shape, is_default=is_default, arguments=arguments
        )
        if function is None or not self.is_on:
            return function, provider, why
        dtype = str(x.dtype).removeprefix("torch.")
        sort = CallSort(tuple(shape), dtype, torch.is_grad_enabled(), layout_of(x))
        self.sorts[sort] = None
        return self._watching(function), provider, why

    def _watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        is_seen = False

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal is_seen
            result = function(*arguments)
            if not is_seen and not _is_captured():
                is_seen = True
                if are_numbers(arguments) and not are_numbers(_tensors_of(result)):
                    self.problem = NO_NUMBERS
            return result

        return call


def layout_of(x: Tensor) -> str:
    """Return how a tensor lies in memory, as the correctness gate names it."""
    if x.is_contiguous():
        return "contiguous"
    return "strided" if x.dim() and x.stride(-1) != 1 else "padded"


def _tensors_of(result: object) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def are_numbers(values: Iterable[object]) -> bool:
    """Return whether no tensor of floating-point numbers has NaN or infinity; waits for a GPU."""
    floats = [one.detach() for one in values if isinstance(one, Tensor) and one.numel()]
    floats = [one for one in floats if one.is_floating_point()]
    # Extremes take no memory, unlike a test of each element. NaN is the largest and the smallest.
    return all(
        math.isfinite(end) for one in floats for end in (float(one.amax()), float(one.amin()))
    )


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Candidates:
    """The candidates of a process, and whose turn it is."""

    def __init__(self, names: list[str], log: Path) -> None:
        self._swaps: dict[str, Swap | None] = dict.fromkeys(names)
        self._log, self._decided = log, log.with_suffix(DECIDED)
        self._turns = log.with_suffix(TURNS)
        self._num_entered: Counter[str] = Counter()
        self._last: str | None = None
        self._num_entries = 0
        self._is_alone = _world_size() == 1
        self._models: list[weakref.ref[Module]] | None = None
        self._had_numbers = True
        self._num_before: Counter[str] = Counter()

    def enter_next(self) -> tuple[str, Swap] | None:
        """Swap in the candidate whose turn it is; None: none is left."""
        swap = name = None
        while swap is None and (name := self._next()) is not None:
            swap = self._enter(name)
        if not self._is_alone:
            line = {"entry": self._num_entries, "name": name}
            with self._turns.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._num_entries += 1
        return None if swap is None or name is None else (name, swap)

    def leave(self, name: str, swap: Swap) -> None:
        """Swap a candidate out; one that replaced no call, or spoils results, never comes again."""
        swap.__exit__(None, None, None)
        report, providers = swap.report, swap.providers
        num_calls = sum(one.num_replaced for one in report.sites)
        num_compiled = sum(1 for one in report.replaced if any(c.is_compiled for c in one.calls))
        told = {"num_calls": self._num_before[name] + num_calls, "num_compiled": num_compiled}
        watched = providers if isinstance(providers, WatchedProviders) else None
        sorts = [] if watched is None else [asdict(one) for one in watched.sorts]
        self._tell("leave", name, **told, sorts=sorts)
        if self._had_numbers and not self._have_numbers():
            self._drop(name, NO_WEIGHTS, is_spoilt=True)
        elif watched is not None and watched.problem:
            self._drop(name, watched.problem, is_spoilt=True)
        elif not told["num_calls"] and not num_compiled:
            self._drop(name, _why_none(report))
        elif watched is not None and not num_compiled:
            # From here on without a look at results, which would be timed. What is compiled has
            # none, and would be compiled anew.
            self._num_before[name] = num_calls
            self._swaps[name] = Swap(None, [name], like=swap)

    def _next(self) -> str | None:
        decided = self._decided.read_text().split() if self._decided.exists() else ()
        left = [name for name in self._swaps if name not in decided]
        if not left:
            return None
        # The first entry is a round of its own.
        rounds = {name: -(-self._num_entered[name] // FIRST_LOOK) for name in left}
        behind = [name for name in left if rounds[name] == min(rounds.values())]
        others = [name for name in behind[:TAKING_TURNS] if name != self._last]
        name = self._last = (others or behind)[0]
        self._num_entered[name] += 1
        return name

    def _enter(self, name: str) -> Swap | None:
        """Swap a candidate in; None: it cannot run here, which is logged."""
        self._tell("enter", name)
        self._had_numbers = self._have_numbers()
        try:
            swap = self._swaps[name] or Swap(None, [name], providers=WatchedProviders)
            swap.__enter__()
        except KprofError as error:
            self._drop(name, error.problem)
            return None
        if isinstance(swap.providers, WatchedProviders):
            swap.providers.is_on = True
        if not swap.replaced:
            swap.__exit__(None, None, None)
            self._drop(name, _why_none(swap.report))
            return None
        self._swaps[name] = swap
        return swap

    def _drop(self, name: str, why: str, *, is_spoilt: bool = False) -> None:
        del self._swaps[name]
        self._tell("drop", name, why=why, is_spoilt=is_spoilt)

    def _have_numbers(self) -> bool:
        if self._models is None:
            found = [one for one in all_roots() if isinstance(one, Module)]
            self._models = [weakref.ref(one) for one in found]
        return _have_numbers([one for known in self._models if (one := known()) is not None])

    def _tell(self, event: str, name: str, **more: object) -> None:
        line = {"event": event, "name": name, "time_ns": time.time_ns(), **more}
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")


class _Followed:
    """The candidates of a rank that follows rank 0."""

    def __init__(self, log: Path) -> None:
        self._turns = log.with_suffix(TURNS)
        self._swaps: dict[str, Swap] = {}
        self._num_entries = 0

    def enter_next(self) -> tuple[str, Swap] | None:
        """Swap in what rank 0 swaps in at this entry; None: nothing, or it cannot run here."""
        name = self._name_of(self._num_entries)
        self._num_entries += 1
        if name is None:
            return None
        try:
            swap = self._swaps.get(name) or Swap(None, [name])
            swap.__enter__()
        except KprofError:
            # Rank 0 has entered it: this rank has another part of the model, and runs its own code.
            return None
        self._swaps[name] = swap
        return name, swap

    def leave(self, name: str, swap: Swap) -> None:
        """Swap a candidate out."""
        swap.__exit__(None, None, None)

    def _name_of(self, entry: int) -> str | None:
        """Return what rank 0 has decided for this entry.

        Raises:
            TimeoutError: rank 0 does not come to the same step.
        """
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            lines = self._turns.read_text().splitlines(True) if self._turns.exists() else []
            if len(lines) > entry and lines[entry].endswith("\n"):
                told = json.loads(lines[entry])
                assert told["entry"] == entry
                name: str | None = told["name"]
                return name
            time.sleep(LOOK_S)
        raise TimeoutError(f"rank 0 decided about no kernel within {PATIENCE_S:.0f} s")


# Rank 0 may try all candidates before it finds one that has a call.
PATIENCE_S = 300.0
LOOK_S = 0.001


def _have_numbers(models: Iterable[Module]) -> bool:
    """Return whether no weight of these models is NaN or infinite; waits for a GPU."""
    found: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for one in (weight for model in models for weight in model.parameters()):
        is_known = one.device.type in ("cpu", "cuda") and type(one.data) is Tensor
        if is_known and one.is_floating_point() and one.numel():
            found.setdefault((one.device, one.dtype), {})[id(one)] = one.detach()
    for tensors in found.values():
        norms = torch._foreach_norm(list(tensors.values()), math.inf)
        if not bool(torch.stack(norms).isfinite().all()):
            return False
    return True


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _why_none(report: SwapReport) -> str:
    """Return the most frequent reason why a swap replaced no call."""
    reasons: Counter[str] = Counter()
    for site in report.sites:
        if site.skipped is not None:
            reasons[site.skipped] += 1
        for calls in site.calls:
            reasons[calls.why or ""] += calls.num_calls
    return reasons.most_common(1)[0][0] if reasons else "no call site in this workload"


_of_logs: dict[str, _Candidates | _Followed] = {}


@contextmanager
def next_candidate(names: str, log: str) -> Iterator[None]:
    """Swap the next of these candidates in; after the last one the first comes again.

    Args:
        names: "KERNEL=PROVIDER,…"; empty: all of `candidate_names`.
        log: File of lines in JSON.
    """
    if log not in _of_logs:
        asked = names.split(",") if names else candidate_names()
        _of_logs[log] = _Followed(Path(log)) if _rank() else _Candidates(asked, Path(log))
    candidates = _of_logs[log]
    entered = candidates.enter_next()
    try:
        yield
    finally:
        if entered is not None:
            candidates.leave(*entered)
