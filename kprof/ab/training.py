"""Whether a workload trains as well with B: level L6 of the gate, of the script as it is.

Each run is a process of its own, from the same seed or another one. The runs of A show what its
own results do from run to run; of A and B, losses and norms of gradients are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kprof.ab.variants import AbOptions, Tell
from kprof.collect.trials import Schedule, TrialError, TrialInterrupted, Variant, run_trial
from kprof.errors import counted
from kprof.kernels.correctness.check import MODEL_LEVELS
from kprof.kernels.correctness.levels import LEVELS, GateReport, Level, not_run
from kprof.kernels.correctness.script_losses import PATCH, Trained, read
from kprof.kernels.correctness.subject import Arm, Curve, Model

NAME = "L6"
# Two runs of A whose first losses differ by more than rounding began from other weights or data.
MOST_APART = 1e-3
WINDOW_S = 0.05


def trained_alike(a: Variant, b: Variant, options: AbOptions, folder: Path, tell: Tell) -> Level:
    """Run both variants for `options.losses` steps, several times, and judge their losses."""
    runs = _Runs(a, b, options, folder, tell)
    try:
        first, again = runs.take("replaced", 0), runs.take("again", 0)
        why = why_not_repeated(first.curve, again.curve)
        if why:
            return not_run(NAME, why)
        model = Model(
            Path(options.words[0]).name,
            train=runs.curve,
            training_dtype=first.dtype,
        )
        with runs.reusing(first, again):
            return MODEL_LEVELS[NAME](model)
    except TrialInterrupted:
        return not_run(NAME, "the training runs were stopped by hand")
    except TrialError as error:
        return not_run(NAME, f"a training run failed: {error.problem}")


def why_not_repeated(one: Curve, other: Curve) -> str:
    """Return why two runs of A cannot show what B does; empty: they can."""
    if not one.losses or not other.losses:
        return (
            "no step of an optimizer was seen after a backward pass from one number, which is what "
            "is taken for a loss"
        )
    apart = abs(one.losses[0] - other.losses[0]) / max(abs(one.losses[0]), 1e-12)
    if apart > MOST_APART:
        return (
            f"two runs of A begin with losses that differ by {apart:.2g} of their value: let "
            "weights and data depend on seeds alone"
        )
    return ""


def report_of(subject: str, level: Level) -> GateReport:
    """Return the gate's report of a level alone."""
    others = tuple(
        not_run(name, "kprof ab --losses runs L6 alone") for name in LEVELS if name != level.name
    )
    levels = sorted((*others, level), key=lambda one: one.name)
    return GateReport(subject, tuple(levels), (level.name,))


class _Runs:
    """Training runs, one after the other."""

    def __init__(
        self, a: Variant, b: Variant, options: AbOptions, folder: Path, tell: Tell
    ) -> None:
        self._variants = {"replaced": a, "again": a, "new": b}
        self._options, self._folder, self._tell = options, folder, tell
        self._num_steps = options.losses or 0
        self._num_runs = 0
        self._kept: dict[tuple[Arm, int], Trained] = {}

    @contextmanager
    def reusing(self, first: Trained, again: Trained) -> Iterator[None]:
        """Let the first run of each arm be one that was taken before."""
        self._num_steps = len(first.curve.losses)
        self._kept = {("replaced", 0): first, ("again", 0): again}
        yield

    def curve(self, arm: Arm, seed: int) -> Curve:
        """Return the curve of a run."""
        kept = self._kept.pop((arm, seed), None)
        return (kept or self.take(arm, seed)).curve

    def take(self, arm: Arm, seed: int) -> Trained:
        """Run the workload for its number of steps."""
        self._num_runs += 1
        variant = self._variants[arm]
        steps = counted(self._num_steps, "step")
        self._tell(f"training run {self._num_runs} of {variant.label}: {steps}, seed {seed}")
        folder = self._folder / f"{self._num_runs:02d}"
        path = folder.resolve() / "losses.jsonl"
        names = self._options.swap if variant.label == "B" else ""
        schedule = Schedule(
            "B" * self._num_steps,
            skip=0,
            window_s=WINDOW_S,
            patch=PATCH,
            patch_arguments=(str(path), names),
            seed=seed,
        )
        # A set of strings has another order in each process.
        fixed = {**variant.environment, "PYTHONHASHSEED": "0"}
        run_trial(
            replace(variant, environment=fixed),
            schedule,
            folder,
            is_enough=lambda windows: (
                len(read(path, self._num_steps).curve.losses) >= self._num_steps
            ),
        )
        return read(path, self._num_steps)
