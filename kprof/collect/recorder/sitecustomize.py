"""Starts kprof's recorder in a Python process whose PYTHONPATH begins with this folder."""

import os
import sys

# Every Python that the workload starts pays for what is imported here, so that is little.
FOLDER = __file__.rpartition(os.sep)[0]


def run_the_hidden_one() -> None:
    """Execute the sitecustomize that this file hides, as the interpreter would have done."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


import kprof_recorder  # type: ignore[import-not-found]  # noqa: E402

# The workload finds the search path that it would have without kprof.
sys.path[:] = [entry for entry in sys.path if entry != FOLDER]
kprof_recorder.install()
run_the_hidden_one()
