"""`kprof run`: the main path. Launch → read → analyze → report, top to bottom."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kprof.collect.launch import LaunchOptions, LaunchResult, command_for, launch
from kprof.errors import KprofError, LaunchError
from kprof.open import Opened, Progress, open_recorded


@dataclass(frozen=True)
class RunOptions:
    """What to run and what to record of it."""

    words: tuple[str, ...]
    """A script and its arguments, a module and its arguments, or a whole command."""
    form: str = "script"
    """script, module or command."""
    out: Path | None = None
    skip: int = 5
    """Warm-up steps before the recorded ones."""
    steps: int = 3
    """Steps to record."""
    stacks: bool = False
    memory: bool = False
    shapes: bool = True
    force: bool = False


@dataclass(frozen=True)
class RunOutcome:
    """What the workload did, and what kprof made of it."""

    exit_code: int
    """The workload's own, always."""
    folder: Path
    messages: tuple[str, ...]
    """What kprof has to say about the recording, for stderr."""
    opened: Opened | None
    trouble: KprofError | None = None
    """Why there is no report, although the workload ran."""


def run(options: RunOptions, progress: Progress = lambda stage: None) -> RunOutcome:
    """Run a workload under the recorder and report on it.

    Raises `LaunchError` only for what goes wrong before the workload starts. Afterwards its
    exit code stands, and kprof's own trouble is in the outcome.
    """
    command = command_of(options)
    folder = prepare_folder(options)
    launched = launch(
        LaunchOptions(
            command=command,
            out=folder,
            skip=options.skip,
            steps=options.steps,
            stacks=options.stacks,
            memory=options.memory,
            shapes=options.shapes,
        )
    )
    return report_on(launched, folder, progress)


def command_of(options: RunOptions) -> tuple[str, ...]:
    """Return the command line that starts the workload, its arguments untouched."""
    if options.form == "command":
        return options.words
    return command_for(options.words, is_module=options.form == "module")


def prepare_folder(options: RunOptions) -> Path:
    """Make the run folder: as named, else the script's name and a number if that is taken."""
    if options.out is not None:
        if options.out.exists() and any(options.out.iterdir()):
            if not options.force:
                raise LaunchError(
                    f"{options.out} exists already", fix="name another --out, or pass --force"
                )
            _remove_run(options.out)
        options.out.mkdir(parents=True, exist_ok=True)
        return options.out
    stem = Path(options.words[0]).stem or "run"
    names = (f"{stem}.kprof" if n == 1 else f"{stem}-{n}.kprof" for n in range(1, 10_000))
    folder = next(Path.cwd() / name for name in names if not (Path.cwd() / name).exists())
    folder.mkdir()
    return folder


def _remove_run(folder: Path) -> None:
    """Empty a former run's folder; anything else in the way is not ours to delete."""
    if not (folder / "raw").is_dir() and not (folder / "meta.json").is_file():
        raise LaunchError(
            f"{folder} is not a run folder, so --force does not empty it",
            fix="name another --out",
        )
    shutil.rmtree(folder)


def report_on(launched: LaunchResult, folder: Path, progress: Progress) -> RunOutcome:
    """Read, analyze and report what was recorded; the raw recording stays whatever happens."""
    opened: Opened | None = None
    trouble: KprofError | None = None
    try:
        opened = open_recorded(folder, progress)
    except KprofError as error:
        trouble = error
    return RunOutcome(launched.exit_code, folder, launched.messages, opened, trouble)
