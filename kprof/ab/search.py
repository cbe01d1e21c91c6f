"""The order in which `--swap auto` tries kernels: all together first, then one by one.

The joint swap has every kernel, each with the provider that was measured to be the fastest for the
calls. Where it is faster for sure, it becomes the base: steps without one of its kernels, or with
another provider of it, are compared with steps of the joint swap. So a workload of long steps, with
windows for a few comparisons, gets the gain of all. Where it is not, candidates are compared with
the workload as it is. One that is faster for sure joins the base, and the others are compared with
it: kernels that pay alone may not pay together, where the host's time limits the step.

The gain of the joint swap was proven, so a kernel of it stays unless the step is as fast without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kprof.kernels.swap.swap_report import FIRST_LOOK, NO_SITE, UNMEASURED, Ran, Tried

# Windows after which a joint swap that is not decided is given up.
MOST_OF_JOINT = 2 * FIRST_LOOK
# Other swaps of compiled code than the joint one: each compiles the graphs anew, and torch keeps
# the graphs of eight.
MOST_COMPILED = 4
UNTOUCHED = "no call beside the others"


@dataclass(frozen=True)
class Seen:
    """What the log says of the first entry of a candidate."""

    ran: Mapping[str, Ran]
    """How each kernel ran that replaced calls."""
    whys: Mapping[str, str]
    """Why another one replaced none."""
    took_s: float
    """Its time, with what was compiled."""


class Search:
    """Which candidates need windows, and which one is the base."""

    def __init__(
        self,
        names: Sequence[str],
        apart: Sequence[str] = (),
        likely: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Begin with the joint swap, unless there is one kernel.

        Args:
            names: KERNEL=PROVIDER of each candidate.
            apart: Kernels that are not in the joint swap.
            likely: Returns the kernels that pay by the findings, the best first: tried first, and
                left out last.
        """
        self.names, self._likely_of = list(names), likely
        kernels = [one for one in dict.fromkeys(map(kernel_of, names)) if one not in apart]
        self._kernels = kernels
        self._base: list[str] = []
        """Where the joint swap is not the base: KERNEL=PROVIDER of those that joined it."""
        self._out: set[str] = set()
        """Candidates that are in the base, cannot run, or were slower than a base."""
        self._last: dict[str, str] = {}
        """The swap in which each candidate was compared last."""
        self.joint = ",".join(kernels) if len(kernels) > 1 else ""

    @property
    def first(self) -> list[str]:
        """The candidates before anything is known."""
        return [self.joint] if self.joint else self.names

    def without(self, kernel: str) -> str:
        """Return the joint swap without a kernel."""
        return ",".join(one for one in self.joint.split(",") if one != kernel)

    def exchanged(self, name: str) -> str:
        """Return the joint swap with this provider of its kernel."""
        kernel = kernel_of(name)
        return ",".join(name if one == kernel else one for one in self.joint.split(","))

    def is_joined(self, tried: Mapping[str, Tried]) -> bool:
        """Return whether the joint swap is faster for sure."""
        return self.joint in tried and tried[self.joint].is_faster

    def left(
        self, tried: Mapping[str, Tried], seen: Mapping[str, Seen], time_left_s: float
    ) -> tuple[list[str], str]:
        """Return the candidates that need windows, the first first, and the base."""
        joint = tried.get(self.joint, Tried(self.joint))
        is_open = not (joint.is_faster or joint.is_slower or joint.why)
        if self.joint and is_open and joint.num_windows < MOST_OF_JOINT:
            return [self.joint], ""
        if not self.joint or not joint.is_faster:
            return self._grown(tried, seen.get(self.joint))
        moves = self._moves(seen[self.joint])
        if joint.num_compiled:
            begun = [one for one in moves if one in tried]
            has_time = time_left_s > seen[self.joint].took_s
            moves = moves[: MOST_COMPILED if has_time else len(begun)]
        return [one for one in moves if not _is_decided(tried.get(one))], self.joint

    def _grown(self, tried: Mapping[str, Tried], begun: Seen | None) -> tuple[list[str], str]:
        """Return the candidates beside the base, which the fastest of them joins."""
        while True:
            beside = {
                one: ",".join([*self._base, one]) for one in self.names if one not in self._out
            }
            known = {one: tried[name] for one, name in beside.items() if name in tried}
            self._last |= {one: beside[one] for one in known}
            self._out |= {one for one, told in known.items() if told.why or told.is_slower}
            faster = [one for one, told in known.items() if told.is_faster and not told.why]
            best = min(faster, key=lambda one: known[one].ratio or 1.0, default="")
            others = [one for one in beside if kernel_of(one) == kernel_of(best)]
            if not best or any(_is_new(known.get(one)) for one in others):
                break
            # A kernel joins once, by the fastest of its providers.
            self._base.append(best)
            self._out |= set(others)
        with_calls = set[str]() if begun is None else _with_calls(begun)
        # Others may have no call.
        left = sorted(
            (one for one in beside if one not in self._out and one not in faster),
            key=lambda one: (kernel_of(one) not in with_calls, self._rank(one)),
        )
        return [beside[one] for one in left], ",".join(self._base)

    @functools.cached_property
    def _likely(self) -> Sequence[str]:
        return self._likely_of()

    def _rank(self, name: str) -> int:
        """Return the place of a kernel among the likely ones; the others are behind them."""
        kernel = kernel_of(name)
        return self._likely.index(kernel) if kernel in self._likely else len(self._likely)

    def _moves(self, begun: Seen) -> list[str]:
        """Return the joint swap without each kernel that ran in it, and with other providers."""
        ran = begun.ran
        # The likely last, so that those that may not pay are judged in time.
        active = sorted((one for one in self._kernels if one in ran), key=self._rank, reverse=True)
        moves = [self.without(one) for one in active] if len(active) > 1 else []
        own = {f"{kernel}={one.provider}" for kernel, one in ran.items()}
        kernels = [one for one in self._kernels if begun.whys.get(one) != NO_SITE]
        others = [one for one in self.names if one not in own and kernel_of(one) in kernels]
        # Unmeasured kernels first: of the others, the fastest provider ran. Those that did not run
        # last: they may have no call.
        with_calls = _with_calls(begun)
        others.sort(key=lambda one: (kernel_of(one) not in with_calls, kernel_of(one) in ran))
        return moves + [self.exchanged(one) for one in others]

    def outcome(
        self, tried: Mapping[str, Tried], seen: Mapping[str, Seen]
    ) -> tuple[dict[str, Tried], Tried | None]:
        """Return what is known of each candidate KERNEL=PROVIDER, and of the joint swap."""
        joint = tried.get(self.joint) if self.joint else None
        if joint is None or not joint.is_faster:
            self._grown(tried, seen.get(self.joint))
            return {name: self._beside(name, tried, seen) for name in self.names}, joint
        begun = seen[self.joint]
        found = {name: Tried(name, why=self._why(name, begun)) for name in self.names}
        for kernel, ran in begun.ran.items():
            out = tried.get(self.without(kernel))
            told = _joined(kernel, ran, out)
            found[told.name] = told
            if out is not None and not told.pays:
                # In its place others may have run.
                instead = seen[out.name].ran.items() if out.name in seen else ()
                others = (_joined(*one, None) for one in instead if one[0] not in begun.ran)
                found |= {one.name: one for one in others}
        for name in self.names:
            one = tried.get(self.exchanged(name))
            if one is None or (one.ratio is None and not one.why):
                continue
            kernel = kernel_of(name)
            ran_alone = seen[one.name].ran.get(kernel) if one.name in seen else None
            own = begun.ran.get(kernel)
            found[name] = replace(
                one,
                name=name,
                sorts=ran_alone.sorts if ran_alone is not None else (),
                instead_of="" if own is None else own.provider,
            )
        return found, joint

    def _beside(self, name: str, tried: Mapping[str, Tried], seen: Mapping[str, Seen]) -> Tried:
        """Return what is known of a candidate beside the base of its last windows.

        What was faster only beside another base may not pay beside this one: it counts as untimed.
        """
        swap = self._last.get(name, name)
        one = replace(tried.get(swap, Tried(swap)), name=name)
        if name not in self._out and one.is_faster and swap != ",".join([*self._base, name]):
            one = replace(one, num_windows=0, ratio=None, low=None, high=None)
        if swap == name or swap not in seen:
            return one
        ran = seen[swap].ran.get(kernel_of(name))
        return replace(one, sorts=() if ran is None else ran.sorts)

    def _why(self, name: str, begun: Seen) -> str:
        """Return why a candidate did not run in the joint swap; empty: it might, if it is named."""
        kernel = kernel_of(name)
        return "" if kernel in _with_calls(begun) else begun.whys.get(kernel, UNTOUCHED)


def kernel_of(name: str) -> str:
    """Return the kernel of KERNEL=PROVIDER."""
    return name.partition("=")[0]


def _with_calls(begun: Seen) -> set[str]:
    """Return the kernels that ran, or would have if a provider had been named."""
    return {*begun.ran, *(one for one, why in begun.whys.items() if why == UNMEASURED)}


def _is_new(one: Tried | None) -> bool:
    """Return whether a candidate has too few windows for a first look."""
    return one is None or not (_is_decided(one) or one.num_windows >= FIRST_LOOK)


def _is_decided(one: Tried | None) -> bool:
    return one is not None and bool(one.is_faster or one.is_slower or one.why)


def _joined(kernel: str, ran: Ran, out: Tried | None) -> Tried:
    """Return a kernel of the joint swap, by the swap without it."""
    told = Tried(
        f"{kernel}={ran.provider}",
        ran.num_calls,
        ran.num_compiled,
        sorts=ran.sorts,
        is_joined=True,
    )
    if out is None or out.ratio is None:
        return told
    assert out.low is not None
    assert out.high is not None
    return replace(
        told,
        num_windows=out.num_windows,
        ratio=1 / out.ratio,
        low=1 / out.high,
        high=1 / out.low,
    )
