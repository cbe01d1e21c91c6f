"""Changes of known effect, for `kprof ab --patch`: each is a context manager."""

import contextlib
import sys

import torch
from torch.nn.attention import SDPBackend


@contextlib.contextmanager
def nothing():
    """Change nothing."""
    yield


@contextlib.contextmanager
def one_product_more():
    """Let a step of `products.py` do 51 products instead of 50: 2 % more work."""
    with _set(_main(), "count", 51):
        yield


@contextlib.contextmanager
def flash_attention():
    """Let the flash kernel of torch compute the attention of `train.py`."""
    with _set(_main(), "attention", SDPBackend.FLASH_ATTENTION):
        yield


_compiled = []


@contextlib.contextmanager
def compiled():
    """Let `torch.compile` have the model of `train.py`, compiled once and kept."""
    model = _main().model
    if not _compiled:
        _compiled.append(torch.compile(model.forward))
    model.forward = _compiled[0]
    try:
        yield
    finally:
        del model.forward


def _main():
    return sys.modules["__main__"]


@contextlib.contextmanager
def _set(of, name, value):
    before = getattr(of, name)
    setattr(of, name, value)
    try:
        yield
    finally:
        setattr(of, name, before)
