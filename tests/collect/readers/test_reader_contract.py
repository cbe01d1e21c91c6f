"""What holds for every reader: which files it knows, its tables, and a file that is cut off."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kprof.collect.sources import readers
from kprof.errors import TraceError
from kprof.trace import columns_of
from tests import kineto_files, ncu_files
from tests.collect import nsys_files
from tests.collect.readers import test_proton_reader as proton_files

RECORDED = Path(__file__).parents[2] / "data" / "h200" / "whole_step"


def kineto_in(folder):
    events = (kineto_files.operator(), kineto_files.launch(), kineto_files.kernel())
    return kineto_files.write(folder, *events)


def nsys_in(folder):
    return nsys_files.write(folder, nsys_files.launch(), nsys_files.kernel(), nsys_files.gpu())


def ncu_in(folder):
    path = folder / "ncu.csv"
    path.write_text(ncu_files.raw_page(ncu_files.launch()))
    return path


def proton_in(folder):
    return proton_files.profile(folder, proton_files.kernel("add", 300))


def recorded_in(folder):
    return Path(shutil.copytree(RECORDED, folder / "run.kprof"))


SAMPLES = {
    "kineto": kineto_in,
    "ncu": ncu_in,
    "nsys": nsys_in,
    "proton": proton_in,
    "recorded": recorded_in,
}
READERS = {reader.__name__.split(".")[3]: reader for reader in readers()}
of_every_reader = pytest.mark.parametrize("name", SAMPLES)


def head_of(path):
    return path.read_bytes()[:1000] if path.is_file() else b""


def test_every_reader_has_a_sample():
    assert READERS.keys() == SAMPLES.keys()


def test_a_trace_of_kineto_is_read_without_the_modules_of_other_readers(tmp_path):
    asked = """
import pathlib, sys
from kprof.collect.sources import read_source, sources_of
read_source(*sources_of([pathlib.Path(sys.argv[1])]))
print(*(name for name in sys.modules if name.endswith(".reader")))
"""
    command = [sys.executable, "-c", asked, kineto_in(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["kprof.collect.readers.kineto.reader"]


@of_every_reader
def test_a_file_is_known_by_one_reader(name, tmp_path):
    path = SAMPLES[name](tmp_path)
    knowing = [other for other, reader in READERS.items() if reader.knows(path, head_of(path))]
    assert knowing == [name]


@of_every_reader
def test_the_tables_have_the_columns_that_readers_declare(name, tmp_path):
    trace = READERS[name].read(SAMPLES[name](tmp_path))
    for table in ("kernels", "ranges", "samples"):
        found = getattr(trace, table).dtypes.astype(str).to_dict()
        declared = {column.name: column.dtype for column in columns_of(table, "reader")}
        assert found == declared


@of_every_reader
def test_activities_take_time_and_the_trace_names_its_tool(name, tmp_path):
    trace = READERS[name].read(SAMPLES[name](tmp_path))
    assert (trace.kernels["duration_ns"] >= 0).all()
    assert trace.kernels["duration_ns"].sum() > 0
    assert trace.meta.tool


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"recorded"}))
def test_half_a_file_is_refused_or_read_with_a_caveat(name, tmp_path):
    path = SAMPLES[name](tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    try:
        trace = READERS[name].read(path)
    except TraceError as error:
        assert error.fix
    else:
        assert trace.meta.caveats
        assert all(re.fullmatch("[a-z_]+", one.id) for one in trace.meta.caveats)
