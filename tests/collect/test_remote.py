"""Recordings in object stores: copied through fsspec, read, and deleted."""

import sys
import tempfile
from pathlib import Path

import fsspec
import pytest

import kprof
from kprof.collect.remote import copied_here, is_remote
from kprof.errors import KprofError
from kprof.opened import open_run, open_unwritten
from tests.kineto_files import kernel, launch, operator, write

ADDRESS = "memory://job/ranks"


@pytest.fixture
def ranks(tmp_path):
    """Two ranks, here and in a store of fsspec."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in (0, 1):
        events = (operator(), launch(), kernel(ts=10 + rank))
        write(folder, *events, name=f"rank{rank}.json", distributedInfo={"rank": rank})
    store = fsspec.filesystem("memory")
    store.put(str(folder), "/job/ranks", recursive=True)
    yield folder
    store.rm("/job", recursive=True)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("text", ["s3://bucket/ranks", "gs://b/r.json.gz", "memory://x", "abfs:/a"])
def test_an_address_is_remote(text):
    assert is_remote(Path(text))


@pytest.mark.parametrize("text", ["ranks", "/a/s3:/b", "c:/ranks", "S3.json", "a:b", "./s3:/x"])
def test_a_path_of_this_machine_is_not(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    (tmp_path / "s3:" / "x").touch()
    assert not is_remote(Path(text))


def test_a_folder_in_a_store_is_read_as_the_same_folder_here(ranks, temporary):
    here, there = (open_unwritten([Path(one)]) for one in (ranks, ADDRESS))
    assert there.json == here.json
    assert there.trace.meta.num_ranks == 2
    assert list(temporary.iterdir()) == []


def test_an_address_of_this_machine_begins_at_its_root(ranks):
    assert open_unwritten([Path(f"file://{ranks}")]).trace.meta.num_ranks == 2


def test_a_file_in_a_store_makes_a_run_in_this_folder(ranks, temporary, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    opened = open_run([Path(f"{ADDRESS}/rank1.json")], None, force=False)
    assert opened.folder == tmp_path / "rank1.kprof"
    assert opened.report.exists()
    assert list(temporary.iterdir()) == []


def test_paths_here_and_in_a_store_may_be_opened_together(ranks, temporary):
    mixed = kprof.open(ranks / "rank0.json", f"{ADDRESS}/rank1.json")
    assert set(mixed.trace.kernels["rank"]) == {0, 1}


def test_a_run_that_is_there_is_refused_before_anything_is_copied(ranks, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").touch()
    monkeypatch.setattr("kprof.collect.remote._file_system", lambda address: pytest.fail(address))
    with pytest.raises(KprofError, match="not a run"):
        open_run([Path(ADDRESS)], out, force=True)


def test_what_is_not_there_is_an_error_that_names_the_address(ranks, temporary):
    with pytest.raises(KprofError, match=r"memory://job/nothing does not exist"):
        open_unwritten([Path("memory://job/nothing")])
    assert list(temporary.iterdir()) == []


def test_a_protocol_that_nobody_knows_is_an_error():
    with pytest.raises(KprofError, match="unheard"):
        open_unwritten([Path("unheard://job")])


def test_a_store_whose_package_is_missing_names_the_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(KprofError) as caught:
        open_unwritten([Path("s3://bucket/ranks")])
    assert "s3fs" in caught.value.fix


def test_without_fsspec_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(KprofError) as caught:
        open_unwritten([Path(ADDRESS)])
    assert "kprof[remote]" in caught.value.fix


def test_workers_of_a_cluster_do_not_see_copies(ranks):
    with pytest.raises(KprofError, match="workers"), copied_here([Path(ADDRESS)], "tcp://x:1"):
        pytest.fail("nothing is to be read")


def test_paths_of_this_machine_need_no_fsspec(ranks, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with copied_here([ranks]) as here:
        assert here == [ranks]
