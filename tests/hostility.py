"""Runs hostile workloads without and with the recorder, and says in what they differ.

A workload is a script of `tests/hostile/` as its author would have written it, or a folder with
several. Its docstring says what is hostile about it, and comments like `# recorded: 5 6 7` below
that say what nobody can compare. Without them a workload is started as `python SCRIPT` and is one
process whose steps 5, 6 and 7 are recorded, without any message. Where the cases of a workload
differ, there is a line for each:

    # command: {python} -X dev {script} --lr 3     each such line is one more case
    # stdin: 1 2 3                                 what the workload reads
    # streams: closed                              stdin, stdout and stderr are; else pipes
    # environment: PYTHONPATH=site                 a variable besides the caller's own
    # folder: two words                            the name of the folder it runs in
    # permissions: 555                             of that folder, when it starts
    # exits: 3                                     its exit code, if not 0; 128 + n after signal n;
                                                   where it varies by machine: 3 or 4
    # ranks: 0 1                                   the processes that leave a recording; or: none
    # recorded: 5 6 7                              their recorded steps; or: no steps; 3 of them
    # seen: 12                                     the steps of each that kprof counted
    # says: compiled                               a part of what kprof says of it, one a line
    # needs: cuda:2 g++ accelerate                 without which the workload is not run
"""

import ast
import contextlib
import ctypes
import difflib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOSTILE = Path(__file__).parent / "hostile"
# Other workloads and tests run meanwhile, and all take several times as long.
TIMEOUT_S = 300
LONGEST_DIFFERENCE = 40
# torch itself may abort as a process ends, which says nothing of the recorder.
ATTEMPTS = 3
# Every process that a workload starts inherits it, so that those which stay behind are found.
MARK = "HOSTILE_RUN"
# Root may write anywhere as long as it has this; without, permissions hold for it as well.
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1

# Where lines tell the time, the process or an address.
VARYING = (
    (re.compile(rb"\b0x[0-9a-f]{6,}"), b"ADDRESS"),
    (re.compile(rb"\b([IWEF])\d{4} \d\d:\d\d:\d\d[.\d]* \d+ "), rb"\1TIME PID "),
    (re.compile(rb"\[([IWEF])\d{4} \d\d:\d\d:\d\d[.\d]* "), rb"[\1TIME "),
    (re.compile(rb"(\bprocess |\bpid: |\bPID |\bpid=)\d+"), rb"\1PID"),
    (re.compile(rb"\btime( +): \d{4}-\S+"), rb"time\1: TIME"),
    (re.compile(rb'^\{"num_choices": .*\}$', re.MULTILINE), b"TIMES OF KERNELS"),
    (re.compile(rb"\b(USDT|STAGE|INFO|WARNING|ERROR):\d{4}-\S+ \S+ \d+:\d+ "), rb"\1 "),
)

# What `kprof run` does around a workload, without the analysis that follows.
LAUNCH = """
import json, os, sys
from pathlib import Path
from kprof.collect.launch import LaunchOptions, launch
sys.path.remove("")
out, *command = sys.argv[1:]
result = launch(LaunchOptions(tuple(command), Path(out)))
(Path(out) / "said.json").write_text(json.dumps(result.messages))
os._exit(result.exit_code)
"""


@dataclass(frozen=True)
class Workload:
    """One case of one script: how it is started, and what is expected of its recording."""

    path: Path
    hostility: str
    command: str
    number: int | None
    """Which of its commands this is, None where it has one."""
    expected: dict

    @property
    def name(self):
        """The script's name and, of several cases, the number."""
        return self.path.stem if self.number is None else f"{self.path.stem}-{self.number}"

    def words(self):
        """Return the command line, as it is in the folder of the workload."""
        fill = {"python": shlex.quote(sys.executable), "script": f"{self.path.stem}.py"}
        return shlex.split(self.command.format(**fill))


@dataclass(frozen=True)
class Ending:
    """How a workload ended, and all that it left."""

    exit_code: int | None
    """128 + n after signal n; None when it had to be ended."""
    out: bytes
    err: bytes
    files: dict
    """The bytes of every file that it wrote, by name."""
    processes: tuple
    """The command lines of the processes that outlived it."""


