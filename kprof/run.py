"""The way of a workload to its report: check, launch, open the recording, in this order.

`run` records one window of a workload that ends, `run_service` (`--trigger`) windows of a service,
`count` adds hardware counters by running a workload once more.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from kprof.collect.launch import LaunchOptions, LaunchResult, command_for, launch
from kprof.collect.nsys import find_program
from kprof.collect.recorder.kprof_recorder.chosen import PER_HOST, spans_in
from kprof.collect.service import Service, Trigger, Window
from kprof.errors import INTERRUPTED, KprofError, LaunchError
from kprof.kernels.swap.swap_report import AUTO, SWAP_REPORT
from kprof.storage import make_folder, make_next, remove_empty

if TYPE_CHECKING:
    from kprof.collect.readers.ncu.program import Window as CountedWindow
    from kprof.opened import Opened, Progress
    from kprof.trace import Trace

Form = Literal["script", "module", "command"]


@dataclass(frozen=True)
class RunOptions:
    """The workload and what is recorded of it."""

    words: tuple[str, ...]
    """A script and its arguments, a module and its arguments, or a whole command."""
    form: Form = "script"
    out: Path | None = None
    skip: int = 5
    """Warm-up steps before the recorded ones."""
    steps: int = 3
    """Steps to record."""
    stacks: bool = False
    memory: bool = False
    shapes: bool = True
    force: bool = False
    seconds: float | None = None
    """The longest that a window may take; None: as long as its steps take."""
    nsys: bool = False
    """Whether Nsight Systems records, instead of torch's profiler."""
    ncu: bool = False
    """Whether Nsight Compute counts what the most expensive kernels do, in another run."""
    counters: bool = False
    """Whether hardware counters are sampled in the same run."""
    swap: str | None = None
    """Kernels that are swapped in after the first step: "KERNEL,KERNEL=PROVIDER,…", or AUTO."""
    budget_s: float | None = None
    """Time to choose kernels for AUTO; None: as usual, or a choice that was kept."""
    stops_after_recording: bool = False
    """Whether the workload is ended once its steps are recorded."""
    ranks: str | None = None
    """The ranks to record, as 0,8-15, or one of each host; None: all."""


@dataclass(frozen=True)
class RunOutcome:
    """How the workload ended, and the analyzed recording."""

    exit_code: int
    """The workload's own, always."""
    folder: Path
    messages: tuple[str, ...]
    """About the recording, for stderr."""
    opened: Opened | None
    trouble: KprofError | None = None
    """Why there is no report, although the workload ran."""


NOT_SWAPPED = (
    "No kernel was swapped in: the workload took no second step, or ended before it could report "
    "the swap. The recording is of its own code."
)


Choosing = Callable[[RunOptions, tuple[str, ...], Path], tuple[str, ...]]


