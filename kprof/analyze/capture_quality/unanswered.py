"""The questions that a capture leaves open: for each the reason, and how to record the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kprof.analyze.attribution.steps import find_steps
from kprof.analyze.capture_quality.overhead import RecordingCost, measure_cost
from kprof.analyze.energy import devices_in
from kprof.trace import Trace


@dataclass(frozen=True)
class Unanswered:
    """A question, why it has no answer, and the fix."""

    question: str
    because: str
    fix: str

    @property
    def sentence(self) -> str:
        """Return the text that stands in the report instead of the answer."""
        return f"Not known: {self.because}. To find out, {self.fix}."

    @property
    def reason(self) -> str:
        """Return the text that stands beside a missing number."""
        return f"{self.because}; to find out, {self.fix}"


def find_unanswered(trace: Trace) -> list[Unanswered]:
    """Return every question that an analyzed trace leaves open, in the order of the report."""
    if trace.kernels.empty:
        return []
    return [found for why in QUESTIONS if (found := why(trace)) is not None]


def why_no_timeline(trace: Trace) -> Unanswered | None:
    """Return why the timeline, and with it idle time, is unknown; None where it is known."""
    if trace.meta.untimed is None:
        return None
    return Unanswered(
        "What ran when, what overlapped, and how long was the device idle?",
        trace.meta.untimed,
        "record the workload with `kprof run`",
    )


def why_no_steps(trace: Trace) -> Unanswered | None:
    """Return why the length of a step is unknown; None where it is known."""
    if find_steps(trace):
        return None
    fix = 'name the steps: kprof.range("step")'
    if trace.meta.recording is None:
        fix = f"record with `kprof run`, or {fix}"
    return Unanswered("How long is a step?", "nothing in the trace marks a step", fix)


def why_no_cost(trace: Trace) -> Unanswered | None:
    """Return why the recording overhead is unknown; None where it is known."""
    recording, question = trace.meta.recording, "What did recording cost?"
    cost = measure_cost(trace)
    if cost is not None:
        return None if cost.is_known else _untold(question, cost)
    if recording is None:
        why = "kprof did not record this trace, so no unrecorded step was timed"
        return Unanswered(question, why, "record with `kprof run`")
    if not recording.recorded_step_ns or not recording.unrecorded_step_ns:
        why = "there are no recorded and unrecorded steps to compare"
        return Unanswered(question, why, "let the script run on for some steps after the window")
    why = "only the host's clock timed the steps, and the host runs ahead of the GPU"
    return Unanswered(question, why, "record without --nsys: torch's profiler lets both be timed")


def _untold(question: str, cost: RecordingCost) -> Unanswered:
    """Say how a difference hides in the spread of steps, or is not the recorder's."""
    if cost.spread_ns is None:
        why = "one recorded and one unrecorded step do not show how much steps vary"
        return Unanswered(question, why, "record more steps, and let the script run on after them")
    if not cost.is_of_like_steps:
        why = (
            f"recorded steps are {cost.difference} than the others in the median; recording makes "
            "none shorter, so the two did not do the same work"
        )
        return Unanswered(question, why, "record steps that are like the others: --skip, --steps")
    apart = cost.spread_ns / cost.unrecorded_ns
    why = (
        f"recorded steps are {cost.difference} in the median, and steps of one kind lie "
        f"{100 * apart:.1f} % apart"
    )
    return Unanswered(question, why, "record steps that repeat, on a calm machine")


def why_no_ceilings(trace: Trace) -> Unanswered | None:
    """Return why the ceilings of the device are unknown; None where they are known."""
    question = "How much of the device is used: MFU, MBU, bounds?"
    if trace.meta.device is not None:
        return None
    if trace.is_host_only and trace.meta.recording is not None:
        why = "the service keeps running during the analysis, so the host's speed was not measured"
        fix = "record without --trigger: `kprof run` measures once the workload has ended"
    elif trace.is_host_only:
        why, fix = "no ceilings were measured for this host", "record with `kprof run`"
    elif not trace.gpus or not trace.gpus[0].name:
        why = "the trace does not name its GPU, so its peaks are unknown"
        fix = "record with `kprof run`"
        if trace.meta.tool == "kineto":
            fix += ", or with a torch that writes deviceProperties"
    else:
        why = f"kprof has no peaks for {trace.gpus[0].name}"
        fix = "run `kprof roofline` on that GPU, then record there again"
    return Unanswered(question, why, fix)


