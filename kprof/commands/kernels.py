"""`kprof kernels`: list, check, bench or explain the replacement kernels."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from kprof.commands import Answer, refuse_idle_options, say
from kprof.errors import KprofError

if TYPE_CHECKING:
    from kprof.kernels import Kernel, Shape
    from kprof.kernels.bench.choice import Choice, Pass, Timed
    from kprof.kernels.correctness import GateReport, Scope, Subject
    from kprof.opened import Progress
    from kprof.report.kernel_library import Listed, Unmeasured

# Dtypes that the interpreter computes as a GPU does; it truncates bfloat16 instead of rounding it.
INTERPRETED_DTYPES = ("float16", "float32")
# By kernel, provider, dtype and pass: the calls that the gate tried in this process.
_tried: dict[tuple[str, str, str, str], Scope | None] = {}


@dataclass(frozen=True)
class Calls:
    """The calls that are judged: in which dtypes (none: all), and only those without gradients."""

    dtypes: tuple[str, ...] = ()
    are_forward: bool = False

    def name(self, kernel: Kernel, provider: str) -> str:
        """Return what is judged, such as "fp8_linear forward in bfloat16 by torchao"."""
        forward = " forward" if self.are_forward else ""
        dtypes = f" in {' and '.join(self.dtypes)}" if self.dtypes else ""
        return f"{kernel.name}{forward}{dtypes} by {provider}"


ALL_CALLS = Calls()


Action = Literal["list", "check", "bench", "explain"]

# The options that each action takes, besides --json.
TAKES: dict[Action, set[str]] = {
    "list": set(),
    "check": {"--provider", "--dtype", "--forward", "--sanitizer"},
    "bench": {"--shape", "--dtype"},
    "explain": set(),
}


def kernels(
    action: Annotated[
        Action, typer.Argument(metavar="ACTION", help="list, check, bench or explain.")
    ] = "list",
    names: Annotated[
        list[str] | None, typer.Argument(metavar="KERNEL", help="Kernels [default: all].")
    ] = None,
    provider: Annotated[
        str | None, Option(metavar="NAME", help="check: provider [default: kprof].")
    ] = None,
    shape: Annotated[
        str | None, Option(metavar="MxN", help="bench: shape [default: each kernel's own].")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        Option(metavar="DTYPE", help="check, bench: such as bfloat16; repeatable."),
    ] = None,
    forward: Annotated[
        bool, Option("--forward", help="check: only calls without gradients.")
    ] = False,
    sanitizer: Annotated[
        bool, Option("--sanitizer", help="check: run compute-sanitizer as well (GPU).")
    ] = False,
    json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> Answer:
    """List, check and benchmark replacement kernels.

    check runs levels L0 and L1 of the quality gate, on the GPU or, without one, in Triton's
    interpreter. bench measures kprof's, torch's and installed libraries' kernels, with and without
    gradients, and stores the fastest. explain shows the stored choices, and who runs calls that
    were not measured; it needs no GPU.

    Exit code of check: 0 every level passed, 1 one failed, 3 one could not be run or decided.
    """
    import msgspec

    from kprof.report import kernel_library
    from kprof.report.progress import Progress

    def encoded(result: object) -> bytes | None:
        return msgspec.json.format(msgspec.json.encode(result)) if json else None

    chosen = names or []
    options: dict[str, object] = {"provider": provider, "shape": shape, "dtype": dtype}
    options |= {"forward": forward, "sanitizer": sanitizer}
    refuse_idle_options(action, options, TAKES[action])
    if action == "list":
        if chosen:
            fix = f"kprof kernels explain {chosen[0]}"
            raise KprofError(f"list takes no names, but {chosen[0]!r} is given", fix=fix)
        listed = list_kernels()
        last = "next: kprof kernels check"
        return Answer("kernels", [kernel_library.section_of_kernels(listed)], encoded(listed), last)
    if action == "check":
        from kprof.kernels.correctness.levels import result_of_gate
        from kprof.report.kernel_library import sections_of_gate

        judged = Calls(tuple(dtype or ()), forward)
        with closing(Progress(say)) as progress:
            reports = check_kernels(chosen, provider, progress, calls=judged, sanitizes=sanitizer)
        sections = [section for report in reports for section in sections_of_gate(report)]
        states = {report[level].state for report in reports for level in report.asked}
        code = 1 if "failed" in states else 0 if states == {"passed"} else 3
        last = "next: fix the kernel; docs/gate.md says what each level checks"
        if code != 1:
            last = f"next: kprof kernels {'check' if code else 'bench'}"
            last += "" if has_gpu() else ", on a machine with a GPU"
        found = encoded([result_of_gate(report) for report in reports])
        return Answer("kernels check", sections, found, last, code)
    if action == "bench":
        wanted = shape_of(shape) if shape else None
        with closing(Progress(say)) as progress:
            choices = bench_kernels(chosen, wanted, dtype or [], progress)
        others, last = [], "next: kprof kernels explain"
    else:
        choices = explain_choices(chosen)
        others = unmeasured_kernels(chosen, choices)
        last = "next: kprof kernels bench, on the GPU that is to run them"
    sections = [kernel_library.section_of_choice(one, ranked(one)) for one in choices]
    sections += kernel_library.sections_of_unmeasured(others)
    return Answer(f"kernels {action}", sections, encoded(choices), last)


def list_kernels() -> list[Listed]:
    """Return every kernel with its providers.

    Raises:
        KprofError: there is no torch, or no Triton, to load them with.
    """
    kernels = _named(())
    from kprof.kernels.bench.choice import versions_of
    from kprof.kernels.swap.providers import WITH_SITES
    from kprof.report.kernel_library import Listed

    listed = []
    for kernel in kernels:
        versions = versions_of(kernel.providers)
        providers = tuple((one.name, versions.get(one.distribution)) for one in kernel.providers)
        has_sites = kernel.name in WITH_SITES
        listed.append(Listed(kernel.name, kernel.replaces, providers, kernel.dtypes, has_sites))
    return listed


def _named(names: Iterable[str]) -> list[Kernel]:
    try:
        from kprof.kernels import all_kernels, kernel_named

        return [kernel_named(name) for name in names] or list(all_kernels().values())
    except ModuleNotFoundError as error:
        raise KprofError(
            f"the kernels need {error.name}, which is not installed here",
            fix="run kprof in the workload's environment, with its torch and Triton",
        ) from error


def check_kernels(
    names: Sequence[str],
    provider: str | None,
    progress: Progress = lambda stage: None,
    *,
    calls: Calls = ALL_CALLS,
    sanitizes: bool = False,
) -> list[GateReport]:
    """Run levels L0 and L1 of the quality gate: on the GPU, else in Triton's interpreter.

    Args:
        names: Of the kernels; none: all.
        provider: Whose code is checked; None: ours.
        progress: Told which kernel is next.
        calls: Those that are judged.
        sanitizes: Whether compute-sanitizer watches the edges, too, of all calls; it takes a GPU.

    Raises:
        KprofError: no such kernel, provider or dtype, or Triton was loaded without its interpreter.
    """
    import torch

    if sanitizes and calls != ALL_CALLS:
        why = "compute-sanitizer watches calls of every dtype, with gradients and without"
        raise KprofError(why, fix="leave out --sanitizer, or --forward and --dtype")
    if sanitizes and not torch.cuda.is_available():
        why = "compute-sanitizer needs a GPU, and there is none here"
        raise KprofError(why, fix="leave out --sanitizer, or run it on a GPU machine")
    device = device_to_check_on()
    from kprof.kernels import OURS

    kernels = _named(names)
    reports = []
    for place, kernel in enumerate(kernels):
        progress(f"checking {kernel.name}")
        reports.append(_checked(kernel, provider or OURS, device, calls))
        if sanitizes:
            reports[-1] = _sanitized(reports[-1], kernel, provider or OURS)
        rest = [one.name for one in kernels[place + 1 :]]
        if reports[-1].is_gpu_broken and rest:
            return reports + check_in_fresh_process(rest, provider, calls, sanitizes)
    return reports


def has_gpu() -> bool:
    """Whether this machine has a GPU that torch can use."""
    import torch

    return bool(torch.cuda.is_available())


def device_to_check_on() -> str:
    """Return the GPU, or the host with Triton's interpreter switched on.

    Raises:
        KprofError: Triton is loaded already, without its interpreter.
    """
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        if "triton" in sys.modules:
            raise KprofError(
                "there is no GPU here, and Triton was loaded without its interpreter",
                fix="set TRITON_INTERPRET=1 before it is imported",
            )
        os.environ["TRITON_INTERPRET"] = "1"
    # NaN and infinity are among the inputs; numpy warns of each.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    return "cpu"


def _checked(kernel: Kernel, provider: str, device: str, calls: Calls) -> GateReport:
    from kprof.kernels.correctness import GateReport, check
    from kprof.kernels.correctness.levels import LEVELS, not_run

    asked = ("L0", "L1")
    if unknown := sorted(set(calls.dtypes) - set(kernel.dtypes)):
        fix = f"choose among {', '.join(kernel.dtypes)}"
        raise KprofError(f"{kernel.name} is not for {unknown[0]}", fix=fix)
    why_not = kernel.needs_gpu
    if set(calls.dtypes) - set(INTERPRETED_DTYPES):
        why_not = why_not or "Triton's interpreter does not round to bfloat16"
    if device == "cpu" and why_not:
        levels = tuple(not_run(name, why_not) for name in LEVELS)
        return GateReport(calls.name(kernel, provider), levels, asked)
    try:
        subject = _subject_of(kernel, provider, device, calls)
    except ImportError as error:
        raise KprofError(
            f"{kernel.name} by {provider} cannot run here: {error}",
            fix="kprof kernels list shows the installed providers and their versions",
        ) from error
    if device == "cpu":
        known = tuple(one for one in subject.dtypes if one in INTERPRETED_DTYPES)
        subject = replace(subject, dtypes=known)
    return check(subject, asked)


def _subject_of(kernel: Kernel, provider: str, device: str, calls: Calls) -> Subject:
    """Return a provider as the gate wants it, for these calls alone."""
    from kprof.kernels.bench.measure import subject_of

    subject = replace(subject_of(kernel, provider, device), name=calls.name(kernel, provider))
    if calls.dtypes:
        subject = replace(subject, dtypes=calls.dtypes)
    if calls.are_forward:
        # Kernels whose bits may differ from run to run differ in gradients alone.
        subject = replace(subject, differentiable=(), is_deterministic=True)
    return subject


def _sanitized(report: GateReport, kernel: Kernel, provider: str) -> GateReport:
    from kprof.kernels.bench.sanitize import sanitized

    first, *others = report.levels
    return replace(report, levels=(sanitized(first, kernel.name, provider), *others))


def check_in_fresh_process(
    names: Sequence[str], provider: str | None, calls: Calls, sanitizes: bool
) -> list[GateReport]:
    """Check where the GPU still answers; here it refuses all work."""
    check = partial(check_kernels, names, provider, calls=calls, sanitizes=sanitizes)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(check).result()


def shape_of(text: str) -> Shape:
    """Return a shape written as 8192x4096.

    Raises:
        KprofError: it is none.
    """
    lengths = text.lower().split("x")
    if not all(length.isdigit() for length in lengths):
        raise KprofError(f"--shape {text}: is no shape", fix="write its lengths as 8192x4096")
    return tuple(int(length) for length in lengths)


def bench_kernels(
    names: Sequence[str],
    shape: Shape | None,
    dtypes: Sequence[str],
    progress: Progress = lambda stage: None,
) -> list[Choice]:
    """Measure every provider on every shape; keep and return who runs such calls from now on.

    Calls without gradients and those with them are measured, and run, apart. Who fails the quality
    gate runs none, however fast.

    Args:
        names: Of the kernels; none: all.
        shape: Of the inputs; None: all that a kernel measures.
        dtypes: Of the inputs; none: a kernel's first.
        progress: Told what is next.

    Raises:
        KprofError: there is no GPU, or no such kernel.
    """
    import torch

    if not torch.cuda.is_available():
        raise KprofError(
            "kernels are measured on a GPU, and there is none here",
            fix="run it on a GPU machine; kprof kernels check works without one",
        )
    from kprof.kernels.bench.choice import choose, keep, passes_of, without_rejected
    from kprof.kernels.bench.measure import bench

    gpu, today = torch.cuda.get_device_name(), date.today().isoformat()
    choices = []
    for kernel in _named(names):
        why_rejected = cache(partial(_why_rejected, kernel))
        for wanted in (shape,) if shape else kernel.shapes:
            for dtype in dtypes or kernel.dtypes[:1]:
                for direction in passes_of(kernel):
                    what = f"{kernel.name} {direction}, {'x'.join(map(str, wanted))} {dtype}"
                    progress(f"{what}: measuring")
                    measured = list(bench(kernel, wanted, dtype, direction))
                    progress(f"{what}: checking who is fastest")
                    measured = without_rejected(measured, why_rejected)
                    choice = choose(kernel, measured, gpu, today)
                    tried = _tried.get((kernel.name, choice.provider, dtype, direction))
                    choices.append(replace(choice, scope=tried))
                    keep(choices[-1])
    return choices


def _why_rejected(kernel: Kernel, provider: str, dtype: str, direction: Pass) -> str:
    """Return which level of the gate a provider fails in a pass, and why; empty: none."""
    from kprof.kernels.correctness import check

    calls = Calls((dtype,), are_forward=direction == "forward")
    report = check(_subject_of(kernel, provider, "cuda", calls), ("L0", "L1"))
    failed = [f"{one.name}: {one.why}" for one in report.levels if one.state == "failed"]
    _tried[kernel.name, provider, dtype, direction] = report.scope
    if report.is_gpu_broken:
        why = next(one.why for one in report.levels if one.state != "passed")
        raise KprofError(
            f"{kernel.name} by {provider}: {why}",
            fix="kprof kernels explain shows the measurements until then; take "
            f"{provider} out of this environment, or measure the other kernels by name",
        )
    return failed[0] if failed else ""


def explain_choices(names: Sequence[str]) -> list[Choice]:
    """Return the choices that were made for this machine's GPU, and on what they rest.

    Without a GPU, those that are stored here for any GPU.
    """
    import torch

    from kprof.kernels.bench.choice import load_all_choices, load_choices

    known = {kernel.name for kernel in _named(names)}
    has_gpu = torch.cuda.is_available()
    stored = load_choices(torch.cuda.get_device_name()) if has_gpu else load_all_choices()
    return [choice for choice in stored if choice.kernel in known]


def unmeasured_kernels(names: Sequence[str], choices: Sequence[Choice]) -> list[Unmeasured]:
    """Return the kernels without a choice, and who runs their calls."""
    from kprof.kernels.bench.choice import FALLBACK
    from kprof.report.kernel_library import Unmeasured

    chosen = {choice.kernel for choice in choices}
    return [
        Unmeasured(one.name, one.replaces, None if one.unmeasured == FALLBACK else one.unmeasured)
        for one in _named(names)
        if one.name not in chosen
    ]


def ranked(choice: Choice) -> list[Timed]:
    """Return what was measured for a choice: the winner first, what could not be measured last."""
    from kprof.kernels.bench.choice import ranking

    order = ranking(choice.measured)
    return [*order, *(one for one in choice.measured if one not in order)]
