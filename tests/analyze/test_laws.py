"""Laws that hold for every trace: scaled, shifted, permuted or longer, it tells the same."""

import gzip
import itertools
import json
import math
import random
import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.attribution.steps import denominator, find_steps, time_steps, without_lead
from kprof.analyze.diff.alignment import find_differences
from kprof.analyze.diff.comparability import find_obstacle
from kprof.analyze.findings.recoverable import recoverable_ns
from kprof.analyze.intervals import LAST_NS
from kprof.analyze.passes import analyze
from kprof.analyze.whatif.predict import suggest
from kprof.commands.whatif import parse_change
from kprof.device import find_device
from kprof.errors import KprofError
from kprof.opened import read
from kprof.report.difference import Compared, result_of_difference
from kprof.report.result import result_of
from kprof.report.section import Text, sections_of
from kprof.report.sections import idle, run, time, utilisation
from kprof.trace import Recording
from tests import kineto_files as kineto
from tests.analyze.simulated import END_OF_STEP, Machine, item, kernel, synchronize
from tests.section_traces import tables

RECORDED = Path(__file__).parents[1] / "data" / "h200"
SHARED = Path(__file__).parents[3] / "shared" / "traces"
QUICK = [RECORDED / f"{name}.json.gz" for name in ("compiled", "cudagraph")]
OTHERS = sorted(RECORDED.glob("*.json.gz")) + sorted(
    path for path in SHARED.rglob("*.gz") if "ncu" not in path.name
)
ALL = [
    *(pytest.param(path, id=path.name) for path in QUICK),
    *(
        pytest.param(path, id=path.name, marks=pytest.mark.slow)
        for path in OTHERS
        if path not in QUICK
    ),
]
# Small inputs of one peculiarity each; those that are refused are another test's.
CASES = [
    path
    for path in sorted((SHARED.parent / "cases" / "traces").glob("*.json"))
    if not path.name.endswith(".expected.json")
]
SAMPLED = sorted(SHARED.rglob("sampled_rank-*.json.gz"))
# Whole microseconds: of events with the same start and length only their order tells which holds
# the other.
ORDERED = ("sampled_rank", "test.json")
OF_TIME = ("ledger", "time", "idle", "replayed")
NAMES = ("gemm", "vectorized_elementwise_kernel", "ncclDevKernel_AllReduce")
# Of shares, and of sums of pieces that are rounded to a ns each.
ROUNDED, ROUNDED_NS = 1e-4, 64


def analyzed(trace):
    """Return a trace that was read as `kprof open` analyzes it."""
    device = find_device(trace.gpus[0].name) if trace.gpus else None
    return analyze(replace(trace, meta=replace(trace.meta, device=device)))


def told(trace):
    """Return the document of `kprof open --json` of a trace that was read."""
    found = analyzed(trace)
    return result_of(found, balance(found))


def compared(a, b):
    """Return the document of `kprof diff --json` of two analyzed traces, without their names."""
    document = result_of_difference(Compared(a, b, find_differences(a, b), ()))
    return {name: document[name] for name in ("difference_ns", "layouts")}


def mirrored(document):
    """Return what a difference is when its two runs change places."""
    other = {"a": "b", "b": "a", "names_a": "names_b", "names_b": "names_a"}
    fates = {"appeared": "vanished", "vanished": "appeared"}
    layouts = {
        layout: [
            {
                **{other.get(key, key): value for key, value in row.items()},
                "fate": fates.get(row["fate"], row["fate"]),
                "difference_ns": -row["difference_ns"],
            }
            for row in rows
        ]
        for layout, rows in document["layouts"].items()
    }
    return {"difference_ns": -document["difference_ns"], "layouts": layouts}


def by_part(document):
    """Return a difference with the rows of each layout by their names: near ties may swap."""
    rows = {
        layout: {str((row["names_a"], row["names_b"], row["is_idle"])): row for row in of}
        for layout, of in document["layouts"].items()
    }
    assert all(len(rows[layout]) == len(of) for layout, of in document["layouts"].items())
    return {"difference_ns": document["difference_ns"], "layouts": rows}


class Read:
    """A recorded trace that was read, analyzed and told once for all laws of one file."""

    def __init__(self, path):
        self.path, self.trace = path, read([path])

    @cached_property
    def analyzed(self):
        return analyzed(self.trace)

    @cached_property
    def told(self):
        return result_of(self.analyzed, balance(self.analyzed))


