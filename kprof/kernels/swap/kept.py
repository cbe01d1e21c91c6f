"""Choices of `--swap auto` that are kept, and used again for the same workload.

A choice is for a command, the Python files beside its script, the GPUs, versions, and the code of
the kernels. Where any of them differs, kernels are chosen anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from kprof.errors import KprofError
from kprof.kernels.swap.swap_report import AUTO, Checked, Choice
from kprof.storage import cache_folder

FOLDER, GATES = "choices", "gates"
# Packages whose code runs in kernels, or is replaced by them.
PACKAGES = ("torch", "triton", "transformers", "diffusers", "liger-kernel", "quack-kernels")
# Variables that decide which GPUs run, and how kernels do.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")
KERNELS = Path(__file__).parent.parent
# In a folder with more Python files than this, the script alone is looked at.
MOST_FILES = 500
# Variables of a workload in which kprof itself swaps kernels, tries them, or compares variants.
BY_KPROF = ("KPROF_SCHEDULE", "KPROF_SWAP")


def facts_of(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, object]:
    """Return what a choice for this workload depends on.

    Args:
        words: Its script and arguments.
        environment: Of its process.
    """
    script = Path(words[0]).resolve() if words else Path()
    files = sorted(script.parent.glob("*.py")) if script.suffix == ".py" else []
    files = files if len(files) <= MOST_FILES else [script]
    return {
        "command": [str(script), *words[1:]],
        "code": _digest(files),
        **facts_of_machine(environment),
    }


def facts_of_machine(environment: Mapping[str, str]) -> dict[str, object]:
    """Return what the speed and the correctness of kernels depend on, for any workload."""
    return {
        "gpus": list(_gpus()),
        "versions": _versions(),
        "kernels": _digest(sorted(KERNELS.rglob("*.py"))),
        "environment": {name: environment.get(name, "") for name in VARIABLES},
    }


def words_of(command: Sequence[str]) -> list[str]:
    """Return the script of a command line, and its arguments, as `sys.argv` has them there.

    An installed module that gets a script or a module of the user is a launcher, as in
    `python -m torch.distributed.run train.py`: the script is the user's.
    """
    words = list(command)
    installed: list[str] = []
    for place, word in enumerate(words):
        if word in ("-m", "--module"):
            path = _file_of(words[place + 1]) if place + 1 < len(words) else None
            if path is None or not path.endswith(".py"):
                continue
            found = [path, *words[place + 2 :]]
            if not _is_installed(path):
                return found
            installed = installed or found
        elif word.endswith(".py") and Path(word).is_file():
            return words[place:]
    return installed or words


def _is_installed(path: str) -> bool:
    """Return whether a file is of an installed package, or of Python itself."""
    folders = Path(path).parents
    is_package = any(one.name in ("site-packages", "dist-packages") for one in folders)
    return is_package or Path(sysconfig.get_path("stdlib")) in folders


def _file_of(module: str) -> str | None:
    """Return the file that `python -m` runs, found without importing the packages around it."""
    places = [str(Path.cwd()), *sys.path]
    for part in (*module.split("."), "__main__"):
        spec = PathFinder.find_spec(part, places)
        if spec is None or spec.submodule_search_locations is None:
            return None if spec is None else spec.origin
        places = list(spec.submodule_search_locations)
    return None


def load_choice(facts: Mapping[str, object]) -> Choice | None:
    """Return the choice that was kept for these facts; None: there is none."""
    path = _path_of(FOLDER, facts)
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept).choice if path else None
    except (OSError, msgspec.MsgspecError):
        return None


def keep_choice(facts: Mapping[str, object], choice: Choice) -> None:
    """Keep a choice, with today's date."""
    made = replace(choice, made=date.today().isoformat())
    _keep(_path_of(FOLDER, facts), {"facts": dict(facts), "choice": asdict(made)})


def load_gate(facts: Mapping[str, object]) -> Checked | None:
    """Return what the gate said, kept for these facts; None: there is nothing."""
    path = _path_of(GATES, facts)
    try:
        return msgspec.json.decode(path.read_bytes(), type=_KeptGate).checked if path else None
    except (OSError, msgspec.MsgspecError):
        return None


def keep_gate(facts: Mapping[str, object], checked: Checked) -> None:
    """Keep what the gate said."""
    _keep(_path_of(GATES, facts), {"facts": dict(facts), "checked": asdict(checked)})


def _keep(path: Path | None, content: Mapping[str, object]) -> None:
    """Write a file atomically; a user without a home, or without room, has none."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(content, indent=2))
        partial.replace(path)


def names_for_this_process() -> tuple[str, ...]:
    """Return the kernels that were chosen for the script of this process.

    None where kprof itself swaps kernels in it: a run, a choice or a comparison with --swap.

    Raises:
        KprofError: none were chosen yet.
    """
    if any(name in os.environ for name in BY_KPROF):
        return ()
    choice = load_choice(facts_of(sys.argv, os.environ))
    if choice is None:
        name = Path(sys.argv[0]).name or "SCRIPT"
        raise KprofError(
            f"no kernels were chosen for {name} with these arguments, versions and GPUs",
            fix=f"kprof run --swap {AUTO} {name} chooses them, and keeps the choice",
        )
    return choice.names


class _Kept(msgspec.Struct):
    """The field of a file that is read."""

    choice: Choice


class _KeptGate(msgspec.Struct):
    """The field of a file that is read."""

    checked: Checked


def _path_of(sort: str, facts: Mapping[str, object]) -> Path | None:
    folder = cache_folder()
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return None if folder is None else folder / sort / f"{name}.json"


def _digest(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(path.name.encode() + b"\0")
        with contextlib.suppress(OSError):
            found.update(path.read_bytes())
    return found.hexdigest()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def has_gpu() -> bool:
    """Return whether this machine has a GPU of NVIDIA."""
    return any(_gpus())


def _gpus() -> Iterator[str]:
    """Yield the names of this machine's GPUs, and the version of their driver."""
    # NVML: torch takes seconds to import, and is not yet there where a choice is looked up.
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - NVML has errors of its own; without it, there is no GPU.
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            yield str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))
        yield str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
