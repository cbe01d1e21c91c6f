"""Questions that a capture cannot answer, why, and how to know."""

from kprof.analyze.capture_quality.unanswered import find_unanswered
from tests.traces import analyzed_trace_of, recorded


def questions(trace):
    return {found.question: found for found in find_unanswered(trace)}


def test_a_question_that_the_capture_cannot_answer_says_why_and_how_to_know():
    (memory,) = [q for name, q in questions(analyzed_trace_of({})).items() if "memory" in name]
    assert all(part in memory.sentence for part in (memory.because, memory.fix))
    assert "profile_memory=True" in memory.fix


def test_a_run_of_kprofs_own_is_recorded_again_with_its_own_options():
    found = questions(recorded((100,), (100,)))
    options = {word for q in found.values() for word in q.fix.split() if word.startswith("--")}
    assert options >= {"--memory", "--no-shapes", "--stacks"}
    assert not any("kprof run" in q.fix for q in found.values() if "--memory" in q.fix)


def test_what_nsight_cannot_record_torchs_profiler_can():
    (memory,) = [
        q for name, q in questions(analyzed_trace_of({}, tool="nsys")).items() if "memory" in name
    ]
    assert all(part in memory.fix for part in ("kprof run", "without --nsys", "with --memory"))


def test_a_capture_that_tells_everything_leaves_no_question_open():
    trace = analyzed_trace_of(
        {"op": "aten::mm", "module": "mlp", "step": 0},
        ranges=[
            {"input_shapes": "[[2, 2]]"},
            {"kind": "step", "name": "0"},
            {"kind": "python", "name": "train.py(3): step"},
        ],
        samples=[{"quantity": "power_w"}, {"source": "profiler", "quantity": "allocated_bytes"}],
        recording=recorded((100,), (100, 100)).meta.recording,
    )
    assert find_unanswered(trace) == []


def test_what_was_recorded_by_kprof_run_is_not_advised_to_be():
    own = questions(recorded((100,), (100, 100)))["How long is a step?"]
    assert 'kprof.range("step")' in own.fix
    assert "kprof run" not in own.fix
    other = questions(analyzed_trace_of({}))["How long is a step?"]
    assert all(part in other.fix for part in ("kprof run", 'kprof.range("step")'))


def test_a_window_of_a_service_says_why_the_hosts_speed_was_not_measured():
    def speed_of(**meta):
        trace = analyzed_trace_of({"activity": "host", "device": -1}, gpus=(), device=None, **meta)
        return questions(trace)["How much of the device is used: MFU, MBU, bounds?"]

    window = speed_of(recording=recorded((100,), (100, 100)).meta.recording)
    assert window.because != speed_of().because
    assert "without --trigger" in window.fix
    assert speed_of().fix == "record with `kprof run`"