@pytest.fixture(scope="module", params=ALL)
def recorded(request):
    """One recorded trace after another: a module's fixture has all of its laws in a row."""
    return Read(request.param)


def changed(trace, change, *columns):
    """Return the trace with `change` made to these columns of its tables, where they have them."""
    tables = {}
    for name in ("kernels", "ranges", "samples"):
        table = getattr(trace, name)
        mine = [column for column in table.columns if column in columns]
        tables[name] = table.assign(**{column: change(table[column]) for column in mine})
    return replace(trace, **tables)


def scaled(trace, factor):
    """Scale all times about the first moment: an epoch's would leave what a Trace holds."""
    moments = [t["start_ns"].min() for t in (trace.kernels, trace.ranges) if len(t)]
    trace = shifted(trace, -int(min(moments)))
    recording = trace.meta.recording
    if recording is not None:
        longer = {
            name: tuple(time_ns * factor for time_ns in getattr(recording, name))
            for name in ("recorded_step_ns", "unrecorded_step_ns", "unrecorded_host_ns")
        }
        trace = replace(trace, meta=replace(trace.meta, recording=replace(recording, **longer)))
    return changed(trace, lambda column: column * factor, "start_ns", "duration_ns", "time_ns")


def slowed(trace, slowdown):
    """Return a trace of which steps that were not recorded took less time, by so many times."""
    times = time_steps(analyzed(trace)).recorded_ns
    numbers = tuple(range(5, 5 + len(times)))
    recording = Recording("steps", 9 + len(times), numbers, "device", tuple(times))
    shorter = tuple(round(time_ns / slowdown) for time_ns in times)
    recording = replace(recording, unrecorded_step_ns=shorter, unrecorded_host_ns=shorter)
    return replace(trace, meta=replace(trace.meta, recording=recording))


def shifted(trace, by_ns):
    return changed(trace, lambda column: column + by_ns, "start_ns", "time_ns")


def differences(one, other, factor=1, path=""):
    """Yield where two documents differ, the times of the first taken `factor` times."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            where = f"{path}/{key}"
            yield from differences(one.get(key), other.get(key), factor, where)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield path, len(one), len(other)
        for at, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, factor, f"{path}[{at}]")
    elif not is_same(one, other, factor, is_time=path.endswith("_ns") or "/buckets/" in path):
        yield path, one, other


def is_same(one, other, factor, *, is_time):
    """Tell whether two values of a document are the same but for rounding."""
    if isinstance(one, bool | str | None) or isinstance(other, bool | str | None):
        return one == other
    slack = ROUNDED_NS * factor if is_time else 0.0
    return math.isclose(one * factor if is_time else one, other, rel_tol=ROUNDED, abs_tol=slack)


def parts(document, names):
    """Return parts of a document, without the size and name of the file that it was read from."""
    found = {name: document[name] for name in names if name in document}
    hidden = ("bytes", "file", "raw_json_bytes", "workload")
    shown = {"ledger": document["ledger"], "summary": found.get("summary") or {}}
    return found | {
        name: {key: value for key, value in part.items() if key not in hidden}
        for name, part in shown.items()
    }


def permuted(path, folder, seed):
    """Write a Kineto file with its events in another order, and other correlation ids."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    # Times stay as they are written: a float holds no nanoseconds of an epoch.
    quoted = re.sub(r'("(?:ts|dur)": ?)(-?[\d.]+)', r'\1"\2"', text)
    document = json.loads(quoted)
    chance, events = random.Random(seed), document["traceEvents"]
    args = [event["args"] for event in events if isinstance(event.get("args"), dict)]
    flows = [one for one in events if one.get("cat") == "ac2g"]
    for key in ("correlation", "External id"):
        arrows = [(one, "id") for one in flows if key == "correlation"]
        places = [*((one, key) for one in args if type(one.get(key)) is int), *arrows]
        known = sorted({one[name] for one, name in places})
        new = dict(zip(known, chance.sample(known, len(known)), strict=True))
        for one, name in places:
            one[name] = new[one[name]]
    chance.shuffle(events)
    target = folder / "permuted.json"
    written = json.dumps(document)
    target.write_text(re.sub(r'("(?:ts|dur)": ?)"(-?[\d.]+)"', r"\1\2", written))
    return target


