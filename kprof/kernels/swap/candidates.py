"""Candidates of `--swap auto`: swaps that are entered one after the other.

`kprof ab` times windows of the workload with and without the patch `next_candidate`. Each entry
swaps the next candidate in; a log says when which of them was in, and what it replaced. Beside the
log, `kprof ab` writes a plan: the candidates that need windows, and the base.

A candidate is KERNEL=PROVIDER, or several kernels, joined by commas. One without a provider gets
the fastest that was measured for each call, of those that `candidate_names` has. The base is a
candidate that is in wherever no other is: others are compared with it then.

The first entry of a candidate is not timed: its kernels are compiled there. It records the sorts of
calls, for the correctness gate, and looks whether results are numbers. From then on each kernel has
the provider that most of its calls had. Two candidates take turns until both may be judged, and the
next two follow: a workload of long steps, which has not enough windows for all, has them for some.

With several ranks, rank 0 decides whose turn it is, and writes it behind the number of the entry.
The others read the line of theirs: all swap the same kernels in at the same step.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Module

from kprof.errors import KprofError
from kprof.kernels import OURS, Kernel, Provider, kernel_named
from kprof.kernels.bench.choice import FALLBACK, ranking
from kprof.kernels.swap.providers import WITH_SITES, Chosen, Providers
from kprof.kernels.swap.swap_report import (
    FIRST_LOOK,
    NO_SITE,
    PLAN,
    TURNS,
    CallSort,
    Ran,
    SwapReport,
)
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
    """Chooses among candidates, records the sorts of calls, and looks at their first results."""

    def __init__(self, kernels: Mapping[str, Kernel], forced: Mapping[str, str]) -> None:
        self._kept = dict(forced)
        super().__init__(kernels, self._kept)
        self.is_on = False
        """Whether calls are the workload's; sites try the kernel on random rows before."""
        self.sorts: dict[str, dict[CallSort, None]] = {}
        """The calls of each kernel."""
        self.culprit = ""
        """The kernel with results that are no numbers; empty: none was seen."""

    def keep(self, ran: Mapping[str, str]) -> None:
        """Choose these providers from here on, by kernel, without a look at calls."""
        self._kept.update(ran)
        self.is_on = False

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
        self.sorts.setdefault(kernel.name, {})[sort] = None
        return self._watching(kernel.name, function), provider, why

    def _fastest(self, kernel: Kernel, x: Tensor, shape: tuple[int, ...]) -> str | None:
        """Return the fastest candidate that was measured, or that the original is; None: none."""
        choice = self._choice(kernel, x, shape)
        for one in ranking(choice.measured) if choice is not None else ():
            if one.provider == FALLBACK or _is_candidate(kernel.provider(one.provider)):
                return one.provider
        return None

    def _watching(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        is_seen = False

        @functools.wraps(function)
        def call(*arguments: Any) -> Any:
            nonlocal is_seen
            result = function(*arguments)
            if not is_seen and not _is_captured():
                is_seen = True
                if are_numbers(arguments) and not are_numbers(_tensors_of(result)):
                    self.culprit = name
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


class _Plan(msgspec.Struct):
    """The candidates that need windows, the first first, and the base; empty: none."""

    left: list[str]
    base: str = ""


class _Candidates:
    """The candidates of a process, and whose turn it is."""

    def __init__(self, names: list[str], log: Path) -> None:
        self._first = _Plan(names)
        self._log, self._plan = log, log.with_suffix(PLAN)
        self._turns = log.with_suffix(TURNS)
        self._swaps: dict[str, Swap] = {}
        self._dropped: set[str] = set()
        self._num_entered: Counter[str] = Counter()
        self._last: str | None = None
        self._base = ""
        self._num_entries = 0
        self._is_alone = _world_size() == 1
        self._models: list[weakref.ref[Module]] | None = None
        self._had_numbers = True

    def enter_next(self) -> tuple[str, Swap] | None:
        """Swap in the candidate whose turn it is instead of the base; None: none is left."""
        plan, swap, name = self._planned(), None, None
        self._leave_base()
        while swap is None and (name := self._next(plan.left)) is not None:
            swap = self._enter(name, plan.base)
        self._base = plan.base
        if not self._is_alone:
            line = {"entry": self._num_entries, "name": name, "base": plan.base}
            with self._turns.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._num_entries += 1
        if swap is None or name is None:
            self._enter_base()
            return None
        self._last = name
        return name, swap

    def leave(self, name: str, swap: Swap) -> None:
        """Swap a candidate out, and the base in.

        A candidate that replaced no call of its kernels, or spoils results, never comes again.
        """
        swap.__exit__(None, None, None)
        report, watched = swap.report, swap.providers
        assert isinstance(watched, WatchedProviders)
        kernels = ran_in(report, watched)
        told: dict[str, Any] = {
            "num_calls": sum(one.num_calls for one in kernels.values()),
            "num_compiled": sum(one.num_compiled for one in kernels.values()),
        }
        if watched.is_on:
            told["ran"] = {kernel: asdict(one) for kernel, one in kernels.items()}
            told["whys"] = {
                kernel: _why_none(report, {kernel})
                for kernel in report.kernels
                if kernel not in kernels
            }
        self._tell("leave", name, **told)
        if self._had_numbers and not self._have_numbers():
            self._drop(name, NO_WEIGHTS, is_spoilt=True)
        elif watched.culprit:
            self._drop(name, NO_NUMBERS, is_spoilt=True, kernel=watched.culprit)
        elif not self._asked(name, swap) & kernels.keys():
            self._drop(name, _why_none(report, self._asked(name, swap)))
        elif watched.is_on and not told["num_compiled"]:
            # From here on without a look at results, which would be timed. What is compiled has
            # none, and would be compiled anew.
            watched.keep({kernel: one.provider for kernel, one in kernels.items()})
            swap.decide_anew()
        self._enter_base()

    def _asked(self, name: str, swap: Swap) -> set[str]:
        """Return the kernels that a candidate is about: the last with a provider, or all."""
        named = [one.partition("=")[0] for one in name.split(",") if "=" in one]
        return set(named[-1:]) or set(swap.report.kernels)

    def _planned(self) -> _Plan:
        if not self._plan.exists():
            return self._first
        plan: _Plan = msgspec.json.decode(self._plan.read_bytes(), type=_Plan)
        return plan

    def _leave_base(self) -> None:
        if self._base:
            self._swaps[self._base].__exit__(None, None, None)

    def _enter_base(self) -> None:
        if self._base:
            self._swaps[self._base].__enter__()

    def _next(self, names: list[str]) -> str | None:
        left = [name for name in names if name not in self._dropped]
        if not left:
            return None
        # The first entry is not timed, and belongs to the first round.
        rounds = {name: max(self._num_entered[name] - 1, 0) // FIRST_LOOK for name in left}
        behind = [name for name in left if rounds[name] == min(rounds.values())]
        others = [name for name in behind[:TAKING_TURNS] if name != self._last]
        name = (others or behind)[0]
        self._num_entered[name] += 1
        return name

    def _enter(self, name: str, base: str) -> Swap | None:
        """Swap a candidate in; None: it cannot run here, which is logged."""
        self._tell("enter", name, base=base)
        self._had_numbers = self._have_numbers()
        swap, is_first = self._swaps.get(name), name not in self._swaps
        try:
            swap = swap or Swap(None, name.split(","), providers=WatchedProviders)
            swap.__enter__()
        except KprofError as error:
            self._drop(name, error.problem)
            return None
        if is_first and isinstance(swap.providers, WatchedProviders):
            swap.providers.is_on = True
        if not any(one.kernel in self._asked(name, swap) for one in swap.replaced):
            swap.__exit__(None, None, None)
            self._drop(name, _why_none(swap.report, self._asked(name, swap)))
            return None
        self._swaps[name] = swap
        return swap

    def _drop(self, name: str, why: str, *, is_spoilt: bool = False, kernel: str = "") -> None:
        self._dropped.add(name)
        self._tell("drop", name, why=why, is_spoilt=is_spoilt, kernel=kernel)

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
        self._base: Swap | None = None
        self._num_entries = 0

    def enter_next(self) -> tuple[str, Swap] | None:
        """Swap in what rank 0 swaps in at this entry; None: nothing, or it cannot run here."""
        name, base = self._told_of(self._num_entries)
        self._num_entries += 1
        if self._base is not None:
            self._base.__exit__(None, None, None)
        self._base = self._swaps.get(base)
        swap = self._entered(name)
        if name is None or swap is None:
            self._enter_base()
            return None
        return name, swap

    def leave(self, name: str, swap: Swap) -> None:
        """Swap a candidate out, and the base in."""
        swap.__exit__(None, None, None)
        self._enter_base()

    def _entered(self, name: str | None) -> Swap | None:
        if name is None:
            return None
        try:
            swap = self._swaps.get(name)
            swap = swap or Swap(None, name.split(","), providers=WatchedProviders)
            swap.__enter__()
        except KprofError:
            # Rank 0 has entered it: this rank has another part of the model, and runs its own code.
            return None
        self._swaps[name] = swap
        return swap

    def _enter_base(self) -> None:
        if self._base is not None:
            self._base.__enter__()

    def _told_of(self, entry: int) -> tuple[str | None, str]:
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
                return told["name"], told["base"]
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


def ran_in(report: SwapReport, watched: WatchedProviders) -> dict[str, Ran]:
    """Return how each kernel ran that replaced calls."""
    providers: dict[str, Counter[str]] = {}
    sites = [one for one in report.replaced if any(calls.provider for calls in one.calls)]
    for site in sites:
        of = providers.setdefault(site.kernel, Counter())
        for calls in site.calls:
            if calls.provider is not None:
                of[calls.provider] += calls.num_calls
    return {
        kernel: Ran(
            provider=of.most_common(1)[0][0],
            num_calls=sum(one.num_replaced for one in sites if one.kernel == kernel),
            num_compiled=sum(
                1
                for one in sites
                if one.kernel == kernel and any(calls.is_compiled for calls in one.calls)
            ),
            sorts=tuple(watched.sorts.get(kernel, ())),
        )
        for kernel, of in providers.items()
    }


def _why_none(report: SwapReport, kernels: Set[str]) -> str:
    """Return the most frequent reason why a swap replaced no call of these kernels."""
    reasons: Counter[str] = Counter()
    for site in report.sites:
        if site.kernel not in kernels:
            continue
        if site.skipped is not None:
            reasons[site.skipped] += 1
        for calls in site.calls:
            reasons[calls.why or ""] += calls.num_calls
    return reasons.most_common(1)[0][0] if reasons else NO_SITE


_of_logs: dict[str, _Candidates | _Followed] = {}


@contextmanager
def next_candidate(names: str, log: str) -> Iterator[None]:
    """Swap the next of these candidates in; after the last one the first comes again.

    Args:
        names: The candidates until there is a plan, with spaces between; empty: all of
            `candidate_names`.
        log: File of lines in JSON.
    """
    if log not in _of_logs:
        asked = names.split() if names else candidate_names()
        _of_logs[log] = _Followed(Path(log)) if _rank() else _Candidates(asked, Path(log))
    candidates = _of_logs[log]
    entered = candidates.enter_next()
    try:
        yield
    finally:
        if entered is not None:
            candidates.leave(*entered)
