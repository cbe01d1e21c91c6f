"""However a trace is written, its books are the same; whatever is damaged, they balance."""

import codecs
import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprof.analyze.attribution.ledger import balance, truth_columns
from kprof.errors import KprofError
from kprof.opened import open_run, read
from tests.kineto_files import annotation, kernel, launch, operator
from tests.traces import measured

EVENTS = [
    annotation("ProfilerStep#1", ts=0.5, dur=90),
    *(operator(ts=10 * i, dur=9.125, args={"External id": i}) for i in range(1, 6)),
    *(launch(ts=10 * i + 1, args={"External id": i, "correlation": i}) for i in range(1, 6)),
    *(kernel(ts=10 * i + 4, dur=7.001 * i, args={"correlation": i}) for i in range(1, 7)),
]
DOCUMENT = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
    "traceEvents": EVENTS,
}
PUBLIC = Path(__file__).parents[3] / "shared" / "traces" / "public" / "kineto"
SMALL = [p for p in sorted(PUBLIC.glob("**/*.json.gz")) if p.stat().st_size < 200_000]


# What differs between forms of one trace because the files do.
OF_THE_FILE = {"file", "bytes", "raw_json_bytes"}


def books_of(folder, content, name="trace.json"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    trace = measured(read([path]))
    columns = truth_columns(trace, balance(trace))
    return {name: columns[name] for name in columns.keys() - OF_THE_FILE}


def with_events(document, events):
    return json.dumps({**document, "traceEvents": events})


def shuffled(document):
    events = list(document["traceEvents"])
    random.Random(0).shuffle(events)
    return with_events(document, events)


def with_ids_as_text(document):
    def event(e):
        ids = {key: str(e[key]) for key in ("pid", "tid") if key in e}
        args = e.get("args") or {}
        args = {k: str(v) if isinstance(v, int) else v for k, v in args.items()}
        return {**e, **ids, "args": args}

    return with_events(document, [event(e) for e in document["traceEvents"]])


def with_keys_reversed(document):
    def turned(value):
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(v) for v in value] if isinstance(value, list) else value

    return json.dumps(turned(document))