@dataclass(frozen=True)
class Observation:
    """The two endings of a workload, and what kprof has of the second."""

    plain: Ending
    recorded: Ending
    recorders: dict
    """What each process's recorder.json says, by rank."""
    messages: tuple


def workloads(folder=HOSTILE):
    """Return every case of every workload."""
    scripts = [p for p in folder.glob("*.py") if p.name != "__init__.py"]
    scripts += [path.parent for path in folder.glob("*/__main__.py")]
    return [case for path in sorted(scripts) for case in _cases(path)]


def _cases(path):
    text = (path / "__main__.py" if path.is_dir() else path).read_text()
    expected = {}
    for name, value in re.findall(r"^# (\w+): (.*)$", text, flags=re.MULTILINE):
        expected.setdefault(name, []).append(value)
    hostility = ast.get_docstring(ast.parse(text))
    default = "{python} -m " + path.stem if path.is_dir() else "{python} {script}"
    commands = expected.pop("command", [default])
    numbers = range(len(commands)) if len(commands) > 1 else [None]
    return [
        Workload(path, hostility, command, number, expected)
        for number, command in zip(numbers, commands, strict=True)
    ]


def find_missing(workload, *, on_gpu=False):
    """Return what a workload needs that is not here, or None."""
    needs = _value(workload, "needs", "").split()
    return next((need for need in needs if not _is_here(need, on_gpu)), None)


@cache
def _is_here(need, on_gpu):
    kind, _, number = need.partition(":")
    if kind == "cuda":
        import torch

        return on_gpu and torch.cuda.device_count() >= int(number or 1)
    if need == "srun" and shutil.which("sinfo"):
        # Slurm's programs alone start nothing.
        return subprocess.run(("sinfo",), capture_output=True).returncode == 0
    return shutil.which(need) is not None or importlib.util.find_spec(need) is not None


def observe(workload, folder, environment=None):
    """Run a workload in `folder` twice at the same time: as it is, and under the recorder.

    Once more where it does not end as it should without the recorder.
    """
    for attempt in range(ATTEMPTS):
        seen = _observe_once(workload, folder / str(attempt), environment)
        if seen.plain.exit_code in _exit_codes(workload):
            break
    return seen


def _exit_codes(workload):
    return [int(code) for code in _value(workload, "exits", "0").split(" or ")]


def _observe_once(workload, folder, environment):
    run = folder / "run.kprof"
    launch = (sys.executable, "-c", LAUNCH, str(run))
    places = [folder / name / _value(workload, "folder", "here") for name in ("plain", "kprof")]
    with ThreadPoolExecutor(2) as pool:
        sides = zip(((), launch), places, strict=True)
        jobs = [pool.submit(_end, workload, *side, environment) for side in sides]
        plain, recorded = (job.result() for job in jobs)
    recorders = {}
    for path in sorted(run.glob("raw/rank*-pid*/recorder.json")):
        recorder = json.loads(path.read_text())
        recorders.setdefault(recorder["rank"], []).append(recorder)
    said = run / "said.json"
    messages = json.loads(said.read_text()) if said.exists() else ["kprof did not live to the end"]
    return Observation(plain, recorded, recorders, tuple(messages))


def _end(workload, around, place, environment):
    place.mkdir(parents=True)
    _copy(workload.path, place)
    place.chmod(int(_value(workload, "permissions", "755"), 8))
    words = [*around, *workload.words()]
    if _value(workload, "streams", "open") == "closed":
        words = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', *words]
    mark = uuid.uuid4().hex
    own = dict(pair.split("=", 1) for pair in workload.expected.get("environment", []))
    given = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, **(environment or {}), **own}
    out, err = (place.parent / f"{place.parent.name}.{name}" for name in ("out", "err"))
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            words,
            cwd=place,
            env=given,
            stdin=subprocess.PIPE,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
            preexec_fn=_obey_permissions if "permissions" in workload.expected else None,
        )
        exit_code = _wait(process, "\n".join(workload.expected.get("stdin", [])).encode())
    left = _left_over(mark)
    place.chmod(0o755)
    return Ending(exit_code, _stable(out, place), _stable(err, place), _files(place), left)