def run(
    options: RunOptions,
    progress: Progress = lambda stage: None,
    choose: Choosing | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> RunOutcome:
    """Run a workload under the recorder and report on it: the main path of `kprof run`.

    Raises `LaunchError` only for problems before the workload starts. Afterwards its
    exit code stands, and kprof's own trouble is in the outcome.

    Args:
        options: Of the run.
        progress: Told the name of each stage.
        choose: Takes the options, the command and the run's folder; returns the kernels that pay,
            for a swap of `auto`.
        say: Hears when the recording begins and when it is over.
    """
    command = command_of(options)
    _check_ranks(options)
    _check_tracer(options)
    _check_swap(options)
    folder = make_folder(name_of(options), options.out, force=options.force)
    if options.swap == AUTO and choose is not None:
        options = replace(options, swap=",".join(choose(options, command, folder)))
    try:
        launched = launch(launch_options(options, command, folder), say)
    except KeyboardInterrupt:
        # The workload gets those that come before its end.
        return RunOutcome(INTERRUPTED, folder, (), None, _interrupted(folder))
    outcome = report_on(launched, folder, progress)
    if options.swap and not (folder / SWAP_REPORT).exists():
        outcome = replace(outcome, messages=(*outcome.messages, NOT_SWAPPED))
    return _with_counters(outcome, progress) if options.ncu else outcome


def command_of(options: RunOptions) -> tuple[str, ...]:
    """Return the command line that starts the workload, its arguments untouched.

    Raises:
        LaunchError: there is no such script, module or program.
    """
    if options.form == "command":
        if shutil.which(options.words[0]) is None:
            raise LaunchError(
                f"{options.words[0]}: command not found",
                fix="check that the program exists and may be executed",
            )
        return options.words
    return command_for(options.words, is_module=options.form == "module")


def _check_ranks(options: RunOptions) -> None:
    """Refuse a text that names no ranks, before a run folder is made."""
    if options.ranks is None or options.ranks == PER_HOST:
        return
    try:
        spans_in(options.ranks)
    except ValueError as error:
        raise LaunchError(
            f"--ranks {options.ranks}: {error.args[0] or 'nothing'} is no rank",
            fix=f"name ranks and spans of ranks: --ranks 0,8-15, or --ranks {PER_HOST}",
        ) from None


def _check_tracer(options: RunOptions) -> None:
    """Refuse options that Nsight Systems lacks, before a run folder is made."""
    if not options.nsys:
        return
    if options.ranks is not None:
        raise LaunchError(
            "--nsys records all processes of a host at once", fix="leave out --ranks, or --nsys"
        )
    if options.stops_after_recording:
        raise LaunchError(
            "--nsys completes its recording when the workload ends by itself",
            fix="leave out --stop-after-recording, or --nsys",
        )
    if options.stacks or options.memory or options.counters:
        raise LaunchError(
            "--nsys records neither Python stacks nor memory nor counters",
            fix="leave out --stacks, --memory and --counters, or --nsys",
        )
    find_program()


def _check_swap(options: RunOptions) -> None:
    """Refuse unknown kernels before the workload starts."""
    if not options.swap:
        return
    if options.ncu:
        raise LaunchError(
            "--ncu counts in another run, into which no kernel would be swapped",
            fix="leave out --ncu, or --swap",
        )
    if not options.skip:
        raise LaunchError(
            "kernels are swapped in after the first step, which --skip 0 would record",
            fix="let it skip a few: --skip 5",
        )
    if options.swap == AUTO:
        return
    # Imported only where needed: it imports torch.
    from kprof.kernels.swap.swapping import Swap

    Swap((), options.swap.split(","))


def name_of(options: RunOptions) -> str:
    """Return the name of a run: its script, or the last part of its module."""
    if options.form == "module":
        return options.words[0].rpartition(".")[2]
    return Path(options.words[0]).stem or "run"


def launch_options(options: RunOptions, command: tuple[str, ...], folder: Path) -> LaunchOptions:
    """Return the launcher's options for a run into `folder`."""
    return LaunchOptions(
        command=command,
        out=folder,
        skip=options.skip,
        steps=options.steps,
        stacks=options.stacks,
        memory=options.memory,
        counters=options.counters,
        # Samples of counters have the times of the window that they were taken in.
        light=not options.counters,
        shapes=options.shapes,
        seconds=options.seconds,
        nsys=options.nsys,
        swap=options.swap,
        stops_after_recording=options.stops_after_recording,
        ranks=options.ranks,
    )


def report_on(launched: LaunchResult, folder: Path, progress: Progress) -> RunOutcome:
    """Read, analyze and report a recording; its raw files stay in every case."""
    if not launched.parts:
        remove_empty(folder)
        return RunOutcome(launched.exit_code, folder, launched.messages, None)
    opened: Opened | None = None
    trouble: KprofError | None = None
    try:
        # Imported after the workload has ended: it must not wait for pandas or share memory.
        from kprof.opened import open_recorded

        opened = open_recorded(folder, progress)
    except KeyboardInterrupt:
        trouble = _interrupted(folder)
    except KprofError as error:
        trouble = error
    except OSError as error:
        trouble = KprofError(
            f"the report cannot be written: {error}",
            fix=f"make room, then: kprof open {folder} --force",
        )
    return RunOutcome(launched.exit_code, folder, launched.messages, opened, trouble)


def _interrupted(folder: Path) -> KprofError:
    return KprofError(
        "interrupted before the report was written; the workload's recording is complete",
        fix=f"kprof open {folder} --force",
    )


def _with_counters(outcome: RunOutcome, progress: Progress) -> RunOutcome:
    """Add hardware counters of the most expensive kernels; without them, add a message."""
    if outcome.opened is None:
        return outcome
    try:
        return replace(outcome, opened=count(outcome.folder, progress=progress))
    except KprofError as error:
        told = f"Nothing was counted: {error.problem}. To fix that, {error.fix}."
        return replace(outcome, messages=(*outcome.messages, told))


# By default: how many functions are counted, and how many launches of all of them.
NUM_COUNTED = 10
# Each is run several times over, with its memory saved and restored: some 20 ms.
MOST_LAUNCHES = 1_000


class Launched(msgspec.Struct):
    """The fields of launch.json that are read here."""

    command: tuple[str, ...]
    cwd: str


def count(
    run: Path,
    num_kernels: int = NUM_COUNTED,
    most_launches: int = MOST_LAUNCHES,
    progress: Progress = lambda stage: None,
) -> Opened:
    """Add hardware counters of a run's most expensive kernels, and analyze the run again.

    The run's own command is started again, and the first of its recorded steps is profiled.

    Raises:
        KprofError: `run` is no recording that could be run again, or nothing could be counted.
    """
    # Imported here for the same reason: `kprof run` launches without pandas.
    from kprof.collect.readers.ncu.program import profile
    from kprof.opened import open_run, open_trace

    raw = run / "raw"
    if not run.exists():
        raise KprofError(f"{run} does not exist", fix="check the path")
    if not (raw / "launch.json").is_file():
        raise KprofError(
            f"{run} is not a recording of kprof run, so its command is unknown",
            fix="record the workload with `kprof run`, then name the folder that it wrote",
        )
    progress("reading")
    trace = open_trace(run)
    launched = msgspec.json.decode((raw / "launch.json").read_bytes(), type=Launched)
    window = window_of(trace, num_kernels, most_launches)
    progress("counting")
    profile(launched.command, Path(launched.cwd), raw, window)
    return open_run([run], None, force=True, progress=progress)


def window_of(trace: Trace, num_kernels: int, most_launches: int) -> CountedWindow:
    """Choose what to profile: the functions that take most time in an analyzed recording.

    Raises:
        KprofError: nothing of the recording can be profiled.
    """
    from kprof.collect.readers.ncu.join import function_in
    from kprof.collect.readers.ncu.program import Window as CountedWindow

    if trace.is_host_only:
        raise KprofError(
            f"{trace.meta.source} used no GPU, so there is nothing to count",
            fix="record the workload where it uses a GPU of NVIDIA",
        )
    if trace.meta.num_ranks > 1:
        raise KprofError(
            f"{trace.meta.source} has {trace.meta.num_ranks} ranks: running the kernels of one "
            "over and over would keep the others waiting in their collectives",
            fix="record and count a run of one rank",
        )
    kernels = trace.kernels
    is_chosen = (kernels["activity"] == "kernel") & (kernels["kind"] != "collective")
    chosen = kernels[is_chosen.to_numpy(bool)]
    time_ns = chosen.groupby("name", observed=True)["duration_ns"].sum()
    by_function = time_ns.groupby([function_in(str(name)) for name in time_ns.index]).sum()
    longest = by_function.sort_values(ascending=False, kind="stable").head(num_kernels)
    if not len(longest):
        raise KprofError(
            f"{trace.meta.source} holds no kernel that can be run alone",
            fix="record a part of the workload that computes",
        )
    steps = trace.meta.recording.steps_recorded if trace.meta.recording else ()
    first = int(min(steps)) if steps else None
    return CountedWindow(tuple(longest.index), most_launches, first)


# The longest window of a service, in seconds, if the user does not say.
SERVICE_SECONDS = 30.0


def run_service(
    options: RunOptions, trigger: str, say: Callable[[str], None] = lambda message: None
) -> RunOutcome:
    """Run a service to its end; every window of it becomes a run with a report of its own.

    Raises `LaunchError` only for problems before the service starts. `say` gets messages
    for the user while it runs.
    """
    kind = Trigger.parse(trigger)
    _check_ranks(options)
    _check_service(options)
    command = command_of(options)
    folder = make_folder(name_of(options), options.out, force=options.force)
    bounded = replace(
        options, seconds=SERVICE_SECONDS if options.seconds is None else options.seconds
    )

    def report(window: Window) -> None:
        for message in window.messages:
            say(message)
        if window.parts:
            open_apart(window.folder)
        elif window.folder != folder:
            remove_empty(window.folder)

    service = Service(
        launch_options(bounded, command, folder), kind, lambda: make_next(folder), report
    )
    say(service.instruction)
    exit_code = service.run()
    remove_empty(folder)
    messages = () if service.num_windows else ("No recording was requested.",)
    return RunOutcome(exit_code, folder, messages, None)


def _check_service(options: RunOptions) -> None:
    """Refuse options that a service lacks, before it starts."""
    if options.nsys:
        raise LaunchError(
            "--nsys records one window and --trigger many, so they do not go together",
            fix="leave one of them out",
        )
    if options.stops_after_recording:
        raise LaunchError(
            "--stop-after-recording ends the workload and --trigger keeps it running",
            fix="leave one of them out",
        )
    if options.ncu:
        raise LaunchError(
            "--ncu runs the workload once more, which a service does not end for",
            fix="leave out --ncu; kprof ncu RUN counts for a workload that ends by itself",
        )
    if options.swap:
        raise LaunchError(
            "--swap swaps kernels in after the first step, and --trigger records no steps",
            fix="call kprof.swapped(model, ...) in the service itself",
        )


def open_apart(folder: Path) -> None:
    """Analyze a window in a process of its own, so that none of its memory stays beside a service.

    Its output goes to stderr: stdout is the service's.
    """
    command = (sys.executable, "-m", "kprof", "open", str(folder))
    subprocess.run(command, stdout=sys.stderr, check=False, start_new_session=True)