def halves_packed_apart(document):
    text = json.dumps(document).encode()
    return gzip.compress(text[: len(text) // 2]) + gzip.compress(text[len(text) // 2 :])


FORMS = {
    "compact": lambda d: json.dumps(d, separators=(",", ":")),
    "indented": lambda d: json.dumps(d, indent=3, ensure_ascii=False),
    "carriage returns": lambda d: json.dumps(d, indent=1).replace("\n", "\r\n"),
    "byte order mark": lambda d: codecs.BOM_UTF8 + json.dumps(d).encode(),
    "packed": lambda d: gzip.compress(json.dumps(d).encode()),
    "packed in two": halves_packed_apart,
    "packed byte order mark": lambda d: gzip.compress(codecs.BOM_UTF8 + json.dumps(d).encode()),
    "events reversed": lambda d: with_events(d, d["traceEvents"][::-1]),
    "events shuffled": shuffled,
    "keys reversed": with_keys_reversed,
    "ids as text": with_ids_as_text,
}


@pytest.mark.parametrize("form", FORMS)
def test_the_books_do_not_depend_on_the_form(tmp_path, form):
    expected = books_of(tmp_path, json.dumps(DOCUMENT))
    assert expected["gpu_sum_ns"] == 147_021
    assert books_of(tmp_path, FORMS[form](DOCUMENT)) == expected


def test_a_bare_list_has_the_books_of_the_whole_but_names_no_device(tmp_path):
    expected = {**books_of(tmp_path, json.dumps(DOCUMENT)), "device": None}
    assert books_of(tmp_path, json.dumps(EVENTS)) == expected


@pytest.mark.parametrize("spelling", ["{}.000", "{}000e-3", "{}.0E0"])
def test_a_time_is_the_same_however_it_is_spelled(tmp_path, spelling):
    text = json.dumps(DOCUMENT)
    spelled = text.replace('"ts": 14,', f'"ts": {spelling.format(14)},')
    assert spelled != text
    assert books_of(tmp_path, spelled) == books_of(tmp_path, text)


@pytest.mark.slow
@pytest.mark.skipif(not SMALL, reason="the public traces are not at hand")
@pytest.mark.parametrize("path", SMALL, ids=[p.name[:20] for p in SMALL])
def test_public_traces_have_the_same_books_in_every_form(tmp_path, path):
    text = gzip.decompress(path.read_bytes())
    expected = books_of(tmp_path, text)
    document = json.loads(text)
    different = [name for name, f in FORMS.items() if books_of(tmp_path, f(document)) != expected]
    assert different == []


@pytest.mark.parametrize(
    "times",
    [
        [{"ts": -4e15}, {"ts": 4e15}],
        [{"dur": 3e15}, {"dur": 3e15, "ts": 2}],
    ],
)
def test_times_that_cannot_be_added_up_are_one_clear_error(tmp_path, times):
    document = {"traceEvents": [kernel(**time) for time in times]}
    with pytest.raises(KprofError, match="years"):
        books_of(tmp_path, json.dumps(document))


def test_host_operators_that_took_no_time_are_nothing_to_analyze(tmp_path):
    with pytest.raises(KprofError, match="nothing to analyze"):
        books_of(tmp_path, json.dumps([operator(dur=0)]))


NAMES = ["aten::mm", "aten::add", "ProfilerStep#1", "kprof.step#²", "Memcpy HtoD", "ncclAllReduce"]
CATEGORIES = ["cpu_op", "user_annotation", "cuda_runtime", "kernel", "gpu_memcpy", "overhead"]
TIMES = [0, 1, 2.5, 10.001, 30]
ODD = st.sampled_from(
    [None, True, -1, 0.5, 2**31, 2**63, 10**30, 1e18, "", "5", "²", "9" * 30, [], {}, [[2, 3]]]
)
SHAPES = st.lists(st.lists(st.integers(0, 8), max_size=4), max_size=4)
ARGS = {
    "External id": st.integers(0, 4),
    "correlation": st.integers(0, 4),
    "device": st.integers(0, 1),
    "stream": st.integers(7, 8),
    "Input Dims": SHAPES,
    "Input type": st.just(["float"] * 4),
    "bytes": st.integers(0, 9),
    "Sequence number": st.integers(0, 4),
    "Fwd thread id": st.integers(0, 1),
}
EVENT = {
    "ph": st.just("X"),
    "cat": st.sampled_from(CATEGORIES),
    "name": st.sampled_from(NAMES),
    "pid": st.integers(0, 1),
    "tid": st.integers(7, 8),
    "ts": st.sampled_from(TIMES),
    "dur": st.sampled_from(TIMES),
    "args": st.fixed_dictionaries({}, optional=ARGS),
}
SOUND = st.fixed_dictionaries(EVENT)
STRANGE = st.builds(
    lambda event, key, value: {**event, key: value}, SOUND, st.sampled_from(sorted(EVENT)), ODD
)
ODD_ARGS = st.builds(
    lambda event, key, value: {**event, "args": {**event["args"], key: value}},
    SOUND,
    st.sampled_from(sorted(ARGS)),
    ODD,
)
AROUND = st.fixed_dictionaries(
    {},
    optional={
        "deviceProperties": st.one_of(ODD, st.lists(st.fixed_dictionaries({"name": ODD}))),
        "distributedInfo": st.one_of(ODD, st.fixed_dictionaries({"rank": ODD})),
        "baseTimeNanoseconds": ODD,
    },
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(SOUND, SOUND, ODD_ARGS, STRANGE), min_size=1, max_size=12), AROUND)
def test_any_events_balance_or_are_one_clear_error(tmp_path_factory, events, around):
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / "trace.json"
    path.write_text(json.dumps({**around, "traceEvents": events}))
    try:
        ledger = open_run([path], folder / "run", force=False).ledger
    except KprofError as error:
        assert error.fix
        assert not (folder / "run").exists()
    else:
        assert ledger.balances
        assert min(ledger.sum_ns, ledger.idle_ns, ledger.overlapped_ns) >= 0


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_damage_to_the_bytes_balances_or_is_one_clear_error(tmp_path_factory, data):
    content = bytearray(json.dumps(DOCUMENT).encode())
    is_packed = data.draw(st.booleans())
    if is_packed:
        content = bytearray(gzip.compress(content, mtime=0))
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / f"trace.json{'.gz' if is_packed else ''}"
    path.write_bytes(content)
    try:
        assert balance(measured(read([path]))).balances
    except KprofError as error:
        assert error.fix