@some.composite
def recordings(draw):
    """Draw the events of a training run of one or two streams, with steps or without."""
    steps = draw(some.integers(0, 4))
    events, now, correlation = [], 1_000.0, 0
    ended = {7: 0.0, 20: 0.0}
    launches = draw(
        some.lists(
            some.tuples(
                some.sampled_from(NAMES),
                some.sampled_from([7, 7, 7, 20]),
                some.integers(1, 400),
                some.integers(3, 300),
                some.booleans(),
            ),
            min_size=4,
            max_size=14,
        )
    )
    for number in range(max(steps, 1)):
        begin = now
        for name, stream, took, host, waits in launches:
            now += host
            correlation += 1
            ids = {"correlation": correlation, "External id": correlation}
            events.append(kineto.operator(ts=now, dur=6, args=ids))
            events.append(kineto.launch(ts=now + 1, dur=4, args=ids))
            start = max(now + 8, ended[stream] + 1, *(ended.values() if waits else [0]))
            where = {**ids, "stream": stream}
            events.append(kineto.kernel(name=name, ts=start, dur=took, args=where))
            ended[stream] = start + took
        if steps:
            events.append(kineto.annotation(f"ProfilerStep#{number}", ts=begin, dur=now - begin))
    return events


def kept(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("law")
    gpu = {"id": 0, "name": "NVIDIA H100 80GB HBM3"}
    return kineto.write(folder, *events, deviceProperties=[gpu])


few = settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@few
@given(events=recordings(), factor=some.integers(2, 1_000))
def test_of_a_trace_of_longer_times_all_times_are_longer_and_all_shares_the_same(
    tmp_path_factory, events, factor
):
    trace = read([kept(tmp_path_factory, events)])
    one, other = (parts(told(each), OF_TIME) for each in (trace, scaled(trace, factor)))
    assert list(differences(one, other, factor)) == []


@pytest.mark.slow
@few
@given(events=recordings(), by_ns=some.integers(-900_000, 10**18))
def test_of_a_trace_with_another_clock_nothing_changes(tmp_path_factory, events, by_ns):
    trace = read([kept(tmp_path_factory, events)])
    assert list(differences(told(trace), told(shifted(trace, by_ns)))) == []


@pytest.mark.slow
@few
@given(events=recordings(), seed=some.integers(0, 2**32))
def test_of_a_trace_in_another_order_with_other_ids_nothing_changes(tmp_path_factory, events, seed):
    path = kept(tmp_path_factory, events)
    other = permuted(path, path.parent, seed)
    one, other = (parts(told(read([each])), told(read([path]))) for each in (path, other))
    del one["source"], other["source"]
    assert list(differences(one, other)) == []


@pytest.mark.slow
@few
@given(events=recordings(), number=some.integers(1, 500))
def test_of_a_trace_of_another_rank_nothing_changes(tmp_path_factory, events, number):
    trace = read([kept(tmp_path_factory, events)])
    other = changed(trace, lambda column: column + number, "rank")
    one, other = (parts(told(each), (*OF_TIME, "findings")) for each in (trace, other))
    assert list(differences(one, other)) == []


def assert_savings_are_possible(document):
    """Check that no saving exceeds its cause, nor all of them the step or less than the largest."""
    found = document["findings"]
    savings = [one["saving"] for one in found["findings"]]
    assert len({one["step_ns"] for one in savings}) <= 1
    known = [one for one in found["findings"] if one["saving"]["high_ns"] is not None]
    for one in known:
        saving = one["saving"]
        assert 0 <= saving["low_ns"] <= saving["high_ns"] <= min(one["cause_ns"], saving["step_ns"])
    if (both := found["together"]) is None:
        return
    lows, highs = ([one["saving"][end] for one in known] for end in ("low_ns", "high_ns"))
    assert max(lows) <= both["low_ns"] <= both["high_ns"] <= both["step_ns"]
    assert max(highs) <= both["high_ns"]
    if abs(both["high_ns"] - sum(highs)) > 0.01 * sum(highs):
        is_less = both["high_ns"] < sum(highs)
        assert found["differs_by"] == ("overlap" if is_less else "shared limit")


def test_of_a_recorded_trace_of_longer_times_all_shares_are_the_same(recorded):
    other = told(scaled(recorded.trace, 3))
    assert list(differences(parts(recorded.told, OF_TIME), parts(other, OF_TIME), 3)) == []


def test_of_a_recorded_trace_with_another_clock_nothing_changes(recorded):
    trace = recorded.trace
    tables = [table for table in (trace.kernels, trace.ranges) if len(table)]
    last = max(int((table["start_ns"] + table["duration_ns"]).max()) for table in tables)
    latest = shifted(trace, LAST_NS - 1 - last)
    assert list(differences(recorded.told, told(latest))) == []


def test_of_a_recorded_trace_with_other_ids_ranks_and_order_nothing_changes(recorded, tmp_path):
    if ".json" not in recorded.path.name:
        pytest.skip("no JSON, whose events could change places")
    if recorded.path.name.startswith(ORDERED):
        pytest.skip("events of the same start and length, of which order tells the outer one")
    permutation = read([permuted(recorded.path, tmp_path, seed=1)])
    before, after = recorded.told, told(permutation)
    names = before.keys() - {"source", "versions"}
    assert list(differences(parts(before, names), parts(after, names))) == []
    other = changed(permutation, lambda column: column + 5, "rank")
    found = compared(recorded.analyzed, analyzed(other))
    assert found["difference_ns"] == 0
    assert {row["fate"] for of in found["layouts"].values() for row in of} == {"same"}


@pytest.mark.parametrize("path", QUICK, ids=lambda path: path.name)
def test_a_trace_recorded_twice_as_slow_obeys_the_same_laws(path, tmp_path):
    trace = slowed(read([path]), 2)
    document = told(trace)
    one, other = parts(document, OF_TIME), parts(told(scaled(trace, 3)), OF_TIME)
    assert list(differences(one, other, 3)) == []
    assert list(differences(document, told(shifted(trace, 123_456_789)))) == []
    other = told(slowed(read([permuted(path, tmp_path, seed=1)]), 2))
    names = document.keys() - {"source", "versions"}
    assert list(differences(parts(document, names), parts(other, names))) == []


def assert_one_denominator(found, document):
    """Check that findings, predictions, the split of time and a difference divide by one time."""
    whole = document["denominator"]
    step_ns, diagnosis = whole["step_ns"], document["findings"]
    assert sum(row["time_ns"] for row in document["time"]) == whole["time_ns"]
    assert all(row["time_ns"] > 0 for row in document["time"])
    if len(found.kernels):
        assert (diagnosis["whole_ns"], diagnosis["whole"]) == (step_ns, whole["whole"])
    savings = [diagnosis["together"], *(one["saving"] for one in diagnosis["findings"])]
    predicted = [one for one in document["what_if"] if not one["is_without_recording"]]
    steps_ns = {one["step_ns"] for one in (*savings, *predicted) if one}
    assert steps_ns <= {step_ns}
    assert_idle_and_busy_are_of_it(found, document)
    communication_ns = document["communication"]["exposed_ns"]
    if communication_ns is not None:
        exposed = [row["time_ns"] for row in document["time"] if row["part"] == "collective"]
        assert communication_ns == sum(exposed)
    assert_tables_divide_by_one_time(found, document)
    difference = find_differences(found, found)
    for side in (difference.a, difference.b):
        assert side.window_ns == whole["time_ns"]
        assert (side.step_ns, side.num_gpu_steps) == (step_ns, whole["num_gpu_steps"])
    for rows in difference.layouts.values():
        assert sum(row.a.step_ns for row in rows) == step_ns


def assert_idle_and_busy_are_of_it(trace, document):
    """Check that busy and idle time are of all steps, and that no other window has a percentage."""
    whole_ns, busy = document["denominator"]["time_ns"], document["utilisation"]["busy_share"]
    idle_ns = sum(row["time_ns"] for row in document["time"] if row["is_idle"])
    if busy["value"] is not None:
        assert busy["value"] == pytest.approx(1 - idle_ns / whole_ns)
    if document["idle"] is not None and not trace.is_host_only:
        listed_ns = sum(row["time_ns"] for row in document["idle"]["causes"])
        assert listed_ns == document["idle"]["time_ns"]
        assert listed_ns + document["denominator"]["imbalance_ns"] == idle_ns
    told = [part.text for part in idle.render(trace).parts if isinstance(part, Text)]
    assert not (idle_ns and trace.has_timeline and "There is no gap between activities." in told)
    if find_steps(trace):
        sections = [section.render(trace) for section in (idle, run, time, utilisation)]
        told = [part.text for one in sections for part in one.parts if isinstance(part, Text)]
        assert not re.search(r"% of (?:the window|the elapsed time)", " ".join(told))


UNIT_NS = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}
# Of numbers in three digits, and of shares in tenths of a percent that add up to 100 %.
OF_DIGITS, OF_TENTHS = 0.006, 0.0011


