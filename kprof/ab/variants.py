"""The options of `kprof ab`, and the two variants of a workload that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kprof.collect.trials import Variant
from kprof.comparison import draw_seed
from kprof.errors import KprofError
from kprof.run import Form, RunOptions, command_of

# So many steps of the host's clock are awaited: the first may be cut, and others be interrupted.
# So many readings take some 0.1 s, several steps of the coarsest clocks in use (16 ms).
NUM_STEPS_OF_CLOCK, MOST_READINGS = 8, 1_000_000

Tell = Callable[[str], None]
# For `--swap auto`.
BUDGET_S = 60.0


@dataclass(frozen=True)
class AbOptions:
    """The two variants to compare, and the error rates."""

    words: tuple[str, ...]
    """A script and its arguments, a module and its arguments, or a whole command: variant A."""
    form: Form = "script"
    other: Path | None = None
    """B is this script, with the same arguments."""
    environment: tuple[str, ...] = ()
    """B has these variables, each as K=V."""
    arguments: tuple[str, ...] = ()
    """B has these arguments at its end."""
    patch: str | None = None
    """B is inside this context manager: FILE.py:NAME, entered and left in one process."""
    swap: str = ""
    """B has these replacement kernels, separated by commas; switched in one process."""
    budget_s: float | None = None
    """Time of `--swap auto` to try kernels, beside the start of the workload; None: BUDGET_S, and a
    choice that was kept is used again."""
    pairs: int | None = None
    smallest_effect: float = 0.01
    fixed: bool = False
    """Whether all pairs are taken, even if the verdict stands before."""
    energy: bool = False
    """Whether the energy of a step is judged as well."""
    skip: int = 5
    """Warm-up steps of every process."""
    window_s: float = 0.25
    """A sample is as many steps as fill this time."""
    seed: int = field(default_factory=draw_seed)
    losses: int | None = None
    """Steps of training runs whose losses are compared; None: no such runs."""
    targets: tuple[str, ...] = ()
    """Targets that A and B have to keep, such as step_p50<=60ms."""
    facts: Mapping[str, str | None] = field(default_factory=dict)
    """The inputs of `kprof cost` for the savings of B; all missing: no costs."""
    out: Path | None = None
    force: bool = False
    line: str = ""
    """The command line, to repeat the comparison."""


def variants_of(options: AbOptions) -> tuple[Variant, Variant]:
    """Return the two variants.

    Raises:
        KprofError: an option is malformed, or a script is not there.
    """
    command = command_of(run_options(options))
    others = _other_command(options, command)
    environment = dict(_split(text) for text in options.environment)
    words = [f"--env {text}" for text in options.environment]
    words += [f"--arg {text}" for text in options.arguments]
    if options.other is not None:
        words.insert(0, str(options.other))
    if options.patch or options.swap:
        if words or (options.patch and options.swap):
            raise KprofError(
                "--patch and --swap are switched inside one process, which has one environment "
                "and one set of arguments",
                fix="leave out --env, --arg and --python, and one of the two",
            )
        if options.patch:
            _check_patch(options.patch)
        if options.patch and options.losses:
            raise KprofError(
                "--losses compares training runs of processes, which do not enter --patch",
                fix="give --swap, --env, --arg or --python",
            )
        words = [f"--swap {options.swap}" if options.swap else f"inside {options.patch}"]
    a = Variant("A", command, {}, "as it is" if options.other is None else options.words[0])
    b = Variant("B", others, environment, " ".join(words) or "the same: an A/A test")
    return a, b


def run_options(options: AbOptions) -> RunOptions:
    """Return variant A as `kprof run` would start it."""
    return RunOptions(options.words, options.form)


def _other_command(options: AbOptions, command: tuple[str, ...]) -> tuple[str, ...]:
    if options.other is not None:
        words = (str(options.other), *options.words[1:])
        command = command_of(RunOptions(words, options.form))
    return (*command, *options.arguments)


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise KprofError(f"--env {text} sets nothing", fix="write --env NAME=VALUE")
    return name, value


def _check_patch(patch: str) -> None:
    place, _, name = patch.rpartition(":")
    if not place or not name:
        fix = "write FILE.py:NAME or MODULE:NAME"
        raise KprofError(f"--patch {patch} names no function", fix=fix)
    if place.endswith(".py") and not Path(place).is_file():
        raise KprofError(f"--patch {patch}: there is no {place}", fix="check the path of the patch")


def share_of(text: str) -> float:
    """Return a share written as 1% or 0.01.

    Raises:
        KprofError: it is neither, or not between 0 and 1.
    """
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise KprofError(
            f"--smallest-effect {text}: must be a share between 0 and 1", fix="write 1% or 0.01"
        )
    return value


def measure_host_resolution_ns() -> float:
    """Return the least time that the host's clock tells apart, in ns.

    It is the smallest step between readings that follow one another, the time of a reading
    included, as what the system says of its clock may be finer than its steps. Of a clock that
    does not move meanwhile it is what the system says.
    """
    steps, before_ns = list[int](), time.perf_counter_ns()
    for _ in range(MOST_READINGS):
        now_ns = time.perf_counter_ns()
        if now_ns != before_ns:
            steps.append(now_ns - before_ns)
        if len(steps) == NUM_STEPS_OF_CLOCK:
            break
        before_ns = now_ns
    said_ns = time.get_clock_info("perf_counter").resolution * 1e9
    return float(min(steps)) if steps else said_ns
