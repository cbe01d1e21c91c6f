"""Records a PyTorch workload from inside its process; needs only torch and the standard library.

`install()` is all that runs when the interpreter starts. It imports nothing of torch: the recorder
begins once the workload itself has imported it, so the workload's own settings come first.
"""

from __future__ import annotations

import os
import sys

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

    def activate() -> None:
        from .settings import Settings
        from .start import start

        settings = Settings.from_environment(os.environ)
        if settings is not None:
            start(settings).follow_the_process()

    if "torch" in sys.modules:
        activate()
    else:
        sys.meta_path.insert(0, AfterImport("torch", activate))


class AfterImport:
    """A finder that finds nothing itself; it calls `action` when `name` has been imported."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec that the other finders give, so that its module runs `action` last."""
        if name != self.name:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._append_action(spec.loader)
        return spec

    def _append_action(self, loader: Loader) -> None:
        execute = loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            del loader.exec_module
            self.action()

        loader.exec_module = execute_then_act  # type: ignore[method-assign]
