"""`kprof engage`: what happened for one workload, in the order in which it happened."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from kprof.analyze.score import Promise, began_s, promises_in
from kprof.engagement import (
    AnyContent,
    Bet,
    ComparisonAdded,
    Decided,
    Engagement,
    Entry,
    Holding,
    Opened,
    Predicted,
    PredictionAdded,
    RunAdded,
    Source,
    When,
)
from kprof.entries import read_engagement, seal, without_folders, write
from kprof.errors import KprofError
from kprof.report.partner.evidence import Evidence
from kprof.report.partner.redaction import Redactor
from kprof.summarise import Recognised, recognise

NOTHING = "nothing"


def now() -> str:
    """Return the present date, UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def init(folder: Path, name: str | None = None) -> Engagement:
    """Begin an engagement in a folder, which may hold other files.

    Raises:
        KprofError: there is one already, or nothing can be written there.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.glob("0001-*.json"))):
        raise KprofError(
            f"{folder} is a file, or holds an engagement already",
            fix="name another folder; kprof engage status shows what is in one",
        )
    _append(None, folder, Opened(name or folder.absolute().resolve().name))
    return read_engagement(folder)


def add(
    folder: Path, paths: Sequence[Path], when: When = "before", tests: str | None = None
) -> list[Entry]:
    """Add runs, comparisons and results to an engagement, an entry each; return these.

    `when`: whether what was measured was the workload before the change or after it. `tests`: the
    prediction that a comparison tests, or "nothing"; None: the one whose swap it tried.

    Raises:
        KprofError: a path holds nothing that is known, was added before, or a comparison tests
            a prediction that nobody made.
    """
    before = engagement = read_engagement(folder)
    if not paths:
        raise KprofError("nothing to add", fix=f"kprof engage add {folder} RUN.kprof")
    # All are read and checked before the first is written.
    for found in [recognise(path, when) for path in paths]:
        _refuse_again(engagement, found, len(before.entries))
        content = found.content
        if isinstance(content, ComparisonAdded):
            by_s = began_s(content.comparison)
            bet = _bet(promises_in(engagement, by_s), content, tests)
            content = msgspec.structs.replace(content, bet=bet)
        elif tests is not None:
            problem = f"{found.source.name} is no comparison, so it tests no prediction"
            raise KprofError(problem, fix="leave out --tests")
        for one in (content, *found.besides):
            engagement = _with(engagement, folder, one, found.source)
    added = list(engagement.entries[len(before.entries) :])
    for entry in added:
        write(entry, folder)
    return added


def predict(folder: Path, name: str, gain: tuple[float, float]) -> Entry:
    """Add what somebody predicts of a change that no rule proposes, as shares of a step.

    Raises:
        KprofError: there is no run yet, or the interval is none.
    """
    engagement = read_engagement(folder)
    # Of a run without steps, savings are shares of its window.
    steps_ns = [run.true_step_ns or run.window_ns for _, run in engagement.of(RunAdded)]
    if not steps_ns:
        raise KprofError(
            "there is no run yet whose step this would be a share of",
            fix=f"add one first: kprof engage add {folder} RUN.kprof",
        )
    if not name.strip() or not -1 < gain[0] <= gain[1] < 1:
        raise KprofError(
            f"{gain[0]:g} to {gain[1]:g} is no interval of shares, or it has no name",
            fix="write kprof engage predict DIR NAME --gain 2%,10%",
        )
    step_ns = steps_ns[-1]
    low_ns, high_ns = (round(share * step_ns) for share in gain)
    basis = "a person's estimate"
    predicted = Predicted(name.strip(), "own", name.strip(), step_ns, low_ns, high_ns, basis)
    return _append(engagement, folder, PredictionAdded(predicted))


def gain_of(text: str) -> tuple[float, float]:
    """Return an interval of shares written as 2%,10% or 0.02,0.1.

    Raises:
        KprofError: it is none.
    """
    try:
        low, high = (
            float(one.removesuffix("%")) / (100 if one.endswith("%") else 1)
            for one in text.replace(" ", "").split(",")
        )
    except ValueError as error:
        fix = "write the least and the most gain: --gain 2%,10%"
        raise KprofError(f"{text!r} is no interval of shares", fix=fix) from error
    return low, high


def decide(folder: Path, text: str) -> Entry:
    """Add a decision to an engagement.

    Raises:
        KprofError: the text is empty, or the folder holds no engagement.
    """
    if not text.strip():
        raise KprofError("there is no decision to write down", fix="say what was decided")
    return _append(read_engagement(folder), folder, Decided(text.strip()))


def _refuse_again(engagement: Engagement, found: Recognised, num_written: int) -> None:
    """Refuse what an entry holds already: the same file, or the same A/B out of another one."""
    pairs = _measured(found.content)
    for one in engagement.entries:
        if one.source == found.source or (pairs and pairs == _measured(one.content)):
            named = one.source.name if one.source else ""
            known = f", as {named}" if named and named != found.source.name else ""
            if one.number > num_written:
                raise KprofError(
                    f"{found.source.name} is named twice{known}", fix="name it once; none was added"
                )
            raise KprofError(
                f"{found.source.name} is entry {one.number} already{known}",
                fix="add something else; entries are never replaced",
            )


def _measured(content: Holding) -> str:
    """Return what tells an A/B from every other: all that its pairs measured, and when.

    Other tools write whole numbers of this size as floats, so starts are compared as these.
    """
    if not isinstance(content, ComparisonAdded):
        return ""
    pairs = content.comparison.pairs
    return ";".join(f"{float(one.start_ns)} {one.a} {one.b}" for one in pairs)


def _bet(promises: list[Promise], added: ComparisonAdded, tests: str | None) -> Bet | None:
    """Return the prediction that a comparison tests; it has to be said where that is not clear."""
    if tests == NOTHING or (tests is None and not promises):
        return None
    tried = added.comparison.b.removeprefix("--swap ")
    kernels = set(tried.split(",")) if tried != added.comparison.b else None
    fits = [
        one
        for one in promises
        if (one.predicted.name == tests if tests else set(one.predicted.swap.split(",")) == kernels)
    ]
    if len(fits) == 1:
        return Bet(fits[0].entry.number, fits[0].predicted.name)
    # Answers to what-if are many, and named after whole kernels.
    named = [one.predicted for one in promises if one.predicted.source != "what-if"]
    names = ", ".join(repr(one.name) for one in named) or "answers to what-if alone"
    raise KprofError(
        f"nothing of the name {tests!r} was predicted"
        if tests
        else f"which prediction does B ({without_folders(added.comparison.b)}) test?",
        fix=f"say it with --tests NAME, or --tests {NOTHING}; predicted were: {names}",
    )


def _append(engagement: Engagement | None, folder: Path, content: AnyContent) -> Entry:
    """Write the next entry, or the first; return it."""
    entry = _with(engagement, folder, content).entries[-1]
    write(entry, folder)
    return entry


def _with(
    engagement: Engagement | None, folder: Path, content: AnyContent, source: Source | None = None
) -> Engagement:
    """Return an engagement with an entry more, not yet written.

    It is without the secrets that its texts may hold: the folder may live in git.
    """
    redactor = Redactor("internal", Evidence(""))

    def cleaned(value: object) -> object:
        if isinstance(value, dict):
            return {name: cleaned(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [cleaned(one) for one in value]
        return redactor.clean(value) if isinstance(value, str) else value

    plain = cleaned(msgspec.to_builtins(content))
    return seal(engagement, folder, msgspec.convert(plain, type=AnyContent), source, now())
