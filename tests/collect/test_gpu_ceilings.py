"""Measuring a GPU, as far as that goes without one."""

import sys
from contextlib import nullcontext
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest

from kprof.collect import gpu_ceilings
from kprof.errors import KprofError

torch = pytest.importorskip("torch")
TOOK_NS, L2_MIB = 2_000.0, 1


class OutOfMemoryError(RuntimeError):
    pass


class ProfileOfKernels(nullcontext):
    """A profile of two kernels and a call."""

    def __enter__(self):
        return self

    def events(self):
        return [SimpleNamespace(device_time=time_us) for time_us in (1.5, 1.25, 0.0)]


class HostTorch:
    """Torch with the host in the place of one GPU."""

    cuda = SimpleNamespace(
        OutOfMemoryError=OutOfMemoryError,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_capability=lambda: (8, 0),
        get_device_properties=lambda index: SimpleNamespace(
            name="a GPU", multi_processor_count=1, total_memory=1
        ),
        synchronize=lambda: None,
    )
    profiler = SimpleNamespace(
        ProfilerActivity=SimpleNamespace(CUDA="CUDA"), profile=lambda activities: ProfileOfKernels()
    )

    def __getattr__(self, name):
        return getattr(torch, name)

    def randn(self, *size, device):
        return torch.zeros(*size)

    def zeros(self, *size, device):
        return torch.zeros(*size)


def timed(work, **options):
    return SimpleNamespace(median_ns=TOOK_NS, spread=0.0)


@pytest.fixture
def host(monkeypatch):
    """Measure small arrays on the host; each timing takes `TOOK_NS`."""
    monkeypatch.setitem(sys.modules, "torch", HostTorch())
    monkeypatch.setattr(gpu_ceilings, "time_on_gpu", timed)
    monkeypatch.setattr(gpu_ceilings, "captured", lambda work, times: work)
    monkeypatch.setattr(gpu_ceilings, "DRAM_BYTES", 2 * gpu_ceilings.NUM_PLACES * (L2_MIB << 20))
    monkeypatch.setattr(gpu_ceilings, "L2_FOOTPRINTS_MIB", (L2_MIB,))
    monkeypatch.setattr(gpu_ceilings, "MATRIX_SIZES", (4,))


def measured():
    return {one.name: one.value for one in gpu_ceilings.measure_gpu().figures}


@pytest.mark.usefixtures("host")
def test_a_gpu_that_others_fill_is_one_clear_error(monkeypatch):
    def full(self, *size, device):
        raise OutOfMemoryError

    monkeypatch.setattr(HostTorch, "randn", full)
    with pytest.raises(KprofError, match="free memory"):
        gpu_ceilings.measure_gpu()


@pytest.mark.usefixtures("host")
def test_a_rate_is_the_work_over_the_time():
    found = measured()
    assert found["DRAM copy"] == 2 * found["DRAM read"] == 2 * gpu_ceilings.DRAM_BYTES / 2e-6
    assert found["bf16 4"] == found["fp32 4"] == 2 * 4**3 / 2e-6
    assert found["launch in a graph"] == TOOK_NS / 200
    assert found["shortest kernel"] == 1_250
    # This GPU has no FP8, and there is no second one.
    assert not {"fp8 4", "peer copy", "all-reduce"} & found.keys()


@pytest.mark.usefixtures("host")
def test_a_launch_costs_what_it_does_while_the_host_is_fastest(monkeypatch):
    monkeypatch.setattr(gpu_ceilings, "NUM_LAUNCHES", 1)
    monkeypatch.setattr(gpu_ceilings, "NUM_ROUNDS", 1)
    costs_ns = chain([9_000, 6_900, 8_800], iter(lambda: 9_500, None))
    now_ns = chain.from_iterable((0, cost) for cost in costs_ns)
    clock = SimpleNamespace(perf_counter_ns=lambda: next(now_ns), monotonic=lambda: 0.0)
    monkeypatch.setattr(gpu_ceilings, "time", clock)
    assert measured()["launch eager"] == 6_900


@pytest.mark.usefixtures("host")
def test_a_copy_in_the_cache_is_that_of_the_middle_place(monkeypatch):
    num_bytes, copies = L2_MIB << 20, []

    def time(work, **options):
        copy = getattr(work, "func", None)
        if copy is None:
            return timed(work)
        copies.append((work.args[0], copy.__self__))
        is_slow = len(copies) % 4 == 0
        return SimpleNamespace(median_ns=3 * TOOK_NS if is_slow else TOOK_NS, spread=0.0)

    monkeypatch.setattr(gpu_ceilings, "time_on_gpu", time)
    took_ns = TOOK_NS / gpu_ceilings.COPIES_PER_GRAPH
    assert measured()["L2 copy 1 MiB"] == pytest.approx(num_bytes / took_ns * 1e9)
    arrays = list(chain.from_iterable(copies))
    assert {one.nbytes for one in arrays} == {num_bytes // 2}
    starts = sorted(one.data_ptr() for one in arrays)
    gaps = [later - start - num_bytes // 2 for start, later in pairwise(starts)]
    assert len(starts) == 2 * gpu_ceilings.NUM_PLACES
    assert gaps == [0, num_bytes] * (gpu_ceilings.NUM_PLACES - 1) + [0]