def assert_tables_divide_by_one_time(trace, document):
    """Check that times per step are times over the steps, and shares those of one time a table.

    That time is of all steps; a table of causes, of kinds of communication or of device time has
    the sum of its own.
    """
    steps = document["denominator"]["num_gpu_steps"]
    for table in [one for each in sections_of(trace) for one in tables(each)]:
        headers = [column.header for column in table.columns]
        if "Time" not in headers:
            continue
        columns = {name: [row[headers.index(name)] for row in table.rows] for name in headers}
        times = [in_ns(cell) for cell in columns["Time"]]
        for time_ns, cell in zip(times, columns.get("Per step", ()), strict=False):
            assert in_ns(cell) == pytest.approx(time_ns / steps, rel=2 * OF_DIGITS, abs=0.51)
        if shares := [in_percent(cell) for cell in columns.get("Share", ())]:
            whole_ns = of_which(trace, document, table)
            for time_ns, share in zip(times, shares, strict=True):
                least = OF_DIGITS * share + OF_TENTHS
                assert time_ns / whole_ns == pytest.approx(share, abs=least)


def of_which(trace, document, table):
    """Return the time that the shares of a table are shares of, by its first column."""
    ledger, idle = document["ledger"], document["idle"]
    return {
        "Activity": document["denominator"]["time_ns"],
        "Operator kind": document["denominator"]["time_ns"],
        "Phase": document["denominator"]["time_ns"],
        "Communication": document["communication"]["total_ns"],
        "Cause": idle["time_ns"] if idle else 0,
    }.get(table.columns[0].header, ledger["sum_ns"])


