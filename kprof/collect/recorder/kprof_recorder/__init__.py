"""The recorder of a PyTorch workload inside its process; needs torch, else the standard library.

`install()` is all that runs when the interpreter starts. It imports nothing of torch: the recorder
begins once the workload itself has imported it, so the workload's own settings come first.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

# Every Python that the workload starts pays for what is imported here, so that is little.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def install() -> None:
    """Record this process as its environment asks for, once it has imported torch."""
    if not os.environ.get("KPROF_RAW"):
        return
    if ranks := os.environ.get("KPROF_RANKS"):
        from .chosen import is_this_process_chosen

        if not is_this_process_chosen(ranks):
            return
    if os.environ.get("KPROF_COUNTERS") == "1":
        from .newest_cupti import load_cupti

        load_cupti()
    when_imported("torch", lambda torch: follow_the_process())


def follow_the_process() -> None:
    """Record this process to its end; where that cannot be, the workload must not feel it."""
    try:
        from .settings import Settings

        settings = Settings.from_environment(os.environ)
        if settings is None:
            return
        if settings.schedule is not None:
            from .trial import start as start_trial

            start_trial(settings).follow_the_process()
        else:
            from .start import start

            start(settings).follow_the_process()
    except Exception as error:  # noqa: BLE001 - no failure here may be the workload's
        say_not_started(error)


def say_not_started(error: Exception) -> None:
    """Leave a recorder.json that says why there is no recorder here, if that can be written."""
    import contextlib
    import json
    from pathlib import Path

    folder = Path(os.environ["KPROF_RAW"], f"rank0-pid{os.getpid()}")
    told = {
        "schema": 1,
        "pid": os.getpid(),
        "started_by": None,
        "rank": 0,
        "world_size": 1,
        "num_steps_seen": 0,
        "steps": [],
        "window": None,
        "window_ns": [],
        "device_name": None,
        "is_complete": True,
        "caveats": [],
        "problems": [f"The recorder could not start ({type(error).__name__}: {error})."],
    }
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recorder.json").write_text(json.dumps(told))


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` with the module `name` once it is imported, or now."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    if _after_import not in sys.meta_path:
        sys.meta_path.insert(0, _after_import)
    _after_import.actions[name] = action


class AfterImport:
    """A finder that finds nothing itself; it calls the action of a module that was imported.

    Code that only asks whether a module is there, by `importlib.util.find_spec`, imports nothing:
    the action stays until a module is executed.
    """

    def __init__(self) -> None:
        self.actions: dict[str, Callable[[ModuleType], None]] = {}
        self._searched: set[tuple[int, str]] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec that the other finders give, so that its module runs the action last."""
        here = (get_ident(), name)
        if name not in self.actions or here in self._searched:
            return None
        from importlib.util import find_spec

        self._searched.add(here)
        try:
            spec = find_spec(name)
        finally:
            self._searched.discard(here)
        if spec is not None and spec.loader is not None:
            self._append(name, spec.loader)
        return spec

    def _append(self, name: str, loader: Loader) -> None:
        execute = loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            # Another execution, as by a reload, is no import.
            action = self.actions.pop(name, None)
            if not self.actions and self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            loader.__dict__.pop("exec_module", None)
            if action is not None:
                action(module)

        loader.exec_module = execute_then_act  # type: ignore[method-assign]


_after_import = AfterImport()
