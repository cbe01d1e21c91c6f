"""Letting kernels take over in a recorded workload, after a step of its own code."""

from __future__ import annotations

import atexit
from importlib import import_module
from pathlib import Path
from typing import Any

REPORT = "swap.json"


class Swapping:
    """The swap of this process: made before a step, told after the window and at the end."""

    def __init__(self, names: str, folder: Path, problems: list[str]) -> None:
        """Prepare the swap of `names`; its report goes into the folder, what fails to `problems`.

        Ranks write the same report: they run the same model.
        """
        self._names, self._path, self._problems = names, folder / REPORT, problems
        self._is_tried = False
        self._swap: Any = None

    def make(self) -> None:
        """Let the kernels take over in all models that there are, the first time."""
        if self._is_tried:
            return
        self._is_tried = True
        try:
            # Of the workload's environment: without a swap, it need not be there.
            swap = import_module("kprof.swap").all_models(self._names, str(self._path))
            swap.__enter__()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the workload's
            self._problems.append(
                f"{self._names} could not be swapped in ({type(error).__name__}: {error}), so the "
                "workload ran as it is."
            )
            return
        self._swap = swap
        atexit.register(self.tell)

    def tell(self) -> None:
        """Write what became of the swap so far."""
        if self._swap is not None:
            self._swap.tell()
