"""Measuring a GPU, as far as that goes without one."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from kprof.collect import gpu_ceilings
from kprof.collect.ceilings import Figure
from kprof.errors import KprofError


class OutOfMemoryError(RuntimeError):
    pass


def test_a_gpu_that_others_fill_is_one_clear_error(monkeypatch):
    def full(torch):
        raise OutOfMemoryError
        yield

    monkeypatch.setattr(gpu_ceilings, "_dram", full)
    torch = SimpleNamespace(cuda=SimpleNamespace(OutOfMemoryError=OutOfMemoryError))
    with pytest.raises(KprofError, match="free memory"):
        gpu_ceilings._measure(torch)


def test_a_launch_costs_what_it_does_while_the_host_is_fastest(monkeypatch):
    def drawn(torch):
        yield from (Figure(name, 1.0, "B/s", "") for name in ("read", "write", "copy"))

    def none(torch):
        yield from ()

    for part in ("_l2", "_products", "_latencies", "_peer_to_peer", "_all_reduce"):
        monkeypatch.setattr(gpu_ceilings, part, none)
    monkeypatch.setattr(gpu_ceilings, "_dram", drawn)
    costs_ns = iter([9_000.0, 6_900.0, 8_800.0])
    monkeypatch.setattr(gpu_ceilings, "_launch_ns", lambda torch: next(costs_ns))
    torch = SimpleNamespace(cuda=SimpleNamespace(OutOfMemoryError=OutOfMemoryError))
    figures = {one.name: one.value for one in gpu_ceilings._measure(torch)}
    assert figures == {"read": 1.0, "write": 1.0, "copy": 1.0, "launch eager": 6_900.0}


def test_a_copy_in_the_cache_is_that_of_the_middle_place(monkeypatch):
    num_bytes, took_ns = 4 << 20, 2_000.0
    places = []

    def time(source, target):
        places.append((source.data_ptr(), target.data_ptr(), source.nbytes, target.nbytes))
        is_slow = len(places) % 4 == 0
        return 3 * took_ns if is_slow else took_ns

    monkeypatch.setattr(gpu_ceilings, "_copy_ns", time)
    monkeypatch.setattr(gpu_ceilings, "L2_FOOTPRINTS_MIB", (4,))
    monkeypatch.setattr(gpu_ceilings, "DRAM_BYTES", 2 * gpu_ceilings.NUM_PLACES * num_bytes)
    on_cpu = SimpleNamespace(randn=lambda size, device: torch.empty(size))
    (figure,) = gpu_ceilings._l2(on_cpu)
    assert (figure.name, figure.value) == ("L2 copy 4 MiB", num_bytes / took_ns * 1e9)
    assert {nbytes for *_, source, target in places for nbytes in (source, target)} == {2 << 20}
    starts = sorted(start for pair in places for start in pair[:2])
    gaps = [later - start - (2 << 20) for start, later in pairwise(starts)]
    assert len(starts) == 2 * gpu_ceilings.NUM_PLACES
    assert gaps == [0, num_bytes] * (gpu_ceilings.NUM_PLACES - 1) + [0]