def in_ns(cell):
    number, unit = cell.replace(",", "").split()
    return float(number) * UNIT_NS[unit]


def in_percent(cell):
    return float(cell.removeprefix("< ").removesuffix(" %")) / 100


def test_all_shares_of_a_recorded_trace_have_one_denominator(recorded):
    assert_one_denominator(recorded.analyzed, recorded.told)


@pytest.mark.skipif(not SAMPLED, reason="needs ../shared/traces")
def test_all_shares_of_recorded_ranks_have_one_denominator():
    assert_one_denominator(*analyzed_and_told(read(SAMPLED)))


def analyzed_and_told(trace):
    found = analyzed(trace)
    return found, result_of(found, balance(found))


@few
@given(one=recordings(), other=recordings())
def test_all_shares_of_generated_ranks_have_one_denominator(tmp_path_factory, one, other):
    paths = [kept(tmp_path_factory, events) for events in (one, other)]
    assert_one_denominator(*analyzed_and_told(read(paths)))


def test_no_saving_of_a_recorded_trace_exceeds_its_cause(recorded):
    assert_savings_are_possible(recorded.told)


def most_of_a_gpu(trace, ns_of_idle, causes):
    """Return the time of these causes of a step, on the GPU on which it is longest."""
    idle = trace.idle.assign(ns=ns_of_idle)[trace.idle["cause"].isin(causes).to_numpy()]
    sums = idle.groupby(["rank", "device"])["ns"].sum()
    gpus = len(trace.kernels[["rank", "device"]].drop_duplicates())
    return sums.max() * gpus / denominator(trace).num_gpu_steps if len(sums) else 0


