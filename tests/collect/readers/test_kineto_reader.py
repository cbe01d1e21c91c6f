"""Each kind of Kineto event becomes the row that kprof's tables declare for it."""

import gzip
import json

import pytest

from kprof.analyze.capture_quality.unanswered import why_no_work
from kprof.collect.readers.kineto.reader import knows, read
from kprof.trace import Gpu, ProcessGroup, columns_of
from tests.kineto_files import allocation, annotation, kernel, launch, operator, python_call, write
from tests.quantities import quantities_in


def row(table, number=0):
    """Return a row as plain values, None where one is missing."""
    return {
        key: None if value != value else value for key, value in _records(table)[number].items()
    }


def _records(table):
    return table.astype(object).where(table.notna(), None).to_dict("records")


@pytest.mark.parametrize("table", ["kernels", "ranges", "samples"])
@pytest.mark.parametrize(
    "events", [[operator()], [kernel()], [operator(), launch(), kernel(), allocation()]]
)
def test_every_table_has_exactly_the_declared_columns(tmp_path, events, table):
    dtypes = getattr(read(write(tmp_path, *events)), table).dtypes
    assert [(name, str(dtype)) for name, dtype in dtypes.items()] == [
        (column.name, column.dtype) for column in columns_of(table, "reader")
    ]


def test_a_kernel_is_an_activity_with_its_place_and_its_launch(tmp_path):
    event = kernel(
        name="gemm<&lt;>",
        ts=5.001,
        dur=2.5,
        args={
            "device": 1,
            "stream": 13,
            "correlation": 42,
            "grid": [8, 1, 2],
            "block": [128, 1, 1],
        },
    )
    found = row(read(write(tmp_path, event)).kernels)
    assert {name: value for name, value in found.items() if value is not None} == {
        "name": "gemm<&lt;>",
        "activity": "kernel",
        "rank": 0,
        "device": 1,
        "stream": 13,
        "start_ns": 5001,
        "duration_ns": 2500,
        "correlation": 42,
        "grid": "8,1,2",
        "block": "128,1,1",
    }


@pytest.mark.parametrize(
    ("category", "activity"),
    [
        ("gpu_memcpy", "memcpy"),
        ("gpu_memset", "memset"),
        ("Memcpy", "memcpy"),
        ("Memset", "memset"),
    ],
)
def test_a_copy_or_a_set_carries_its_bytes_even_as_text(tmp_path, category, activity):
    events = kernel(cat=category, args={"bytes": 64}), kernel(cat=category, args={"bytes": "65"})
    kernels = read(write(tmp_path, *events)).kernels
    assert kernels["activity"].tolist() == [activity] * 2
    assert kernels["copied_bytes"].tolist() == [64, 65]


def test_a_kernel_of_a_collective_names_it_and_its_process_group(tmp_path):
    args = {"Collective name": "allreduce", "Process Group Name": "3", "Seq": 17}
    event = kernel(args=args | {"Process Group Ranks": "[0, 4]"})
    found = row(read(write(tmp_path, event)).kernels)
    assert (found["collective"], found["group"]) == ("allreduce", "3 [0, 4]")
    assert found["group_sequence"] == 17


def test_a_process_group_that_does_not_name_its_ranks_is_unknown(tmp_path):
    args = {"Collective name": "allreduce", "Process Group Name": "3"}
    event = kernel(args=args | {"Process Group Ranks": "[]"})
    assert row(read(write(tmp_path, event)).kernels)["group"] is None


def test_a_graph_node_of_zero_is_no_graph_node(tmp_path):
    events = kernel(args={"graph node id": 0}), kernel(args={"graph node id": 9})
    nodes = read(write(tmp_path, *events)).kernels["graph_node"]
    assert nodes.isna().tolist() == [True, False]
    assert nodes[1] == 9


def test_a_kernel_without_device_and_stream_takes_them_from_its_track(tmp_path):
    event = kernel(pid=3, tid="stream 20")
    event["args"] = {}
    found = row(read(write(tmp_path, event)).kernels)
    assert (found["device"], found["stream"], found["correlation"]) == (3, 20, None)


@pytest.mark.parametrize("sentinel", [-1, 4294967295])
def test_a_stream_that_the_recorder_did_not_know_stays_as_recorded(tmp_path, sentinel):
    path = write(tmp_path, kernel(args={"stream": sentinel}))
    assert read(path).kernels["stream"].tolist() == [sentinel]


