"""An Nsight Systems file that cannot be read ends in one error that names the damage."""

import gzip
import re
import sqlite3
from contextlib import closing

import pytest

from kprof.collect.readers.nsys.reader import read
from kprof.errors import TraceError
from kprof.opened import read as read_paths
from tests.collect.nsys_files import kernel, launch, message, nvtx, setting, write
from tests.quantities import quantities_in

NOTHING_TRACED = re.compile("neither CUDA .* NVTX")


def problem_of(path, reader=read):
    with pytest.raises(TraceError) as error:
        reader(path)
    assert error.value.fix
    assert error.value.problem.startswith(path.name)
    return error.value.problem


def file_of(folder, content, name="trace.sqlite"):
    path = folder / name
    path.write_bytes(content)
    return path


def many_rows(folder):
    return write(folder, *[kernel(start=i, end=i + 1) for i in range(500)])


def program_in(folder, monkeypatch, script):
    """Put an `nsys` on the PATH that does what the script says; none where there is no script."""
    if script is not None:
        program = folder / "nsys"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin" if script else str(folder))


def test_an_empty_file_is_refused(tmp_path):
    assert problem_of(file_of(tmp_path, b"")) == "trace.sqlite is empty"


def test_a_header_of_zeros_is_an_interrupted_export(tmp_path):
    assert "interrupted" in problem_of(file_of(tmp_path, bytes(4096)))


def test_a_file_of_another_sort_is_refused(tmp_path):
    problem = problem_of(file_of(tmp_path, b"hello"))
    assert ("no SQLite" in problem, "b'hello'" in problem) == (True, True)


def test_a_file_that_ends_in_its_header_is_refused(tmp_path):
    head = many_rows(tmp_path).read_bytes()[:50]
    problem = problem_of(file_of(tmp_path, head))
    assert re.search("cut off.* header", problem)


def test_a_file_that_is_cut_off(tmp_path):
    whole = many_rows(tmp_path).read_bytes()
    problem = problem_of(file_of(tmp_path, whole[:-5000]))
    assert quantities_in(problem) == [f"{len(whole) - 5000:,}", f"{len(whole):,} bytes"]


def test_pages_that_are_damaged(tmp_path):
    path = many_rows(tmp_path)
    content = bytearray(path.read_bytes())
    content[8192:] = b"\xff" * (len(content) - 8192)
    assert "is damaged" in problem_of(file_of(tmp_path, bytes(content)))