def assert_savings_lie_in_the_idle_section(trace, section):
    """Check that no saving of idle time is more than the section on it calls recoverable."""
    if section is None or not len(trace.kernels):
        return
    gained = recoverable_ns(trace).to_numpy("int64", na_value=0)
    listed = sum(one["recoverable_ns"] or 0 for one in section["causes"])
    assert listed == gained[without_lead(trace).idle["duration_ns"] > 0].sum()
    for one in trace.diagnosis.findings:
        causes = {one.fix.idle_cause} if one.fix.idle_cause else set()
        causes |= {"launch-bound"} if one.fix.graphs else set()
        is_unrecorded = one.saving is not None and one.saving.step_ns != trace.diagnosis.whole_ns
        if causes and one.fix.best_ns is None and not is_unrecorded and one.saving.high_ns:
            assert one.saving.high_ns <= most_of_a_gpu(trace, gained, causes)
    took = trace.idle["duration_ns"].to_numpy()
    for one in trace.meta.what_if:
        if one.predicted_step_ns is None or one.is_without_recording:
            continue
        most = most_of_a_gpu(trace, gained, {one.target.removeprefix("idle:")})
        if one.target == "launches":
            most = most_of_a_gpu(trace, gained, {"launch-bound"})
            most += most_of_a_gpu(trace, took, {"between kernels"})
        elif not one.target.startswith("idle:") or "pageable" in one.target:
            most = sums_of_gpus(trace).max() / denominator(trace).num_gpu_steps
        savings = [one.step_ns - ns for ns in (one.longest_step_ns, one.shortest_step_ns)]
        assert savings[0] <= one.step_ns - one.predicted_step_ns <= savings[1] <= most + 1


def assert_findings_and_predictions_agree(trace):
    """Check that a finding and the prediction of the change that it asks for have savings alike."""
    told = {one.target: one for one in trace.meta.what_if if one.predicted_step_ns is not None}
    for one in trace.diagnosis.findings:
        # Graphs also shorten what a finding about late launches is not about.
        name = f"idle:{one.fix.idle_cause}"
        if name not in told or one.fix.best_ns is not None or one.saving.high_ns is None:
            continue
        found = told[name]
        assert one.saving.low_ns <= found.step_ns - found.shortest_step_ns
        assert found.step_ns - found.longest_step_ns <= one.saving.high_ns + found.uncertainty_ns


HOW = {"removed": "removed", "gone": "removed", "at its roofline": "roofline"}


def assert_what_is_suggested_can_be_asked(trace):
    """Check that `kprof whatif` understands each change that a report or a last line names."""
    told = [one for one in trace.meta.what_if if one.change in (*HOW, "in CUDA graphs")]
    questions = {
        "graphs" if one.target == "launches" else f"{one.target}={HOW[one.change]}" for one in told
    }
    for question in questions | {one.question for one in suggest(trace)}:
        assert parse_change(question, trace).question == question


def test_each_change_that_is_suggested_of_a_recorded_trace_can_be_asked(recorded):
    assert_what_is_suggested_can_be_asked(recorded.analyzed)


def sums_of_gpus(trace):
    """Return the device time of each GPU, times their number."""
    sums = trace.kernels.groupby(["rank", "device"])["duration_ns"].sum()
    return sums * len(sums)


def test_no_saving_of_a_recorded_trace_exceeds_what_its_idle_section_calls_recoverable(recorded):
    assert_savings_lie_in_the_idle_section(recorded.analyzed, recorded.told["idle"])
    assert_findings_and_predictions_agree(recorded.analyzed)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_all_savings_of_a_peculiar_trace_are_possible(path):
    try:
        trace, document = analyzed_and_told(read([path]))
    except KprofError:
        pytest.skip("refused")
    assert_savings_are_possible(document)
    assert_savings_lie_in_the_idle_section(trace, document["idle"])
    assert_findings_and_predictions_agree(trace)
    assert_what_is_suggested_can_be_asked(trace)


@few
@given(events=recordings())
def test_shares_and_savings_of_a_generated_trace_are_of_one_denominator_and_possible(
    tmp_path_factory, events
):
    trace, document = analyzed_and_told(read([kept(tmp_path_factory, events)]))
    assert_one_denominator(trace, document)
    assert_savings_are_possible(document)
    assert_savings_lie_in_the_idle_section(trace, document["idle"])


def one_after_another(paths):
    """Pair each recording with the next, as parameters of a test."""
    for first, second in itertools.pairwise(paths):
        marks = [] if {first, second} <= set(QUICK) else [pytest.mark.slow]
        yield pytest.param(first, second, id=f"{first.name}-{second.name}", marks=marks)


PAIRS = list(one_after_another([*QUICK, *(path for path in OTHERS if path not in QUICK)]))


