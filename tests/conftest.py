"""How tests run: on one thread each, and property tests on the same examples each time."""

import gc
import os

import pytest
from hypothesis import settings

# Until all tests are collected nothing is garbage, and a million things would be looked at.
gc.disable()

# Before anything imports torch or NumPy: several test processes whose threads wait for each
# other's take many times as long. Processes that the tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor's C++ goes without vector instructions: to find those that the machine has, it compiles
# a program for each set of them, which takes longer than what the tests compile.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# Speed belongs in benchmarks: a slow machine is no failure. What fifty examples do not find, the
# same hundred seldom do: new ones, and many, are for those who look, with FUZZ.
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("fuzz", deadline=None, max_examples=1000)
settings.load_profile("fuzz" if os.environ.get("FUZZ") else "repeatable")


def pytest_collection_finish():
    """Let the garbage collector do its work from here on, less often than it would."""
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def objects_of_this_file():
    """Let collections, and searches for the models of a process, see only what this file makes.

    What others left behind is frozen: a million objects of torch alone, half a second a search.
    """
    gc.collect()
    gc.freeze()
