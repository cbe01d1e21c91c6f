"""The run of the levels that are asked for, in order, with one result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kprof.errors import KprofError
from kprof.kernels.correctness.broken import GpuBrokenError
from kprof.kernels.correctness.levels import LEVELS, GateReport, Level, not_run
from kprof.kernels.correctness.subject import Curve, Model, Subject, Timing


class GateError(KprofError):
    """A subject that the gate cannot look at."""


def check(
    subject: Subject | None = None,
    levels: Sequence[str] = LEVELS,
    *,
    model: Model | None = None,
    timing: Timing | None = None,
) -> GateReport:
    """Judge a replacement, alone (L0, L1) and in its model (L2 to L6), at the levels asked for.

    Raises:
        GateError: an unknown level, or nothing to look at.
    """
    unknown = sorted(set(levels) - set(LEVELS))
    if unknown or not levels:
        raise GateError(
            f"unknown levels: {', '.join(unknown)}" if unknown else "no level was asked for",
            fix=f"choose among {', '.join(LEVELS)}",
        )
    if subject is None and model is None:
        raise GateError("there is nothing to check", fix="give a subject, a model, or both")
    asked = tuple(name for name in LEVELS if name in levels)
    found: list[Level] = []
    broken: GpuBrokenError | None = None
    for name in LEVELS:
        if name not in asked:
            found.append(not_run(name, "not asked for"))
        elif broken:
            found.append(not_run(name, "the GPU refuses all work since then"))
        else:
            try:
                found.append(_run(name, subject, model, timing))
            except GpuBrokenError as error:
                broken = error
                found.append(error.level(name))
    parts = [part for part in (subject, model) if part is not None]
    return GateReport(
        subject=parts[0].name,
        levels=tuple(found),
        asked=asked,
        changes_precision=any(part.precision == "lower" for part in parts),
        is_gpu_broken=broken is not None,
    )


def _run(name: str, subject: Subject | None, model: Model | None, timing: Timing | None) -> Level:
    if name in ("L0", "L1"):
        return _run_subject(name, subject, timing)
    if model is None:
        return not_run(name, "no model was given")
    return MODEL_LEVELS[name](model)


def _run_subject(name: str, subject: Subject | None, timing: Timing | None) -> Level:
    if subject is None:
        return not_run(name, "no function was given, only a model")
    if name == "L0":
        from kprof.kernels.correctness.integrity import check_integrity

        return check_integrity(subject, timing)
    from kprof.kernels.correctness.numerics import check_numerics

    return check_numerics(subject)


def _layers(model: Model) -> Level:
    from kprof.kernels.correctness.model_levels import check_layers

    if model.hidden is None:
        return not_run("L2", "the residual stream was not given")
    truth = model.hidden_truth() if model.hidden_truth else None
    arms = (model.hidden("replaced"), model.hidden("again"), model.hidden("new"))
    return check_layers(*arms, truth=truth)


def _logits(model: Model) -> Level:
    from kprof.kernels.correctness.model_levels import check_logits

    if model.logits is None:
        return not_run("L3", "no logits were given")
    arms = (model.logits("replaced"), model.logits("again"), model.logits("new"))
    return check_logits(*arms, precision=model.precision)


def _generation(model: Model) -> Level:
    from kprof.kernels.correctness.model_levels import check_generation

    if model.generate is None:
        return not_run("L4", "no generations were given")
    return check_generation(
        model.generate("replaced"), model.generate("again"), model.generate("new")
    )


def _task(model: Model) -> Level:
    from kprof.kernels.correctness.model_levels import check_task

    if model.answers is None:
        return not_run("L5", "no task was given")
    return check_task(model.answers("replaced"), model.answers("again"), model.answers("new"))


def _training(model: Model) -> Level:
    from kprof.kernels.correctness.model_levels import MOST_AGAIN, NUM_SEEDS, check_training

    if model.train is None:
        return not_run("L6", "no training run was given")
    others = [model.train("replaced", seed) for seed in range(1, NUM_SEEDS)]
    replaced, new = model.train("replaced", 0), model.train("new", 0)
    again: list[Curve] = []
    while True:
        again.append(model.train("again", 0))
        level = check_training(replaced, again, new, others, dtype=model.training_dtype)
        if level.state != "undecided" or len(again) == MOST_AGAIN:
            return level


MODEL_LEVELS: dict[str, Callable[[Model], Level]] = {
    "L2": _layers,
    "L3": _logits,
    "L4": _generation,
    "L5": _task,
    "L6": _training,
}
