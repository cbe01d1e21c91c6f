"""`kprof.ab_test`: two functions in pairs, in this process, with their results compared."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from numbers import Number
from random import Random
from statistics import median
from typing import Any

from kprof.ab.variants import measure_host_resolution_ns
from kprof.analyze.verdict.judge import is_enough, judge
from kprof.analyze.verdict.plausibility import (
    HOST_BYTES_PER_S,
    LAUNCH_NS,
    SUSPICIOUS,
    WRITTEN_OVER_PEAK,
    doubt_ratio,
    reason_below_floor,
)
from kprof.analyze.verdict.rule import FEWEST_PAIRS, MOST_PAIRS
from kprof.collect.nvml import Watcher
from kprof.comparison import Claim, Comparison, Metric, Pair, Plan
from kprof.device import find_device
from kprof.errors import KprofError, counted
from kprof.findings import Caveat
from kprof.timing import (
    CLOCKS,
    Clock,
    Stopwatch,
    WallStopwatch,
    WarmUp,
    stopwatch_for,
    take_pairs,
    warm_up,
)

TIME = Metric("time per call", "ns")
OWN_PLAN = "use Plan((kprof.ab.functions.TIME,), …)"
SAMPLE_NS = 2e7
EMPTY_CALLS = 1_000
# A call that returns an array takes at least as long as so many empty ones: about 150 ns.
EMPTY_CALL = 3.0
# Copies of inputs that are tried, and how much longer than usual a call on them is memoised.
MOST_FRESH, MEMOISED = 3, 10.0
WARM_UP_S = 1.0
# Outputs may differ so far, relative to A's: more than any rounding of 16-bit numbers, less than
# a wrong answer. The quality gate judges more finely.
DIFFERENT = 0.01
# The id of a doubt about a gain that is too large to be believed without a look.
LARGE_GAIN = "large_gain"
IN_PAIRS = "Both in one process, pairs in random order"
CHANGES_INPUTS = {
    "A": "A changes its inputs and B does not, so the two do not do the same.",
    "B": "B changes its inputs and A does not, so the two do not do the same.",
}
BOTH_CHANGE = "Both change their inputs, so each call works on the result of the one before."


class AbTestError(KprofError):
    """One of the two raised while it was timed; `pairs` has what was measured before."""

    def __init__(self, problem: str, *, fix: str, pairs: tuple[Pair, ...]) -> None:
        super().__init__(problem, fix=fix)
        self.pairs = pairs


Function = Callable[..., object]


class _Arm:
    """One of the two with its turn among the inputs, and what it returned last."""

    def __init__(
        self, label: str, function: Function, inputs: Sequence[tuple[object, ...]]
    ) -> None:
        self.label = label
        self._function = function
        self._inputs = inputs
        self._turn = -1
        self.last: object = None
        self.is_inside = False
        """Whether it was called and has not returned."""

    def call(self) -> object:
        """Call it with the inputs whose turn it is."""
        self._turn = (self._turn + 1) % len(self._inputs)
        self.is_inside = True
        self.last = self._function(*self._inputs[self._turn])
        self.is_inside = False
        return self.last

    def call_with(self, inputs: tuple[object, ...]) -> object:
        """Call it with other inputs, out of turn."""
        return self._function(*inputs)

    def returns_what_it_kept(self) -> bool:
        """Overwrite what it returned, call it again, and tell whether it returns just that.

        What was overwritten is put back: a function that keeps its results keeps the right ones.
        """
        inputs = self._inputs[self._turn]
        returned = self._function(*inputs)
        numbers = copy_numbers(returned)
        if not arrays_in(returned):
            return False
        overwrite(returned)
        again = self._function(*inputs)
        is_kept = share_memory(again, returned) and has_changed(numbers, again)
        overwrite(returned, numbers)
        return is_kept

    def difference_to(self, other: _Arm) -> float | None:
        """Return how far what it returned last, while timed, is from the other's on the same."""
        return difference_of(other._function(*self._inputs[self._turn]), self.last)