def test_an_operator_carries_its_links_and_its_inputs(tmp_path):
    args = {
        "External id": 7,
        "Sequence number": 3,
        "Fwd thread id": 1,
        "Input Dims": [[2, 3], []],
        "Input type": ["float", "Scalar"],
        "Input Strides": [[3, 1], []],
        "Concrete Inputs": ["", "1"],
    }
    assert row(read(write(tmp_path, operator(args=args))).ranges) == {
        "kind": "op",
        "name": "aten::mm",
        "rank": 0,
        "thread": 11,
        "start_ns": 1000,
        "duration_ns": 2000,
        "correlation": None,
        "external_id": 7,
        "sequence": 3,
        "forward_thread": 1,
        "input_shapes": "[[2, 3], []]",
        "input_dtypes": '["float", "Scalar"]',
        "input_strides": "[[3, 1], []]",
        "input_values": '["", "1"]',
        "message": None,
    }


def test_a_collective_carries_what_its_record_says_of_its_message(tmp_path):
    message = {"In msg nelems": 100, "Out msg nelems": 800, "dtype": "Float", "Group size": 8}
    args = {**message, "Collective name": "_allgather_base"}
    ranges = read(write(tmp_path, operator(args=args), operator(ts=9))).ranges
    assert ranges["message"].tolist()[0] == '["_allgather_base", 100, 800, "Float", 8]'
    assert ranges["message"].isna().tolist() == [False, True]


def test_a_message_without_its_number_of_ranks_leaves_that_open(tmp_path):
    args = {"In msg nelems": 5, "Out msg nelems": 5, "dtype": "Int", "Collective name": "send"}
    assert row(read(write(tmp_path, operator(args=args))).ranges)["message"] == (
        '["send", 5, 5, "Int", null]'
    )


def test_inputs_written_in_another_layout_are_the_same_inputs(tmp_path):
    path = write(tmp_path, operator(args={"Input Dims": [[2, 3]]}), operator())
    text = path.read_text().replace("[[2, 3]]", "[\n [2,\n 3]\n ]")
    path.write_text(text.replace('"External id": 1}', '"External id": 1, "Input Dims": [[2,3]]}'))
    assert read(path).ranges["input_shapes"].tolist() == ["[[2, 3]]", "[[2, 3]]"]


def test_an_operator_without_recorded_inputs_has_missing_inputs(tmp_path):
    trace = read(write(tmp_path, operator(), operator(args={"Input Dims": None})))
    assert trace.ranges["input_shapes"].isna().all()
    assert why_no_work(trace) is not None


@pytest.mark.parametrize(
    ("event", "kind", "name"),
    [
        (operator(), "op", "aten::mm"),
        (operator(cat="Operator"), "op", "aten::mm"),
        (launch(), "runtime", "cudaLaunchKernel"),
        (launch(cat="cuda_driver", name="cuLaunchKernel"), "runtime", "cuLaunchKernel"),
        (launch(cat="Runtime", name="hipLaunchKernel"), "runtime", "hipLaunchKernel"),
        (annotation("Optimizer.step#AdamW.step"), "range", "Optimizer.step#AdamW.step"),
        (annotation("ProfilerStep#12"), "step", "ProfilerStep#12"),
        (annotation("kprof.step#3"), "step", "3"),
        (operator(name="kprof.phase#forward"), "phase", "forward"),
        (annotation("kprof.module#layers.0.mlp"), "module", "layers.0.mlp"),
        (annotation("kprof.other#x"), "range", "kprof.other#x"),
        (launch(name="ProfilerStep#1"), "runtime", "ProfilerStep#1"),
        (python_call("train.py(3): main"), "python", "train.py(3): main"),
        (python_call("nn.Module: Linear_3"), "module", "Linear_3"),
        (operator(name="nn.Module: Linear_3"), "op", "nn.Module: Linear_3"),
    ],
)
def test_a_host_range_has_its_kind_and_its_name_without_prefix(tmp_path, event, kind, name):
    found = row(read(write(tmp_path, event)).ranges)
    assert (found["kind"], found["name"]) == (kind, name)


def test_a_runtime_call_carries_both_of_its_links(tmp_path):
    found = row(read(write(tmp_path, launch(args={"External id": 5, "correlation": 6}))).ranges)
    assert (found["external_id"], found["correlation"]) == (5, 6)


def test_ids_written_as_text_are_the_same_ids(tmp_path):
    args = {"External id": "5", "correlation": "6"}
    found = row(read(write(tmp_path, launch(tid="11", args=args))).ranges)
    assert (found["external_id"], found["correlation"], found["thread"]) == (5, 6, 11)


@pytest.mark.parametrize("odd", [None, "", [7], {"id": 7}, 7.5])
def test_an_id_that_can_stand_for_no_call_is_missing(tmp_path, odd):
    path = write(tmp_path, launch(args={"correlation": odd}), launch(args={"correlation": 8}))
    assert _records(read(path).ranges[["correlation"]]) == [
        {"correlation": None},
        {"correlation": 8},
    ]


