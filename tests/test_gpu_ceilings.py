"""Measuring a GPU, as far as that goes without one."""

from types import SimpleNamespace

import pytest

from kprof.collect import gpu_ceilings
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