def why_no_work(trace: Trace) -> Unanswered | None:
    """Return why FLOPs and bytes of the operators are unknown; None where they are known."""
    if trace.ranges["input_shapes"].notna().any():
        return None
    return Unanswered(
        "What do the operators compute, and how fast could they be?",
        "the shapes of the operators' inputs were not recorded",
        _again(trace, "without --no-shapes", "with record_shapes=True"),
    )


def why_no_operators(trace: Trace) -> Unanswered | None:
    """Return why no kernel has an operator; None where one has."""
    if trace.kernels["op"].notna().any():
        return None
    has_op = bool((trace.ranges["kind"] == "op").any())
    return Unanswered(
        "Which operator launched which kernel?",
        "no launch leads to one of the operators" if has_op else "no operator was recorded",
        _again(trace, "without CUDA graphs", "with activities=[CPU, CUDA]"),
    )


def why_no_modules(trace: Trace) -> Unanswered | None:
    """Return why no kernel has a module; None where one has."""
    if trace.kernels["module"].notna().any():
        return None
    has_modules = bool((trace.ranges["kind"] == "module").any())
    why = "nothing ran in a module" if has_modules else "the trace does not record modules"
    fix = _again(trace, "with a model of torch.nn.Module", "with the option with_modules=True")
    return Unanswered("Which part of the model takes the time?", why, fix)


def why_no_lines(trace: Trace) -> Unanswered | None:
    """Return why Python lines are unknown; None where they are known."""
    if (trace.ranges["kind"] == "python").any():
        return None
    return Unanswered(
        "Which line of Python launched a kernel, or kept the GPU waiting?",
        "Python stacks were not recorded",
        _again(trace, "with --stacks (slower)", "with the option with_stack=True"),
    )


def why_no_power(trace: Trace) -> Unanswered | None:
    """Return why power, clocks and throttling are unknown; None where they are known."""
    if trace.is_host_only or devices_in(trace.samples, "nvml"):
        return None
    return Unanswered(
        "How much power did the GPU draw, at which clock, and was the clock lowered?",
        "the recording has no samples of power or clocks",
        _again(trace, "where NVML works: see `kprof doctor`", ""),
    )


def why_no_memory(trace: Trace) -> Unanswered | None:
    """Return why the memory use is unknown; None where it is known."""
    if devices_in(trace.samples, "profiler"):
        return None
    return Unanswered(
        "How much memory do tensors take?",
        "the recording has no samples of the allocator",
        _again(trace, "with --memory", "with profile_memory=True"),
    )


def _again(trace: Trace, with_kprof: str, with_torch: str) -> str:
    """Say how to record again: as it was recorded, by kprof or by another tool.

    `with_torch` is empty where torch's profiler alone cannot tell. Nsight has none of its options.
    """
    if not trace.has_timeline:
        return f"record the workload with `kprof run`, {with_kprof}"
    if trace.meta.tool == "nsys" and with_torch:
        return f"let torch's profiler record: `kprof run` without --nsys, {with_kprof}"
    if trace.meta.recording is not None:
        return f"record again {with_kprof}"
    if not with_torch:
        return f"record with `kprof run` {with_kprof}"
    return f"record again {with_torch}, or with `kprof run`"


QUESTIONS: tuple[Callable[[Trace], Unanswered | None], ...] = (
    why_no_timeline,
    why_no_steps,
    why_no_cost,
    why_no_ceilings,
    why_no_work,
    why_no_operators,
    why_no_modules,
    why_no_lines,
    why_no_power,
    why_no_memory,
)