def test_a_gzip_file_that_is_cut_off(tmp_path):
    packed = gzip.compress(many_rows(tmp_path).read_bytes())
    path = file_of(tmp_path, packed[: len(packed) // 2], "trace.sqlite.gz")
    assert "cut off" in problem_of(path)


def test_an_export_whose_journal_lies_beside_it(tmp_path):
    path = many_rows(tmp_path)
    path.with_name("trace.sqlite-journal").write_bytes(b"x")
    assert "journal" in problem_of(path)


def test_a_database_of_something_else_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "trace.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE users (name)")
    assert "no export" in problem_of(tmp_path / "trace.sqlite")


def test_an_export_in_which_neither_cuda_nor_nvtx_was_traced_is_refused(tmp_path):
    path = write(tmp_path, setting("META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION", "2025.5"))
    assert NOTHING_TRACED.search(problem_of(path))


def test_an_export_of_a_session_that_recorded_nothing_is_told_as_one(tmp_path):
    with closing(sqlite3.connect(tmp_path / "trace.sqlite")) as connection:
        connection.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
    assert NOTHING_TRACED.search(problem_of(tmp_path / "trace.sqlite"))


def test_ranges_without_operators_and_activities_are_nothing_to_analyze(tmp_path):
    path = write(tmp_path, nvtx("a"))
    assert "nothing to analyze" in problem_of(path, lambda path: read_paths([path]))


def test_what_the_profiler_said_of_an_empty_recording_is_passed_on(tmp_path):
    version = setting("META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION", "2025.5")
    said = (message(2, "No CUDA events: driver 12."), message(1, "CUPTI events dropped: 2."))
    said += (message(1, "CUPTI events dropped: 0."),)
    nothing = write(tmp_path, version, *said, name="nothing.sqlite")
    ranges = write(tmp_path, nvtx("a"), *said, name="ranges.sqlite")
    problems = [problem_of(nothing), problem_of(ranges, lambda path: read_paths([path]))]
    assert [quantities_in(one.partition("says")[2]) for one in problems] == [["12", "2"]] * 2


@pytest.mark.parametrize(
    ("said", "is_loss"),
    [
        ("Number of lost events: 0", False),
        ("0 events lost", False),
        ("dropped 0 records", False),
        ("Dropped records: 0", False),
        ("No events were lost", False),
        ("Some events were lost", True),
        ("10 events lost", True),
        ("Dropped records: 20", True),
    ],
)
def test_what_is_said_by_the_way_counts_only_if_something_is_lost(tmp_path, said, is_loss):
    problem = problem_of(write(tmp_path, nvtx("a"), message(1, said)), lambda p: read_paths([p]))
    assert (said in problem) == is_loss


def failed(name, error, **changes):
    table, row = launch(**changes)
    return table, row | {"nameId": name, "returnValue": error}


def test_calls_that_failed_are_told_where_the_gpu_should_have_worked(tmp_path):
    rows = [failed("cudaLaunchKernel_v7000", 222, start=10 * i, end=10 * i + 1) for i in range(3)]
    asked = [failed("cudaEventQuery_v3020", 600), failed("cuCtxSynchronize", 709)]
    fine = failed("cudaMemcpy_v3020", 0)
    caveats = read(write(tmp_path, kernel(), *rows, *asked, fine)).meta.caveats
    (told,) = [one.text for one in caveats if one.id == "failed_calls"]
    assert "cudaLaunchKernel (error 222) 3 times" in told
    assert "709" not in told
    empty = write(tmp_path, *rows, name="empty.sqlite")
    assert "222" in problem_of(empty, lambda path: read_paths([path]))


def test_a_column_that_is_needed_and_absent(tmp_path):
    table, row = kernel()
    del row["globalPid"]
    problem = problem_of(write(tmp_path, (table, row)))
    assert re.findall(r"\w+_\w+|global\w+", problem) == [table, "globalPid"]


@pytest.mark.parametrize(
    "changes",
    [{"start": "soon"}, {"end": b"\xff"}, {"start": None}, {"end": 999}, {"start": -(2**63)}],
)
def test_an_activity_without_valid_times_is_left_out_and_counted(tmp_path, changes):
    trace = read(write(tmp_path, kernel(), kernel(**changes)))
    assert trace.kernels["duration_ns"].tolist() == [500]
    assert trace.meta.counts["damaged_activities"] == 1


@pytest.mark.parametrize(
    "row", [launch(end=49), nvtx("a", 5, 4), nvtx("a", "soon"), launch(start="soon")]
)
def test_a_range_without_valid_times_is_left_out_and_counted(tmp_path, row):
    trace = read(write(tmp_path, kernel(), row))
    assert len(trace.ranges) == 0
    assert trace.meta.counts["damaged_events"] == 1


@pytest.mark.parametrize("changes", [{"gridX": "wide"}, {"demangledName": None}, {"streamId": "s"}])
def test_a_damaged_detail_costs_that_detail_alone(tmp_path, changes):
    assert read(write(tmp_path, kernel(**changes))).kernels["duration_ns"].tolist() == [500]


def test_numbers_that_are_stored_as_text_are_numbers(tmp_path):
    assert read(write(tmp_path, kernel(start="1000"))).kernels["start_ns"].tolist() == [1000]


def test_a_report_where_nsight_systems_is_not_installed(tmp_path, monkeypatch):
    program_in(tmp_path, monkeypatch, None)
    path = file_of(tmp_path, b"anything", "run.nsys-rep")
    with pytest.raises(TraceError) as error:
        read(path)
    assert "not installed here" in error.value.problem
    assert "nsys export --type=sqlite run.nsys-rep" in error.value.fix


def test_a_report_that_cannot_be_exported_is_refused(tmp_path, monkeypatch):
    program_in(tmp_path, monkeypatch, "echo Loading; echo 'Invalid prefix' >&2; exit 1")
    path = file_of(tmp_path, b"anything", "run.nsys-rep")
    assert problem_of(path).endswith(": Invalid prefix")


def test_a_report_is_exported_and_read_under_its_own_name(tmp_path, monkeypatch):
    export = write(tmp_path, kernel(), launch())
    program_in(
        tmp_path, monkeypatch, f'cp {export} "${{4#--output=}}"; echo "$@" > {tmp_path}/said'
    )
    trace = read(path := file_of(tmp_path, b"anything", "run.nsys-rep"))
    assert (trace.meta.source, len(trace.kernels)) == ("run.nsys-rep", 1)
    words = (tmp_path / "said").read_text().split()
    assert words[:3] == ["export", "--type=sqlite", "--force-overwrite=true"]
    assert words[4] == str(path)
