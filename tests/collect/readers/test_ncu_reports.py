import importlib
import sys
from types import SimpleNamespace

import pytest

from kprof.collect.readers.ncu import reader
from kprof.collect.readers.ncu.reader import read
from kprof.errors import TraceError
from kprof.trace import NOT_RECORDED, Gpu
from tests.ncu_files import DURATION, launch, raw_page
from tests.quantities import quantities_in


class Metric:
    """A metric as NVIDIA's module gives it."""

    def __init__(self, value, unit=""):
        self.value, self.told = value, unit

    def unit(self):
        return self.told

    def as_double(self):
        return float(self.value)

    def as_uint64(self):
        return int(self.value)

    def as_string(self):
        return self.value


class Action:
    """A result as NVIDIA's module gives it."""

    def __init__(self, name, kind=0, **metrics):
        self.called, self.kind, self.metrics = name, kind, metrics

    def name(self, form):
        return f"{self.called}<int>" if form == 1 else self.called

    def workload_type(self):
        return self.kind

    def metric_names(self):
        return tuple(self.metrics)

    def metric_by_name(self, name):
        return self.metrics.get(name)


def module_with(*actions):
    """Return a stand-in for NVIDIA's module, whose report holds one range."""
    part = SimpleNamespace(num_actions=lambda: len(actions), action_by_idx=actions.__getitem__)
    context = SimpleNamespace(num_ranges=lambda: 1, range_by_idx=lambda index: part)
    forms = SimpleNamespace(NameBase_DEMANGLED=1, WorkloadType_KERNEL=0)
    return SimpleNamespace(load_report=lambda path: context, IAction=forms)


def report_in(folder):
    path = folder / "report.ncu-rep"
    path.write_bytes(b"NVR\0")
    return path


def gemm(**further):
    dimensions = {
        f"launch__grid_dim_{axis}": Metric(size)
        for axis, size in zip("xyz", (8, 2, 1), strict=True)
    }
    return Action(
        "gemm",
        **dimensions,
        **{
            DURATION: Metric(2500.0, "nsecond"),
            "dram__bytes_read.sum": Metric(4096.0, "byte"),
            "dram__bytes_write.sum": Metric(512.0, "byte"),
            "launch__stream_id": Metric(13),
            "device__attribute_display_name": Metric("NVIDIA H200"),
        },
        **further,
    )


def test_a_report_is_read_through_the_module_of_nvidia(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncu_report", module_with(gemm()))
    trace = read(report_in(tmp_path))
    found = trace.kernels.astype(object).iloc[0].dropna().to_dict()
    assert found["name"] == "gemm<int>"
    assert (found["duration_ns"], found["grid"], found["stream"]) == (2500, "8,2,1", 13)
    assert (found["dram_read_bytes"], found["dram_written_bytes"]) == (4096, 512)
    assert "block" not in found
    assert [gpu.name for gpu in trace.meta.gpus] == ["NVIDIA H200"]


def test_a_report_without_the_device_and_the_stream_names_neither(tmp_path, monkeypatch):
    action = gemm()
    del action.metrics["launch__stream_id"]
    monkeypatch.setitem(sys.modules, "ncu_report", module_with(action))
    trace = read(report_in(tmp_path))
    assert trace.kernels[["device", "stream"]].to_numpy().tolist() == [[NOT_RECORDED, NOT_RECORDED]]
    assert trace.gpus == (Gpu(None, "NVIDIA H200"),)


def test_results_that_are_no_kernels_are_left_out_and_counted(tmp_path, monkeypatch):
    graph = Action("graph", kind=3)
    monkeypatch.setitem(sys.modules, "ncu_report", module_with(gemm(), graph))
    trace = read(report_in(tmp_path))
    assert len(trace.kernels) == 1
    (told,) = [one.text for one in trace.meta.caveats if one.id == "other_lines"]
    assert quantities_in(told) == ["1"]


def test_a_report_that_holds_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncu_report", module_with())
    with pytest.raises(TraceError, match="holds no launch"):
        read(report_in(tmp_path))


def test_a_report_that_the_module_refuses_is_an_error(tmp_path, monkeypatch):
    refusal = RuntimeError("version 99 is newer")

    def refuse(path):
        raise refusal

    module = SimpleNamespace(load_report=refuse)
    monkeypatch.setitem(sys.modules, "ncu_report", module)
    with pytest.raises(TraceError, match=str(refusal)):
        read(report_in(tmp_path))


def without_module(monkeypatch):
    def refuse(name):
        raise ImportError(name)

    monkeypatch.setattr(reader.importlib, "import_module", refuse)


def test_without_any_software_of_nvidia_the_fix_is_an_export(tmp_path, monkeypatch):
    without_module(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TraceError) as caught:
        read(report_in(tmp_path))
    assert "pip install ncu-report" in caught.value.fix
    assert "--csv --page raw" in caught.value.fix


def test_the_program_alone_exports_the_report(tmp_path, monkeypatch):
    without_module(monkeypatch)
    (tmp_path / "page.csv").write_text(raw_page(launch("gemm")))
    program = tmp_path / "ncu"
    program.write_text(f'#!/bin/sh\necho "$*" > "{tmp_path}/asked"\ncat "{tmp_path}/page.csv"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    path = report_in(tmp_path)
    assert read(path).kernels["name"].tolist() == ["gemm"]
    asked = (tmp_path / "asked").read_text()
    assert asked == f"--import {path} --csv --page raw --print-units base\n"


def test_the_real_module_finds_nothing_in_a_file_of_something_else(tmp_path):
    pytest.importorskip("ncu_report", reason="NVIDIA's ncu-report is not installed")
    assert importlib.import_module("ncu_report")
    with pytest.raises(TraceError, match="holds no launch"):
        read(report_in(tmp_path))