def ab_test(  # noqa: PLR0913 - options by name
    a: Function,
    b: Function,
    *,
    inputs: Sequence[tuple[object, ...]] = ((),),
    clock: Clock = "wall",
    plan: Plan | None = None,
    floor_ns: float | None = None,
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare two callables that do the same; FASTER means that `b` takes less time.

    Args:
        a: What is done today.
        b: What may replace it.
        inputs: Arguments of one call each, taken in turn by both. Several sets, together larger
            than L2, keep a kernel from finding its inputs there.
        clock: "wall" from an idle GPU to an idle GPU; "gpu" for kernels, without the cost of
            launching them; "cold gpu" with L2 flushed before every call.
        plan: What is decided beforehand: the least effect that matters, pairs, confidence, seed.
        floor_ns: Time that no call can undercut, such as its roofline.
        names: What the two are called in the report.

    A time that no computation of B's outputs can take is refused without a floor as well: one as
    short as an empty call, or faster than memory is written. Where B takes less than a tenth of
    A's time, kprof checks whether B computes its results or keeps them.

    What they return is compared before the first sample and, on inputs both have seen, after the
    last; two that return None are compared by time alone. The comparison is INVALID where they
    differ or are no numbers, where one of them alone changes its inputs, or was faster than the
    floor.

    Raises:
        KprofError: there are no inputs, that clock needs a GPU, or the plan decides nothing.
        AbTestError: one of the two raised while it was timed.
    """
    _check(inputs, clock, plan := plan or Plan((TIME,), max_pairs=MOST_PAIRS))
    arms = _Arm("A", a, inputs), _Arm("B", b, inputs)
    changing, first = _call_first(arms, inputs[0])
    stopwatch = stopwatch_for(clock)
    with closing(Watcher()) as watcher:
        warmed = warm_up((arms[0].call, arms[1].call), stopwatch, WARM_UP_S, SAMPLE_NS)
        pairs = _take(arms, plan, stopwatch, warmed, watcher)
    last = arms[1].difference_to(arms[0])
    wrong = _find_wrong(pairs, (first, last), floor_ns) or _find_nan(arms)
    claims = judge(plan, pairs, resolution_ns=_resolution_ns(stopwatch, warmed.num_calls))
    wrong = wrong or _find_kept_results(arms, inputs, pairs, stopwatch)
    if wrong := wrong or CHANGES_INPUTS.get(changing, ""):
        claims = tuple(_invalid(claim, wrong) for claim in claims)
    return Comparison(
        name=" against ".join(names := names or (_name(a, "A"), _name(b, "B"))),
        a=names[0],
        b=names[1],
        plan=plan,
        pairs=pairs,
        claims=claims,
        protocol=f"{IN_PAIRS}: {stopwatch.name}, {counted(warmed.num_calls, 'call')} a sample.",
        doubts=(*_doubts(warmed, stopwatch, watcher, first, changing), *_doubts_of_gain(claims)),
        facts={**_machine(), **_outputs(first, last)},
    )


def _check(inputs: Sequence[tuple[object, ...]], clock: Clock, plan: Plan) -> None:
    if not inputs:
        raise KprofError("no inputs to call with", fix="leave `inputs` out, or give a tuple a call")
    if clock not in CLOCKS:
        raise KprofError(f"there is no clock {clock!r}", fix=f"choose among {', '.join(CLOCKS)}")
    if clock != "wall":
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            raise KprofError(
                f"the clock {clock!r} needs torch and a CUDA device", fix='use clock="wall"'
            )
    if len(plan.metrics) != 1:
        raise KprofError(
            f"the plan has {len(plan.metrics)} metrics, and ab_test measures one: time",
            fix=OWN_PLAN,
        )
    if (plan.metrics[0].unit, plan.metrics[0].better) != (TIME.unit, TIME.better):
        told = plan.metrics[0]
        raise KprofError(
            f"the plan has {told.name!r} in {told.unit}, of which {told.better} is better, and "
            "ab_test measures ns, of which lower is",
            fix=OWN_PLAN,
        )
    if plan.max_pairs < FEWEST_PAIRS or not 0 < plan.smallest_effect < 1 or not 0 < plan.alpha < 1:
        raise KprofError(
            f"no verdict can come of {plan.max_pairs} pairs, a smallest effect of "
            f"{plan.smallest_effect:g} and an error of {plan.alpha:g}",
            fix=f"plan at least {FEWEST_PAIRS} pairs, and shares between 0 and 1",
        )


def _call_first(arms: tuple[_Arm, _Arm], inputs: tuple[object, ...]) -> tuple[str, float | None]:
    """Call A, then B, on the first inputs; return which change those, and how far both differ."""
    changing, returned = "", []
    for arm in arms:
        kept = copy_numbers(inputs)
        returned.append(arm.call())
        changing += arm.label if has_changed(kept, inputs) else ""
    return changing, difference_of(*returned)


def copy_numbers(value: object) -> dict[object, Any]:
    """Return a copy of every array and number in `value`, by its place."""
    return {place: _copied(leaf) for place, leaf in _leaves(value)}


def _copied(leaf: Any) -> Any:  # noqa: ANN401 - arrays of torch or numpy
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return leaf.detach().clone()
    return leaf.copy() if hasattr(leaf, "shape") else leaf


def _leaves(value: object, place: tuple[object, ...] = ()) -> Iterator[tuple[object, Any]]:
    """Yield the arrays and numbers in a nest of sequences and mappings, each with its place."""
    if value is None or isinstance(value, str | bytes):
        return
    if isinstance(value, Number) or hasattr(value, "shape"):
        yield place, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], (*place, key))
    elif isinstance(value, Sequence):
        for index, item in enumerate(value):
            yield from _leaves(item, (*place, index))


def has_changed(kept: Mapping[object, Any], value: object) -> bool:
    """Tell whether `value` holds something else than when `copy_numbers` saw it."""
    now = dict(_leaves(value))
    if now.keys() != kept.keys():
        return True
    return any(_relative(leaf, now[place]) != 0.0 for place, leaf in kept.items())


def _relative(a: Any, b: Any) -> float:  # noqa: ANN401 - arrays of torch or numpy
    if getattr(a, "shape", ()) != getattr(b, "shape", ()):
        return math.inf
    left, right = _as_float(a), _as_float(b)
    # NaN and infinity have to stand in the same places; the rest is measured.
    is_special = (left != left) | (abs(left) == math.inf)
    here, there = left[is_special], right[is_special]
    if not bool(((here == there) | ((here != here) & (there != there))).all()):
        return math.inf
    left, right = left[~is_special], right[~is_special]
    distance = float(((right - left) ** 2).sum()) ** 0.5
    if distance == 0.0:
        return 0.0
    norm = float((left**2).sum()) ** 0.5
    # A NaN only in b makes the distance one.
    return distance / norm if norm and not math.isnan(distance) else math.inf


def _as_float(value: Any) -> Any:  # noqa: ANN401
    """Return a flat array of double precision, on the device where it was."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = torch.view_as_real(value) if value.is_complex() else value
        return value.detach().double().reshape(-1)
    import numpy as np

    return np.asarray(value, dtype=np.float64).reshape(-1)


def difference_of(a: object, b: object) -> float | None:
    """Return the norm of b - a over that of a, the largest over all their arrays and numbers.

    Infinite where they do not match: in structure, shape, or where one holds NaN and the other
    does not. None where neither holds a number to compare.
    """
    left, right = dict(_leaves(a)), dict(_leaves(b))
    if not left and not right:
        return None
    if left.keys() != right.keys():
        return math.inf
    return max(_relative(left[place], right[place]) for place in left)


def _take(
    arms: tuple[_Arm, _Arm], plan: Plan, stopwatch: Stopwatch, warmed: WarmUp, watcher: Watcher
) -> tuple[Pair, ...]:
    """Take pairs until the plan's number is reached or, if it says so, the verdict stands."""
    taken: list[Pair] = []
    order = Random(plan.seed)
    works = arms[0].call, arms[1].call
    try:
        for pair in take_pairs(*works, stopwatch, warmed.num_calls, order, watcher.read):
            taken.append(pair)
            # What is freed now is what the next call gets for its output: one that leaves part of
            # it unwritten shall not find a right answer there.
            poison_free_memory(arms[0].last)
            if is_enough(plan, taken):
                break
    except Exception as error:
        raise AbTestError(
            f"{'B' if arms[1].is_inside else 'A'} raised {type(error).__name__} after "
            f"{len(taken)} pairs: {error}",
            fix="see its traceback; `pairs` of this error has the measurements",
            pairs=tuple(taken),
        ) from error
    return tuple(taken)


def poison_free_memory(output: object) -> None:
    """Leave NaN where torch will next put tensors of the sizes that are in `output`.

    The caching allocator gives a freed block to the next tensor of its size. On the host there is
    no such cache, and nothing is done.
    """
    torch = sys.modules.get("torch")
    for _, leaf in _leaves(output):
        if torch is not None and isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            block = torch.empty_like(leaf)
            if leaf.is_floating_point():
                block.fill_(math.nan)
            del block


def _find_wrong(
    pairs: Sequence[Pair], differences: tuple[float | None, ...], floor_ns: float | None
) -> str:
    """Return why the samples are worth nothing, or nothing."""
    worst = max((d for d in differences if d is not None), default=0.0)
    if worst == math.inf:
        return (
            "The two do not return the same: in another structure or shape, or with NaN or "
            "infinity where the other has none."
        )
    if not worst <= DIFFERENT:
        return (
            f"The two do not return the same: they differ by {worst:.2g} of A's norm, where at "
            f"most {DIFFERENT} is taken for rounding."
        )
    least = min(min(pair.a[0], pair.b[0]) for pair in pairs)
    if floor_ns is not None and least < floor_ns:
        return (
            f"A call took {least:,.0f} ns, less than the {floor_ns:,.0f} ns that it needs at "
            "least: not all the work was done, or not all of it was timed."
        )
    return ""


def _find_nan(arms: Sequence[_Arm]) -> str:
    is_nan = all(holds_nan(arm.last) for arm in arms)
    return "Both return NaN: whether they do the same is unknown." if is_nan else ""


def holds_nan(output: object) -> bool:
    """Tell whether some value in `output` is no number."""
    leaves = (_as_float(leaf) for _, leaf in _leaves(output))
    return any(bool((values != values).any()) for values in leaves)


def _resolution_ns(stopwatch: Stopwatch, num_calls: int) -> float:
    """Return the least difference that the stopwatch tells apart in the time of a call."""
    is_wall = isinstance(stopwatch, WallStopwatch)
    return (measure_host_resolution_ns() if is_wall else stopwatch.resolution_ns) / num_calls


def _find_kept_results(
    arms: tuple[_Arm, _Arm],
    inputs: Sequence[tuple[object, ...]],
    pairs: Sequence[Pair],
    stopwatch: Stopwatch,
) -> str:
    """Return why B's times are not those of computing its results, or nothing.

    Only a B that takes less than a tenth of A's time is looked at.
    """
    good = [pair for pair in pairs if not pair.problem]
    if not good:
        return ""
    a_ns, b_ns = (median(values) for values in zip(*((p.a[0], p.b[0]) for p in good), strict=True))
    if not 0 < b_ns < SUSPICIOUS * a_ns:
        return ""
    arm = arms[1]
    is_view = any(share_memory(arm.last, one) for one in inputs)
    if not is_view and (reason := reason_below_floor(good, *_floor(arm.last, stopwatch))):
        return reason
    if not is_view and arm.returns_what_it_kept():
        return (
            "B returns a result that it has kept: it did not compute it again after what it had "
            "returned was overwritten."
        )
    fresh_ns = [
        stopwatch.time(lambda copied=copied: arm.call_with(copied), 1)  # type: ignore[misc]
        for copied in (fresh_copy(one) for one in (*inputs, *inputs)[:MOST_FRESH])
        if copied is not None and arrays_in(copied)
    ]
    if fresh_ns and min(fresh_ns) > max(MEMOISED * b_ns, a_ns / 2):
        return (
            f"B takes {b_ns:,.0f} ns on inputs that it has seen and {min(fresh_ns):,.0f} ns on "
            "copies of them: it keeps results."
        )
    return ""


def share_memory(one: object, other: object) -> bool:
    """Tell whether some array of one lies in the same memory as some array of the other."""
    return bool(_places(one) & _places(other))


def _places(value: object) -> set[tuple[str, int]]:
    """Return where the memory of each array begins, and on which device."""
    found = set()
    for leaf in arrays_in(value):
        if hasattr(leaf, "untyped_storage"):
            found.add((str(leaf.device), leaf.untyped_storage().data_ptr()))
        elif hasattr(leaf, "__array_interface__"):
            base = leaf
            while getattr(base, "base", None) is not None and hasattr(base.base, "shape"):
                base = base.base
            found.add(("cpu", base.__array_interface__["data"][0]))
    return found


def arrays_in(value: object) -> list[Any]:
    """Return the arrays in `value`, of torch or numpy."""
    return [leaf for _, leaf in _leaves(value) if hasattr(leaf, "shape")]


def _floor(output: object, stopwatch: Stopwatch) -> tuple[float, str]:
    """Return the least time that a call can take which computes such an output, and of what."""
    arrays = arrays_in(output)
    device = next((leaf.device for leaf in arrays if getattr(leaf, "is_cuda", False)), None)
    if device is None:
        empty_ns = stopwatch.time(lambda: None, EMPTY_CALLS)
        written_ns = 1e9 * size_bytes(output) / HOST_BYTES_PER_S
        return max((EMPTY_CALL if arrays else 1.0) * empty_ns, written_ns), "computing the result"
    known = find_device(sys.modules["torch"].cuda.get_device_name(device))
    peak = known.memory_bytes_per_s if known else math.inf
    written_ns = 1e9 * size_bytes(output) / (WRITTEN_OVER_PEAK * peak)
    launch_ns = LAUNCH_NS if isinstance(stopwatch, WallStopwatch) else LAUNCH_NS / 2
    return max(launch_ns, written_ns), "a kernel that writes the result"


def size_bytes(value: object) -> int:
    """Return how many bytes the arrays in `value` have; an expanded one has those of its memory."""
    return sum(_size_bytes(leaf) for leaf in arrays_in(value))


def _size_bytes(leaf: Any) -> int:  # noqa: ANN401 - arrays of torch or numpy
    strides = leaf.stride() if callable(getattr(leaf, "stride", None)) else leaf.strides
    size = int(leaf.itemsize)
    for length, stride in zip(leaf.shape, strides, strict=True):
        size *= int(length) if stride else min(1, int(length))
    return size


def fresh_copy(inputs: tuple[object, ...]) -> tuple[object, ...] | None:
    """Return inputs with new arrays of the same numbers; None where some cannot be copied."""
    copied: list[object] = []
    for value in inputs:
        if hasattr(value, "shape"):
            copied.append(_copied(value))
        elif value is None or isinstance(value, Number | str | bytes):
            copied.append(value)
        else:
            return None
    return tuple(copied)


def _invalid(claim: Claim, why: str) -> Claim:
    return replace(claim, verdict="INVALID", why=why, is_material=False, pairs_needed=None)


def _name(function: Function, otherwise: str) -> str:
    name = getattr(function, "__name__", otherwise)
    return otherwise if name == "<lambda>" else name


def _doubts(
    warmed: WarmUp,
    stopwatch: Stopwatch,
    watcher: Watcher,
    difference: float | None,
    changing: str,
) -> list[Caveat]:
    """Return what a reader has to know before trusting the verdict."""
    doubts = []
    if not warmed.is_stable:
        doubts.append(Caveat("not_settled", "Times had not settled when the warm-up ended."))
    if stopwatch.num_exposed:
        told = (
            f"In {counted(stopwatch.num_exposed, 'sample')} the GPU waited for launches, which are "
            "part of the time: use the clock wall, or capture the work in a CUDA graph."
        )
        doubts.append(Caveat("launches_in_time", told))
    if watcher.num_neighbours:
        others = counted(watcher.num_neighbours, "other process", "other processes")
        doubts.append(Caveat("gpu_shared", f"On the GPU from the start: {others}."))
    if changing == "AB":
        doubts.append(Caveat("inputs_change", BOTH_CHANGE))
    if difference is None:
        told = "The two return nothing that can be compared: whether they do the same is not known."
        doubts.append(Caveat("results_unknown", told))
    return doubts


def _doubts_of_gain(claims: Sequence[Claim]) -> list[Caveat]:
    return [Caveat(LARGE_GAIN, doubt) for claim in claims if (doubt := doubt_ratio(claim))]


def _machine() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        if torch.cuda.is_initialized():
            found["GPU"] = str(torch.cuda.get_device_name())
    return found


def _outputs(first: float | None, last: float | None) -> dict[str, str]:
    if first is None or last is None:
        return {}
    return {"outputs": f"differ by {first:.2g} before and {last:.2g} after timing, of A's norm"}


def overwrite(output: object, numbers: Mapping[object, Any] | None = None) -> None:
    """Put `numbers`, as of `copy_numbers`, into the arrays of `output`; without them, NaN or 0."""
    torch = sys.modules.get("torch")
    for place, leaf in _leaves(output):
        if not hasattr(leaf, "shape"):
            continue
        if torch is not None and isinstance(leaf, torch.Tensor):
            spoilt = math.nan if leaf.is_floating_point() or leaf.is_complex() else 0
            with torch.no_grad():
                target = leaf.detach()
                target.fill_(spoilt) if numbers is None else target.copy_(numbers[place])
        elif getattr(leaf, "flags", None) is not None and leaf.flags.writeable:
            spoilt = math.nan if leaf.dtype.kind in "fc" else 0
            leaf[...] = spoilt if numbers is None else numbers[place]