def test_threads_of_several_processes_stay_apart(tmp_path):
    tracks = [(10, 11), (10, 12), (20, 12), (20, "main"), (20, "other"), ("Spans", "main")]
    events = [operator(pid=pid, tid=tid) for pid, tid in tracks]
    threads = read(write(tmp_path, *events, operator(pid=10, tid=12))).ranges["thread"].tolist()
    assert threads[0] == 11
    assert threads[6] == threads[1]
    assert len(set(threads)) == len(tracks)
    assert max(threads[3:6]) < 0


def test_an_allocation_becomes_a_sample_of_each_quantity(tmp_path):
    events = (
        operator(),
        allocation(),
        allocation(**{"Device Id": -1, "Device Type": 0, "Total Reserved": None}),
    )
    samples = read(write(tmp_path, *events)).samples
    assert samples[["time_ns", "device", "source", "quantity", "value"]].values.tolist() == [
        [5000, 0, "profiler", "allocated_bytes", 512.0],
        [5000, 0, "profiler", "reserved_bytes", 2048.0],
        [5000, -1, "profiler", "allocated_bytes", 512.0],
    ]


def test_events_are_counted_and_what_is_no_activity_and_no_range_makes_no_row(tmp_path):
    events = (
        operator(args={"Sequence number": 4}),
        kernel(),
        python_call("nn.Module: Linear_0"),
        {"ph": "X", "cat": "overhead", "name": "Buffer Flush", "ts": 1, "dur": 1.25, "pid": -1},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "step", "ts": 1, "dur": 2, "pid": 0},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "ts": 1},
        {"ph": "b", "cat": "cpu_op", "name": "aten::half", "ts": 1},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    )
    trace = read(write(tmp_path, *events))
    assert trace.ranges["kind"].tolist() == ["op", "module", "overhead"]
    assert len(trace.kernels) == 1
    assert trace.meta.counts == {
        "events": 8,
        "file_bytes": (tmp_path / "trace.json").stat().st_size,
        "raw_json_bytes": (tmp_path / "trace.json").stat().st_size,
        "nn_module_events": 1,
        "seq_ops": 1,
        "profiler_overhead_ns": 1250,
        "cat:cpu_op": 2,
        "cat:kernel": 1,
        "cat:python_function": 1,
        "cat:overhead": 1,
        "cat:gpu_user_annotation": 1,
        "cat:ac2g": 1,
        "ph:M": 1,
    }


def test_what_the_file_says_about_the_machine_is_kept(tmp_path):
    gpu = {"id": 1, "name": "H200", "totalGlobalMem": 99, "numSms": 132}
    path = write(
        tmp_path,
        operator(),
        deviceProperties=[{**gpu, "computeMajor": 9, "computeMinor": 0}, {"id": 2, "name": ""}],
        distributedInfo={"backend": "nccl", "rank": 3, "nccl_version": "2.27.5"},
        cuda_runtime_version=13020,
        cupti_version=130001,
        baseTimeNanoseconds=1790857026000000000,
    )
    trace = read(path)
    first, second = trace.meta.gpus
    assert (first.index, first.name, first.num_sms, first.memory_bytes) == (1, "H200", 132, 99)
    assert (first.compute_capability, second.compute_capability) == ("9.0", None)
    assert second.num_sms is None
    assert trace.meta.versions == {"cuda_runtime": "13.2", "cupti": "130001", "nccl": "2.27.5"}
    assert trace.meta.base_time_ns == 1790857026000000000
    assert trace.ranges["rank"].tolist() == [3]
    assert (trace.meta.source, trace.meta.tool) == ("trace.json", "kineto")


def test_the_process_groups_that_torchs_profiler_lists_are_kept(tmp_path):
    listed = [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]},
        {"pg_name": "1", "ranks": ["1", "0"]},
        {"pg_name": "2", "ranks": ["a"]},
        {"pg_name": "3"},
        "4",
    ]
    told = read(write(tmp_path, operator(), distributedInfo={"pg_config": listed}))
    assert told.meta.process_groups == (
        ProcessGroup("0", (0, 1), "default_pg"),
        ProcessGroup("1", (1, 0)),
    )
    damaged = read(write(tmp_path, operator(), distributedInfo={"pg_config": {"pg_name": 1}}))
    assert damaged.meta.process_groups == ()


def test_large_epochs_with_decimals_keep_every_nanosecond(tmp_path):
    path = write(tmp_path, kernel(ts=1), kernel(ts=2))
    text = path.read_text().replace('"ts": 2', '"ts": 1712867402348256.123')
    path.write_text(text)
    assert read(path).kernels["start_ns"].tolist() == [1000, 1712867402348256123]


def test_a_bare_list_of_events_is_a_trace(tmp_path):
    path = tmp_path / "events.json"
    path.write_text(json.dumps([operator(), kernel()]))
    assert len(read(path).kernels) == 1


