"""For those who edit their script: record one block, name one range."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kprof.errors import LaunchError

if TYPE_CHECKING:
    from kprof.collect.recorder.kprof_recorder.start import Session
    from kprof.collect.recorder.kprof_recorder.trial import TrialSession

PACKAGE = "kprof_recorder"


@contextlib.contextmanager
def profile(
    out: str | os.PathLike[str] = "profile.kprof",
    *,
    shapes: bool = True,
    stacks: bool = False,
    memory: bool = False,
) -> Iterator[Path]:
    """Record the block into the folder `out`, which `kprof open` then reads.

    Under `kprof run`, which has a folder already, the block becomes that recording's window.

    Raises:
        LaunchError: `out` holds a recording already, or this Python has no torch.
    """
    from kprof.collect.recorder.kprof_recorder.settings import Settings

    running = _recorder_of_this_process()
    if running is not None and running.session.is_following:
        with _block(running.session):
            yield running.session.recorder.settings.raw.parent
        return
    raw = Path(out) / "raw"
    _prepare(raw)
    settings = Settings(raw=raw.resolve(), skip=0, shapes=shapes, stacks=stacks, memory=memory)
    session = _load_recorder().start(settings)
    session.restart(settings)
    with _launched(raw), _block(session):
        yield Path(out)


def range(name: str) -> AbstractContextManager[None]:
    """Name what happens inside: a range in the trace and in NVTX; "step" delimits the steps.

    Costs nothing that matters while the process has not imported torch.
    """
    if "torch" not in sys.modules:
        return contextlib.nullcontext()
    return _named(name)


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    import torch

    running = _recorder_of_this_process() if name == "step" else None
    recorders = sys.modules.get(f"{PACKAGE}.ranges")
    # The recorder's own knows what to do where a recording begins or ends inside.
    make = torch._C._profiler._RecordFunctionFast if recorders is None else recorders.TorchRange
    is_nvtx = torch.cuda.is_initialized()
    if running is not None:
        running.session.recorder.range_begins()
    if is_nvtx:
        torch.cuda.nvtx.range_push(name)
    try:
        with make(name):
            yield
    finally:
        if is_nvtx:
            torch.cuda.nvtx.range_pop()
        if running is not None:
            running.session.recorder.range_ends()


@contextlib.contextmanager
def _block(session: Session | TrialSession) -> Iterator[None]:
    session.block_begins()
    try:
        yield
    finally:
        session.block_ends()


@contextlib.contextmanager
def _launched(raw: Path) -> Iterator[None]:
    """Do around the block what the launcher does around a whole workload."""
    from kprof.collect.launch import write_description
    from kprof.collect.nvml import Sampler
    from kprof.collect.process_folders import compress_parts

    sampler = Sampler(raw / "nvml.jsonl")
    started_ns = time.time_ns()
    sampler.start()
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        sampler.stop()
        command = (sys.executable, *sys.argv)
        write_description(raw, command, (started_ns, time.time_ns()), exit_code)
        compress_parts(raw)


def _prepare(raw: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        raise LaunchError("this Python has no torch to record", fix="pip install torch")
    if raw.exists() and any(raw.iterdir()):
        raise LaunchError(
            f"{raw.parent}: holds a recording already", fix="choose another folder with out="
        )
    raw.mkdir(parents=True, exist_ok=True)


def _recorder_of_this_process() -> ModuleType | None:
    for name in (f"{PACKAGE}.start", f"{PACKAGE}.trial"):
        module = sys.modules.get(name)
        if module is not None and module.session is not None:
            return module
    return None


def _load_recorder() -> ModuleType:
    """Import the recorder under the name that it has inside every recorded process."""
    if PACKAGE not in sys.modules:
        from kprof.collect.launch import RECORDER

        folder = RECORDER / PACKAGE
        spec = importlib.util.spec_from_file_location(
            PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{PACKAGE}.start")