def _copy(path, place):
    if path.is_dir():
        shutil.copytree(path, place / path.name, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(path, place)


def _obey_permissions():
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def _wait(process, text):
    try:
        process.communicate(text, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    return 128 - process.returncode if process.returncode < 0 else process.returncode


def _left_over(mark):
    """Return the processes that are still there, after a moment for those about to leave."""
    for _ in range(40):
        found = _marked(mark)
        if not found:
            return ()
        time.sleep(0.05)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return tuple(found.values())


def _marked(mark):
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ")
    return found


def _stable(stream, place):
    text = stream.read_bytes().replace(os.fsencode(place), b"FOLDER")
    for pattern, replacement in VARYING:
        text = pattern.sub(replacement, text)
    return text


def _files(place):
    files = [p for p in place.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in files}


def _value(workload, name, default):
    """Return what the workload says of it: one value for all of its cases, or one for each."""
    values = workload.expected.get(name, [default])
    return values[workload.number if len(values) > 1 and workload.number is not None else -1]


def differences(workload, seen):
    """Return in what the recorded workload differs from the plain one, or from what is expected."""
    found = [*_of_endings(seen.plain, seen.recorded), *_of_recording(workload, seen)]
    if seen.plain.exit_code not in (expected := _exit_codes(workload)):
        found.append(f"exits with {seen.plain.exit_code}, not {expected}: {seen.plain.err[-800:]}")
    return found


def _of_endings(plain, recorded):
    found = []
    if None in (plain.exit_code, recorded.exit_code):
        found.append(f"hangs: exit codes {plain.exit_code} and {recorded.exit_code}")
    for what in ("exit_code", "out", "err", "files", "processes"):
        without, with_it = getattr(plain, what), getattr(recorded, what)
        if without != with_it:
            found.append(f"{what}, without kprof and with it:\n{_compared(without, with_it)}")
    return found


def _compared(without, with_it):
    """Return the first lines that differ, the plain side's after a minus."""
    sides = [
        (side.decode(errors="replace") if isinstance(side, bytes) else str(side)).splitlines()
        for side in (without, with_it)
    ]
    lines = [line[:2000] for line in difflib.unified_diff(*sides, lineterm="", n=0)][2:]
    return "\n".join(line for line in lines[:LONGEST_DIFFERENCE] if not line.startswith("@@"))


def _of_recording(workload, seen):
    found = []
    ranks = [] if _value(workload, "ranks", "0") == "none" else _numbers(workload, "ranks", "0")
    described = {
        rank: [r for r in some if r["window"] or not r["problems"]]
        for rank, some in seen.recorders.items()
    }
    present = sorted(rank for rank, some in described.items() for _ in some)
    if present != ranks:
        found.append(f"ranks {present} left a recording, not {ranks}; {seen.messages}")
    for recorder in (r for some in described.values() for r in some):
        steps = [step["index"] for step in recorder["steps"] if step["recorded"]]
        if not _is_expected(steps, _value(workload, "recorded", "5 6 7")):
            found.append(f"steps {steps} of rank {recorder['rank']} were recorded")
        num_seen = int(_value(workload, "seen", recorder["num_steps_seen"]))
        if recorder["num_steps_seen"] != num_seen:
            found.append(f"{recorder['num_steps_seen']} steps were counted, not {num_seen}")
    caveats = [c for some in described.values() for r in some for c in r["caveats"]]
    says = workload.expected.get("says", [])
    if workload.number is not None and len(says) > 1:
        says = [says[workload.number]]
    found += [
        f"kprof does not say: {s}" for s in says if s not in "\n".join([*seen.messages, *caveats])
    ]
    found += [f"kprof says: {m}" for m in seen.messages if not any(s in m for s in says)]
    return found


def _numbers(workload, name, default):
    return [int(word) for word in _value(workload, name, default).split() if word.isdigit()]


def _is_expected(steps, words):
    if words.endswith("of them"):
        return len(steps) == int(words.split()[0])
    return steps == [int(word) for word in words.split() if word.isdigit()]
