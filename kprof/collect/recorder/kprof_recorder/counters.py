"""Hardware counters of a window, sampled while the workload runs: nothing is run twice.

CUPTI's PM sampling reads counters of the whole GPU at a fixed interval. Only the samples' order and
interval are kept: their timestamps ran twice too fast where torch's profiler had been active.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from .capture import Capture, synchronize
from .native import perf_counter_ns

FILE = "counters.json"
INTERVAL_NS = 20_000
# The traffic of the second-level cache shows when anything runs at all.
TRAFFIC = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")
WORKING = ("sm__cycles_active.sum", "sm__pipe_tensor_cycles_active_realtime.sum")
# The first that the GPU can count in one pass; seen on an H200: all of them.
QUANTITIES = ((*TRAFFIC, *WORKING), TRAFFIC)
SPARE_SAMPLES = 1_000
# Four seconds; decoding more would keep the workload waiting at the end of the window.
MOST_SAMPLES = 200_000


class Counters:
    """The counters of the GPU in use; why there are none is reported, and stops no other part."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why nothing was sampled; None while all is well."""
        self._collector: Any = None
        self._quantities: tuple[str, ...] = ()
        self._content: dict[str, object] = {}
        self._started_ns = 0

    def prepare(self) -> None:
        """Do what is slow about starting, once: after another time there would be no samples."""
        if self._collector is not None or self.problem or not torch.cuda.is_initialized():
            return
        try:
            from cupti import pm_sampling

            device = torch.cuda.current_device()
            collector = pm_sampling.Collector(device_index=device)
            collector.enable()
            self._quantities = _configured(collector)
        except ImportError as error:
            self.problem = f"cupti-python cannot be imported ({error}): pip install cupti-python"
        except PermissionError:
            self.problem = (
                "the driver lets only administrators read counters (ERR_NVGPUCTRPERM): load it "
                "with NVreg_RestrictProfilingToAdminUsers=0, or run as root"
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not the workload's
            self.problem = f"CUPTI refused, {_said(error)}"
        else:
            self._collector = collector
            self._content = {"device": device, "interval_ns": INTERVAL_NS}

    def start(self) -> None:
        """Sample from here on."""
        self.prepare()
        if self._collector is None:
            self.problem = self.problem or "the workload used no GPU"
            return
        try:
            self._collector.start()
        except Exception as error:  # noqa: BLE001
            self._give_up(f"CUPTI did not start, {_said(error)}")
        self._started_ns = perf_counter_ns()

    def stop(self) -> None:
        """Stop sampling, and decode the samples."""
        if self._collector is None:
            return
        try:
            self._collector.stop()
            self._decode()
        except MemoryError:
            self._give_up("the window was too long for CUPTI's buffer: record fewer steps")
        except Exception as error:  # noqa: BLE001
            self._give_up(f"CUPTI did not give the samples, {_said(error)}")

    def write(self, folder: Path) -> None:
        """Write the samples, or why there are none, into `folder`."""
        unfinished, path = folder / f".{FILE}", folder / FILE
        content = {"problem": self.problem} if self.problem else self._content
        unfinished.write_text(json.dumps({"schema": 1, **content}, separators=(",", ":")))
        unfinished.replace(path)

    def _decode(self) -> None:
        elapsed_ns = perf_counter_ns() - self._started_ns
        most = min(elapsed_ns // INTERVAL_NS + SPARE_SAMPLES, MOST_SAMPLES)
        data = self._collector.decode(max_samples=most)
        rows = [sample.metric_values for sample in data]
        if not rows:
            self.problem = "CUPTI gave no samples"
        self._content["num_populated"] = data.num_populated_samples
        self._content["values"] = {
            name: [round(values[place]) for values in rows]
            for place, name in enumerate(self._quantities)
        }

    def _give_up(self, problem: str) -> None:
        self.problem, self._collector = problem, None


class CountedCapture(Capture):
    """A window in which counters are sampled beside torch's profiler."""

    def prepare(self) -> None:
        """Do what is slow about starting, which disturbs the step under way."""
        super().prepare()
        counters.prepare()

    def start(self) -> None:
        """Record from here on; the device has finished everything that came before."""
        super().start()
        counters.start()

    def stop(self, *, is_last: bool = False) -> None:
        """Record no more; the samples come first, since Kineto may leave CUPTI when it stops."""
        synchronize()
        counters.stop()
        super().stop(is_last=is_last)

    def export(self, path: Path) -> None:
        """Write the trace to `path`, and the samples beside it."""
        super().export(path)
        with contextlib.suppress(OSError):
            counters.write(path.parent)


# One for the process: CUPTI can be set up once.
counters = Counters()


def _configured(collector: Any) -> tuple[str, ...]:  # noqa: ANN401 - no types of its own
    """Let CUPTI count as much as it can in one pass; return what that is."""
    *more, least = QUANTITIES
    for quantities in more:
        with contextlib.suppress(Exception):
            collector.configure(metrics=list(quantities), sampling_interval=INTERVAL_NS)
            return quantities
    collector.configure(metrics=list(least), sampling_interval=INTERVAL_NS)
    return least


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