def test_events_may_stand_before_the_other_keys_and_be_compressed(tmp_path):
    path = tmp_path / "trace.json.gz"
    document = {"traceEvents": [operator()], "distributedInfo": {"rank": 2}}
    path.write_bytes(gzip.compress(json.dumps(document, indent=1).encode()))
    trace = read(path)
    assert trace.ranges["rank"].tolist() == [2]
    assert trace.meta.counts["raw_json_bytes"] == len(json.dumps(document, indent=1))


def test_a_key_of_the_same_name_deeper_in_the_file_is_not_the_list_of_events(tmp_path):
    path = tmp_path / "trace.json"
    inner = {"traceEvents": [kernel(), kernel()]}
    path.write_text(json.dumps({"metadata": inner, "traceEvents": [operator()]}))
    trace = read(path)
    assert (len(trace.kernels), len(trace.ranges)) == (0, 1)


def test_a_folder_is_no_trace_whatever_its_name(tmp_path):
    folder = tmp_path / "trace.json"
    folder.mkdir()
    assert not knows(folder, b"")


@pytest.mark.parametrize(
    ("name", "head", "is_known"),
    [
        ("trace.json", b"", True),
        ("trace.json.gz", b'{"schemaVersion": 1', True),
        ("trace.pt", b' {"traceEvents": [', True),
        ("trace.sqlite.gz", b"SQLite format 3\x00", False),
        ("notes.txt", b"{}", False),
        ("proton.json", b'[{"children":[', False),
        ("proton.json", b'[\n {"frame": {"name"', False),
    ],
)
def test_a_file_is_known_by_its_name_or_by_how_it_begins(tmp_path, name, head, is_known):
    assert knows(tmp_path / name, head) is is_known


@pytest.mark.parametrize("name", ["ProfilerStep#²", "kprof.step#x", f"ProfilerStep#{'9' * 30}"])
def test_a_step_without_a_number_of_its_own_is_a_range(tmp_path, name):
    ranges = read(write(tmp_path, annotation(name))).ranges
    assert (ranges["kind"][0], ranges["name"][0]) == ("range", name)


@pytest.mark.parametrize("device", [2**31, 2**40, -7, "GPU"])
def test_a_device_that_no_machine_has_is_not_taken_for_another(tmp_path, device):
    path = write(tmp_path, kernel(args={"device": device}, pid="gpu"))
    assert read(path).kernels["device"].tolist() == [-1]


@pytest.mark.parametrize("rank", [-1, 2**20, 2**40, 2.5e30, "x", None, [1]])
def test_a_rank_that_is_none_counts_as_not_told(tmp_path, rank):
    path = write(tmp_path, kernel(), distributedInfo={"rank": rank})
    assert read(path).kernels["rank"].tolist() == [0]


def test_what_a_file_says_wrongly_about_its_gpus_is_missing(tmp_path):
    odd = {"name": None, "numSms": "many", "totalGlobalMem": 1e30, "computeMajor": None}
    path = write(tmp_path, kernel(), deviceProperties=[{**odd, "computeMinor": {}}])
    assert read(path).meta.gpus == (Gpu(0, ""),)


def test_a_begun_activity_without_an_end_is_left_out_and_counted(tmp_path):
    trace = read(write(tmp_path, kernel(), kernel(ph="B")))
    assert len(trace.kernels) == 1
    assert trace.meta.counts["unmatched_edges"] == 1


def test_a_range_without_an_end_lasts_to_the_end_of_the_file_and_is_no_damage(tmp_path):
    begun = annotation("epoch", ph="B", ts=1)
    trace = read(write(tmp_path, operator(ts=2, dur=3), kernel(ts=5, dur=4.5), begun))
    assert trace.ranges.set_index("name")["duration_ns"]["epoch"] == 8500
    assert [caveat.id for caveat in trace.meta.caveats] == ["open_ranges"]
    assert "unmatched_edges" not in trace.meta.counts


def test_what_the_profiler_says_it_dropped_is_a_caveat(tmp_path):
    said = ["WARNING:2026-01-01 Dropped 12 activity records", "WARNING: Dropped 3 activity records"]
    (caveat,) = read(write(tmp_path, kernel(dur=1.5), WARNING=said)).meta.caveats
    assert (quantities_in(caveat.text), caveat.id) == (["15"], "dropped_records")


def test_a_profiler_whose_buffers_were_full_is_a_caveat(tmp_path):
    said = ["WARNING: Exceeded max GPU buffer count (33 >= 33) - terminating tracing"]
    (caveat,) = read(write(tmp_path, kernel(dur=1.5), WARNING=said)).meta.caveats
    assert caveat.id == "full_buffers"
