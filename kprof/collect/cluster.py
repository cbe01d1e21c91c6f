"""Files of ranks that the workers of a Dask cluster read; they see them under the same paths."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kprof.collect.sources import Source
from kprof.errors import KprofError

if TYPE_CHECKING:
    from distributed import Client

# How long to wait for the scheduler to answer.
PATIENCE_S = 30.0

Scheduler = Any
"""The address of a Dask scheduler, as tcp://host:8786, or a client of `dask.distributed`."""


def results_of(
    function: Callable[[Source], Any], sources: list[Source], scheduler: Scheduler, attempts: int
) -> list[Any]:
    """Return what a function makes of every file, in their order, or the exception that it ends in.

    A file whose worker dies is read by another one, `attempts` times in all.

    Raises:
        KprofError: no scheduler answers there, or the package is missing.
    """
    with ExitStack() as stack:
        client = scheduler if hasattr(scheduler, "map") else _client_of(scheduler, stack)
        # Workers run in other folders; and a file may have changed since it was read before.
        absolute = [Source(source.path.absolute(), source.named.absolute()) for source in sources]
        futures = client.map(function, absolute, retries=attempts - 1, pure=False)
        found = []
        for future in futures:
            error = future.exception()
            found.append(future.result() if error is None else error)
            future.release()
        return found


def _client_of(address: str, stack: ExitStack) -> Client:
    try:
        from distributed import Client
    except ImportError as error:
        raise KprofError(
            "--scheduler needs the package dask.distributed",
            fix="pip install 'kprof[cluster]', here and on the workers",
        ) from error
    try:
        return stack.enter_context(Client(address, timeout=PATIENCE_S, set_as_default=False))
    except (OSError, ValueError, TimeoutError) as error:
        raise KprofError(
            f"no Dask scheduler answers at {address}: {error}",
            fix="start one (dask scheduler), and name its address: --scheduler tcp://HOST:8786",
        ) from error
