"""Measuring a GPU, as far as that goes without one."""

from types import SimpleNamespace

import pytest

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
    with pytest.raises(KprofError, match="too little free memory"):
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