def assert_diff_is_lawful(one, other):
    """Check a difference of two traces against itself, mirrored and with all times longer."""
    a, b = analyzed(one), analyzed(other)
    unchanged = compared(a, a)
    assert unchanged["difference_ns"] == 0
    rows = [row for of in unchanged["layouts"].values() for row in of]
    assert {(row["fate"], row["difference_ns"]) for row in rows} == {("same", 0)}
    assert all(row["a"] == row["b"] and row["names_a"] == row["names_b"] for row in rows)
    if find_obstacle(a, b) is not None:
        assert find_obstacle(b, a) is not None
        return
    found = compared(a, b)
    assert mirrored(found) == compared(b, a)
    longer = compared(*(analyzed(scaled(each, 3)) for each in (one, other)))
    assert list(differences(by_part(found), by_part(longer), 3)) == []


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_difference_of_recorded_traces_is_none_of_one_mirrored_of_both_and_scales(first, second):
    assert_diff_is_lawful(read([first]), read([second]))


@pytest.mark.slow
@few
@given(one=recordings(), other=recordings())
def test_a_difference_of_generated_traces_is_none_of_one_mirrored_of_both_and_scales(
    tmp_path_factory, one, other
):
    assert_diff_is_lawful(*(read([kept(tmp_path_factory, each)]) for each in (one, other)))


def cut(trace, begin_ns, end_ns):
    """Return a trace that was read, with the events alone that begin in this time."""
    tables = {}
    for name in ("kernels", "ranges"):
        table = getattr(trace, name)
        tables[name] = table[table["start_ns"].between(begin_ns, end_ns - 1)].reset_index(drop=True)
    return replace(trace, **tables)


def by_step(trace):
    """Return for every step when it began, its host's time, and its activities by name."""
    kernels = trace.kernels
    start = kernels["start_ns"].to_numpy().tolist()
    names, numbers = kernels["name"].astype(str).tolist(), kernels["step"].fillna(-1).tolist()
    took = kernels["duration_ns"].to_numpy().tolist()
    rows = list(zip(numbers, start, took, names, strict=True))
    return [
        (
            one.start_ns,
            one.duration_ns,
            one.device_end_ns,
            sorted(r[1:] for r in rows if r[0] == one.number),
        )
        for one in find_steps(trace)
    ]


def assert_steps_do_not_depend_on_the_others(trace):
    """Check steps and their times against those of recordings that begin later or end earlier."""
    whole = analyzed(trace)
    steps = find_steps(whole)
    # A rule that tells steps by what repeats needs two of them.
    least = 1 if (trace.ranges["kind"] == "step").any() else 2
    for number in range(least, len(steps) - least + 1):
        at_ns = steps[number].start_ns
        later = analyzed(cut(trace, at_ns, LAST_NS))
        assert by_step(later) == by_step(whole)[number:]
        assert time_steps(later).recorded_ns[1:] == time_steps(whole).recorded_ns[number + 1 :]
        # The device may do a step's work long after the host: that part is cut off, too.
        done = sum(step.device_end_ns <= at_ns for step in steps[:number])
        sooner = analyzed(cut(trace, -LAST_NS, at_ns))
        assert by_step(sooner)[:done] == by_step(whole)[:done]
        assert time_steps(sooner).recorded_ns[:done] == time_steps(whole).recorded_ns[:done]


@few
@given(events=recordings())
def test_a_step_of_a_generated_trace_does_not_depend_on_the_others(tmp_path_factory, events):
    assert_steps_do_not_depend_on_the_others(read([kept(tmp_path_factory, events)]))


def test_a_step_of_a_recorded_trace_does_not_depend_on_the_others(recorded):
    trace = recorded.trace
    if trace.meta.num_ranks > 1 or trace.is_host_only:
        pytest.skip("steps of one device alone")
    assert_steps_do_not_depend_on_the_others(
        replace(trace, meta=replace(trace.meta, recording=None))
    )


@pytest.mark.parametrize("wait", [item(), synchronize()])
def test_a_steady_trace_twice_as_long_takes_and_saves_the_same_per_step(wait):
    program = [*[kernel("mm", 40_000, host_ns=9_000)] * 20, wait]

    def per_step(number):
        trace = Machine().run([*[*program, END_OF_STEP] * (number - 1), *program])
        (found,) = [
            one for one in told(trace)["findings"]["findings"] if one["rule"] == "sync_in_loop"
        ]
        return found["saving"]["step_ns"], found["cause_ns"], found["saving"]["high_ns"]

    # The wait of the last step holds nothing up any more.
    assert per_step(32) == pytest.approx(per_step(16), rel=1 / 16)
