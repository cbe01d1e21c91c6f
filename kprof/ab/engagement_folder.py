"""The folder of an engagement: its entries, recognised, added, read."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from kprof.ab.pricing import read_prices
from kprof.analyze.calibration.error_rates import Calibration
from kprof.analyze.cost.of_runs import with_worth
from kprof.analyze.engagement import (
    ALL_FINDINGS,
    ALL_SWAPS,
    SCHEMA,
    AnyContent,
    BenchAdded,
    Bet,
    CalibrationAdded,
    ComparisonAdded,
    CostAdded,
    Decided,
    Engagement,
    Entry,
    GateAdded,
    Holding,
    Opened,
    Predicted,
    PredictionAdded,
    RunAdded,
    ServiceLevelAdded,
    Source,
    TimeSpent,
    When,
    without_folders,
)
from kprof.analyze.findings.scores import RecordedPrediction, began_s, predictions_in
from kprof.analyze.findings.unexplained import RULE as UNEXPLAINED
from kprof.comparison import FILE as COMPARISON_FILE
from kprof.comparison import as_read, read
from kprof.errors import KprofError
from kprof.findings import Diagnosis, Finding, Saving, with_ids
from kprof.report.partner.disclosure import Redactor
from kprof.report.partner.evidence import Evidence, Kind, parts_of
from kprof.storage import FINDINGS_FILE, is_saved, load
from kprof.trace import SCHEMA as TABLES
from kprof.trace import Prediction, Trace


def init(folder: Path, name: str | None = None) -> Engagement:
    """Begin an engagement in a folder, which may hold other files.

    Raises:
        KprofError: there is one already, or nothing can be written there.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.glob("0001-*.json"))):
        raise KprofError(
            f"{folder} is a file, or holds an engagement already",
            fix="name another folder; kprof engage status shows the content of one",
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
            a prediction that does not exist.
    """
    before = engagement = read_engagement(folder)
    if not paths:
        raise KprofError("nothing to add", fix=f"kprof engage add {folder} RUN.kprof")
    # All are read and checked before the first is written.
    for found in [recognise(path, when) for path in paths]:
        _refuse_again(engagement, found, before.entries[-1].number)
        content = found.content
        if isinstance(content, ComparisonAdded):
            by_s = began_s(content.comparison)
            bet = _bet(predictions_in(engagement, by_s), content, tests)
            content = msgspec.structs.replace(content, bet=bet)
        elif tests is not None:
            problem = f"{found.source.name} is no comparison, so it tests no prediction"
            raise KprofError(problem, fix="leave out --tests")
        for one in (content, *found.besides):
            entry = _next(engagement, one, found.source)
            engagement = Engagement(folder, (*engagement.entries, entry))
    added = list(engagement.entries[len(before.entries) :])
    for entry in added:
        _write(entry, folder)
    return added


def predict(folder: Path, name: str, gain: tuple[float, float]) -> Entry:
    """Add a prediction of a change that no rule proposes, as shares of a step.

    Raises:
        KprofError: there is no run yet, or the interval is none.
    """
    engagement = read_engagement(folder)
    # Without steps, savings are shares of the run's window.
    steps_ns = [run.true_step_ns or run.window_ns for _, run in engagement.of(RunAdded)]
    if not steps_ns:
        raise KprofError(
            "no run was added yet, so there is no step to take a share of",
            fix=f"add one first: kprof engage add {folder} RUN.kprof",
        )
    if not -1 < gain[0] <= gain[1] < 1:
        raise KprofError(
            f"--gain {gain[0]:g},{gain[1]:g}: must be two shares below 1, the lower one first",
            fix=WRITTEN,
        )
    if not name.strip():
        raise KprofError("the prediction has no name", fix=WRITTEN)
    for entry, known in _predicted(engagement):
        if known.name == name.strip():
            raise KprofError(
                f"entry {entry.number} predicts {known.name!r} already",
                fix="predict it under another name: a prediction stands as it was made",
            )
    step_ns = steps_ns[-1]
    low_ns, high_ns = (round(share * step_ns) for share in gain)
    basis = "a person's estimate"
    predicted = Predicted(name.strip(), "own", name.strip(), step_ns, low_ns, high_ns, basis)
    return _append(engagement, folder, PredictionAdded(predicted))


def _predicted(engagement: Engagement) -> Iterator[tuple[Entry, Predicted]]:
    """Yield what findings and people predict, with the entries that hold it."""
    for entry, run in engagement.of(RunAdded):
        yield from ((entry, one) for one in run.predictions if one.source != "what-if")
    for entry, own in engagement.of(PredictionAdded):
        yield entry, own.predicted


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
        raise KprofError(f"{text!r} is not an interval of shares", fix=fix) from error
    return low, high


def decide(folder: Path, text: str) -> Entry:
    """Add a decision to an engagement.

    Raises:
        KprofError: the text is empty, or the folder holds no engagement.
    """
    if not text.strip():
        raise KprofError("there is no decision to write down", fix="say what was decided")
    return _append(read_engagement(folder), folder, Decided(text.strip()))


def _refuse_again(engagement: Engagement, found: Recognised, last_written: int) -> None:
    """Refuse what an entry holds already: the same file, or the same A/B out of another one."""
    pairs = _measured(found.content)
    for one in engagement.entries:
        if one.source == found.source or (pairs and pairs == _measured(one.content)):
            named = one.source.name if one.source else ""
            known = f", as {named}" if named and named != found.source.name else ""
            if one.number > last_written:
                raise KprofError(
                    f"{found.source.name} is named twice{known}", fix="name it once; none was added"
                )
            raise KprofError(
                f"{found.source.name} is entry {one.number} already{known}",
                fix=f"add something else, or remove the file of entry {one.number} first",
            )


def _measured(content: Holding) -> str:
    """Return what tells an A/B from every other: all that its pairs measured, and when.

    Other tools write whole numbers of this size as floats, so starts are compared as these.
    """
    if not isinstance(content, ComparisonAdded):
        return ""
    pairs = content.comparison.pairs
    return ";".join(f"{float(one.start_ns)} {one.a} {one.b}" for one in pairs)


def _bet(
    predictions: list[RecordedPrediction], added: ComparisonAdded, tests: str | None
) -> Bet | None:
    """Return the prediction that a comparison tests; it has to be said where that is not clear."""
    if tests == NOTHING or (tests is None and not predictions):
        return None
    tried = added.comparison.b.removeprefix("--swap ")
    kernels = set(tried.split(",")) if tried != added.comparison.b else None
    fits = [
        one
        for one in predictions
        if (one.predicted.name == tests if tests else set(one.predicted.swap.split(",")) == kernels)
    ]
    if len(fits) == 1:
        return Bet(fits[0].entry.number, fits[0].predicted.name)
    # Answers to what-if are many, and named after whole kernels.
    named = [one.predicted for one in predictions if one.predicted.source != "what-if"]
    names = ", ".join(repr(one.name) for one in named) or "answers to what-if alone"
    raise KprofError(
        f"there is no prediction named {tests!r}"
        if tests
        else f"which prediction does B ({without_folders(added.comparison.b)}) test?",
        fix=f"say it with --tests NAME, or --tests {NOTHING}; predicted were: {names}",
    )


def _append(engagement: Engagement | None, folder: Path, content: AnyContent) -> Entry:
    """Write the next entry, or the first; return it."""
    entry = _next(engagement, content)
    _write(entry, folder)
    return entry


def _next(
    engagement: Engagement | None, content: AnyContent, source: Source | None = None
) -> Entry:
    """Return the next entry, not yet written.

    Secrets and folders in its texts are left out, because the folder may live in git.
    """
    redactor = Redactor("internal", Evidence(""))

    def cleaned(value: object) -> object:
        if isinstance(value, dict):
            return {name: cleaned(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [cleaned(one) for one in value]
        return redactor.clean(value) if isinstance(value, str) else value

    plain = cleaned(msgspec.to_builtins(content))
    number = engagement.entries[-1].number + 1 if engagement is not None else 1
    return _converted(
        _portable(Entry(number, now(), msgspec.convert(plain, type=AnyContent), source))
    )


def _portable(entry: Entry) -> dict[str, Any]:
    """Return an entry as it is written: absolute paths shortened to their last name, in UTF-8."""

    def plain(value: object) -> object:
        if isinstance(value, str):
            return without_folders(value).encode("utf-8", errors="replace").decode()
        if isinstance(value, dict):
            return {plain(name): plain(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return value

    # JSON has no NaN: encoding once makes it null, as a reader will see it.
    told = plain(msgspec.to_builtins(entry))
    return msgspec.json.decode(msgspec.json.encode(told), type=dict[str, Any])


def _write(entry: Entry, folder: Path) -> None:
    """Write an entry into a new file.

    Raises:
        KprofError: nothing can be written there.
    """
    kind = msgspec.inspect.type_info(type(entry.content)).tag  # type: ignore[attr-defined]
    path = folder / f"{entry.number:04d}-{kind}{_slug(entry.source)}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise KprofError(problem, fix="free some space, or change the permissions") from error


def _slug(source: Source | None) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", source.name if source else "").strip("-").lower()
    return f"-{name[:LONGEST_SLUG]}" if name else ""


def read_engagement(folder: Path) -> Engagement:
    """Read all entries.

    Raises:
        KprofError: the folder holds no engagement, a damaged entry, or two with one number.
    """
    paths = sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.json"))
    if not paths:
        raise KprofError(
            f"{folder} holds no engagement", fix=f"begin one: kprof engage init {folder}"
        )
    entries = tuple(_read_entry(path) for path in paths)
    for path, before, entry in zip(paths[1:], entries, entries[1:], strict=False):
        if entry.number == before.number:
            raise KprofError(
                f"{path} is a second entry with the number {entry.number}",
                fix=f"remove it, then add it again: kprof engage add {folder} PATH",
            )
    return Engagement(folder, entries)


def _read_entry(path: Path) -> Entry:
    try:
        raw = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if raw.get("schema") != SCHEMA:
            raise KprofError(
                f"{path.name} is of schema {raw.get('schema')}, and this kprof knows {SCHEMA}",
                fix="use the version of kprof that wrote it, or a newer one",
            )
        entry = _converted(raw)
        _check(entry.content)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not path.name.startswith(f"{entry.number:04d}-"):
        raise _damaged(path, f"it has the number {entry.number}, and its name has another")
    return entry


def _damaged(path: Path, why: str) -> KprofError:
    return KprofError(
        f"{path} is not an entry of an engagement: {why}",
        fix="restore it, for example from git, or remove it",
    )


def _check(content: AnyContent) -> None:
    """Read the saved answers of other commands, which are converted only where they are used."""
    if isinstance(content, ServiceLevelAdded):
        _require(content.verdict and content.targets)
    elif isinstance(content, CostAdded):
        _require(content.figures)
    elif isinstance(content, GateAdded):
        _require(content.subjects)
    elif isinstance(content, BenchAdded):
        _require(content.calls)
    elif isinstance(content, CalibrationAdded):
        msgspec.convert(with_ids(content.said, "doubts"), type=Calibration)
    elif isinstance(content, ComparisonAdded):
        _require(content.comparison.claims)


def _converted(plain: dict[str, Any]) -> Entry:
    """Return an entry; its comparison as this version reads it."""
    content = plain.get("content")
    if isinstance(content, dict) and isinstance(content.get("comparison"), dict):
        content = {**content, "comparison": as_read(content["comparison"])}
    return msgspec.convert({**plain, "content": content}, type=Entry)


BLOCK_BYTES = 1 << 20
LARGEST_BYTES = 1 << 26
LONGEST_SLUG = 40
WRITTEN = "write kprof engage predict DIR NAME --gain 2%,10%"
# Value of `--tests`: the comparison tests no prediction.
NOTHING = "nothing"
KNOWN = (
    "a run (folder of kprof run), a comparison (folder of kprof ab), or the output of "
    "kprof sla, cost, ab, selftest, kernels check or kernels bench with --json, in a file"
)


@dataclass(frozen=True)
class Recognised:
    """The content of a path, and the name and hash of its file."""

    content: AnyContent
    source: Source
    besides: tuple[AnyContent, ...] = ()
    """The other content of the file: targets that A and B of a comparison keep, and costs of B."""


def recognise(path: Path, when: When) -> Recognised:
    """Read a run, a comparison, or the JSON of another command, and shorten it.

    Raises:
        KprofError: it is none of these, or damaged.
    """
    name = path.absolute().resolve().name
    if path.is_dir() and (path / COMPARISON_FILE).is_file():
        return _of_json(path / COMPARISON_FILE, name, when)
    if path.is_dir() and is_saved(path):
        run = with_worth(load(path), read_prices())
        return Recognised(_of_run(run, path, when), Source(name, _hash_of_run(path)))
    if path.is_file():
        return _of_json(path, name, when)
    if not path.exists():
        raise KprofError(f"{path} does not exist", fix=f"name {KNOWN}")
    raise KprofError(
        f"{path} is neither an analyzed run nor a complete comparison",
        fix=f"analyze a trace with kprof open first; otherwise name {KNOWN}",
    )


def _of_json(path: Path, name: str, when: When) -> Recognised:
    if path.stat().st_size > LARGEST_BYTES:
        fix = "analyze a trace with kprof open, and name the run"
        raise KprofError(f"{path} is too large for the result of a command", fix=fix)
    try:
        content = path.read_bytes()
        found = msgspec.json.decode(content)
    except (OSError, msgspec.DecodeError) as error:
        raise KprofError(f"{path} cannot be read: {error}", fix=f"name {KNOWN}") from error
    try:
        contents = tuple(_contents(found, when))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise KprofError(f"{path} cannot be used: {error}", fix="write it again") from error
    if not contents:
        raise KprofError(f"{path} is not a result of kprof", fix=f"name {KNOWN}")
    return Recognised(contents[0], Source(name, hashlib.sha256(content).hexdigest()), contents[1:])


def _contents(found: Any, when: When) -> Iterator[AnyContent]:  # noqa: ANN401 - any JSON
    """Yield the results in the JSON of a command; nothing where it is not known."""
    arms: dict[str, When] = {"A": "before", "B": "after"}
    for kind, said, arm in parts_of(found):
        content = _content(kind, said, arms.get(arm, when))
        _check(content)
        yield content


def _content(kind: Kind, said: Any, when: When) -> AnyContent:  # noqa: ANN401 - any JSON
    if kind == "comparison":
        return ComparisonAdded(replace(read(said), steps_ns={}), str(said.get("calibration", "")))
    if kind == "service level":
        return ServiceLevelAdded(when, said)
    if kind == "cost":
        return CostAdded(when, said)
    if kind == "calibration":
        return CalibrationAdded(said)
    return GateAdded(tuple(said)) if kind == "quality gate" else BenchAdded(tuple(said))


def _require(told: Sized) -> None:
    """Refuse an answer without content; that it can be read was seen in reading it."""
    if not told:
        raise ValueError("nothing follows from it")


def _of_run(trace: Trace, path: Path, when: When) -> RunAdded:
    from kprof.analyze.attribution.steps import split_steps, time_steps
    from kprof.analyze.roofline.utilisation import measure_utilisation

    if trace.diagnosis is None:
        raise KprofError(
            f"{path} was analyzed by a version without findings, so it has no predictions",
            fix=f"analyze it again: kprof open --force {path}",
        )
    times = time_steps(trace)
    shares = measure_utilisation(trace)
    spent = split_steps(trace)
    time = msgspec.convert(
        spent.astype(object).where(spent.notna(), None).to_dict("records"),
        type=tuple[TimeSpent, ...],
        strict=False,
    )
    return RunAdded(
        when,
        trace.meta.command_line,
        tuple(dict.fromkeys(gpu.name for gpu in trace.gpus)),
        trace.meta.versions,
        _median(times.recorded_ns),
        _median(times.unrecorded_ns),
        len(times.recorded_ns),
        sum(one.time_ns for one in time),
        time,
        {
            "mfu": shares.mfu.value,
            "mbu": shares.mbu.value,
            "roofline": shares.roofline.value,
            "busy": shares.busy.value,
        },
        tuple(_predictions(trace.diagnosis, trace.meta.what_if)),
        tuple(one.text for one in trace.meta.caveats),
        len(trace.diagnosis.findings),
    )


def _median(steps_ns: Sequence[int]) -> int | None:
    return round(median(steps_ns)) if steps_ns else None


def _predictions(diagnosis: Diagnosis, what_if: tuple[Prediction, ...]) -> Iterator[Predicted]:
    """Yield what every finding, all of them together, and every what-if question predict."""
    names: dict[str, int] = {}
    known = [one for one in diagnosis.findings if one.rule != UNEXPLAINED]
    for finding in known:
        number = names[finding.rule] = names.get(finding.rule, 0) + 1
        yield _of_finding(finding, f"{finding.rule}-{number}" if number > 1 else finding.rule)
    if diagnosis.together is not None and len(known) > 1:
        saving = diagnosis.together
        yield Predicted(
            ALL_FINDINGS,
            "all findings",
            f"All {len(known)} findings fixed together",
            *_interval(saving),
            worth=saving.worth,
        )
    if diagnosis.swapped is not None:
        kernels = dict.fromkeys(one.swap for one in diagnosis.findings if one.swap)
        claim = f"Saving of {len(kernels)} kernels swapped in together"
        saving = diagnosis.swapped
        yield Predicted(
            ALL_SWAPS,
            "finding",
            claim,
            *_interval(saving),
            swap=",".join(kernels),
            worth=saving.worth,
        )
    for asked in what_if:
        if asked.predicted_step_ns is not None:
            yield _of_question(asked, asked.predicted_step_ns)


def _interval(saving: Saving) -> tuple[int, int | None, int | None, str]:
    return saving.step_ns, saving.low_ns, saving.high_ns, saving.basis


def _of_finding(finding: Finding, name: str) -> Predicted:
    saving = finding.saving or Saving(0, None, None, "no saving was predicted")
    return Predicted(
        name,
        "finding",
        finding.claim,
        *_interval(saving),
        finding.confidence,
        finding.effort,
        finding.swap or "",
        finding.command,
        saving.worth,
    )


def _of_question(asked: Prediction, predicted_step_ns: int) -> Predicted:
    missed = asked.uncertainty_ns or 0
    # Runs of earlier versions have no readings of their own.
    shortest, longest = (
        predicted_step_ns + sign * missed if told is None else told
        for sign, told in ((-1, asked.shortest_step_ns), (1, asked.longest_step_ns))
    )
    what = f"{asked.target} {asked.change}"
    basis = (
        "the recording replayed with this change, under every reading of what it does not hold, "
        "widened by the replay's error and by how the host's time varies"
    )
    least, most = asked.step_ns - longest, min(asked.step_ns - shortest, asked.step_ns)
    return Predicted(what, "what-if", what, asked.step_ns, least, most, basis)


def find_source(source: Source, folder: Path) -> Path | None:
    """Return a run that an engagement summarises, where it lies beside its folder, in it or here.

    None: nothing of that name is there, or it is not the same any more.
    """
    for place in (folder.absolute().parent, folder, Path.cwd()):
        path = place / source.name
        if is_saved(path) and _hash_of_run(path) == source.sha256:
            return path
    return None


def _hash_of_run(path: Path) -> str:
    """Return a hash of the tables and findings; answers that a run is asked for later are none."""
    whole = hashlib.sha256()
    for name in sorted([*(f"{table}.parquet" for table in TABLES), FINDINGS_FILE]):
        digest = hashlib.sha256()
        with (path / name).open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        whole.update(f"{name} {digest.hexdigest()}\n".encode())
    return whole.hexdigest()


def now() -> str:
    """Return the present date, UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
