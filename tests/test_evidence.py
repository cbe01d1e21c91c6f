"""`benchmarks/evidence.py`: what a result is called."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "rmsnorm_h200_2026-11.json"),
        ("NVIDIA H100 80GB HBM3", "rmsnorm_h100_2026-11.json"),
        (None, "rmsnorm_h200_2026-11.json"),
    ],
)
def test_a_result_has_the_name_of_the_gpu_that_made_it(monkeypatch, gpu, name):
    monkeypatch.syspath_prepend(BENCHMARKS)
    evidence = importlib.import_module("evidence")
    path = evidence.named_after(gpu, Path("results/rmsnorm_h200_2026-11.json"))
    assert path == Path("results") / name


def test_several_gpus_and_other_results_keep_the_rest_of_their_names(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    evidence = importlib.import_module("evidence")
    called = [Path("roofline_h200x4_2026-11.json"), Path("kept.json")]
    found = [evidence.named_after("NVIDIA H100 80GB HBM3", one).name for one in called]
    assert found == ["roofline_h100x4_2026-11.json", "kept.json"]


@pytest.fixture
def evidence(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("evidence")


ONE = 'import a\n\n\ndef f(x):\n    """Say."""\n    return x + 1  # Why.\n'
OTHER = "y = 2\n"


@pytest.mark.parametrize(
    ("texts", "is_same"),
    [
        ((OTHER, "# Moved.\n\ndef f(x):\n    return (x + 1)\n"), True),
        ((OTHER + "import b\n\ndef f(x):\n    return x + 1\n",), True),
        ((OTHER, "def f(x):\n    return x + 2\n"), False),
        (("def f(x):\n    return x + 1\n",), False),
    ],
)
def test_moving_code_and_comments_change_no_digest_and_other_code_does(evidence, texts, is_same):
    assert (evidence.digest_of_code(texts) == evidence.digest_of_code((ONE, OTHER))) is is_same


def test_the_digest_of_code_is_the_same_under_all_versions_of_python(evidence):
    # By the fields that Python 3.10 knows; 3.12 added type_params to functions.
    assert (
        evidence.digest_of_code(["def f(a, *, b=None):\n    return [a, b]\n"]) == "d38bb8256f7e73c2"
    )


def test_a_result_is_stale_where_one_thing_that_it_ran_changed_or_is_gone(evidence):
    ran = evidence.what_ran(("benchmarks/row*.py", "kprof/timing.py", "kprof/kernels/norm.py"))
    assert "code/kprof/timing.py" in ran
    assert "compiled/rmsnorm/kprof/8192x2048/forward" in ran
    assert set(evidence.what_ran(["kprof/kernels/rmsnorm.py"])) < set(ran)
    assert evidence.stale({"ran": ran}) == []
    changed = {**ran, "code/kprof/timing.py": "0", "golden/gone": "0"}
    assert evidence.stale({"ran": changed}) == ["code/kprof/timing.py", "golden/gone"]


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ("kprof/analyze/attribution/kinds.py", "golden/open_llama_train"),
        ("kprof/analyze/whatif/replay.py", "golden/whatif_compiled"),
        ("kprof/collect/recorder/kprof_recorder/ending.py", "code/kprof/collect/recorder"),
        ("benchmarks/selftest.py", "code/benchmarks/selftest.py"),
    ],
)
def test_a_source_is_spoken_for_by_what_it_decides(evidence, source, label):
    assert label in evidence.labels_of([source])


def test_compiled_code_keeps_its_digest_under_other_names_lines_and_comments(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    normalised = importlib.import_module("compiled_code").normalised
    ptx = ".visible .entry f(\n\t.param .u64 f_param_0\n)\n\t.loc 1 7 3\n\tadd %r1, %r2, 1; // f\n"
    other = (
        ptx.replace("f_param", "g_param").replace("entry f", "entry g").replace("1 7 3", "2 9 1")
    )
    assert normalised(other + "\t.section\t.debug_str\n{ g }") == normalised(ptx)
    assert normalised(ptx.replace("%r2, 1", "%r2, 2")) != normalised(ptx)


def test_a_result_is_carried_over_only_where_the_digest_is_the_same(evidence, monkeypatch):
    carry = importlib.import_module("carry_evidence")
    today = evidence.digest_today("code/kprof/timing.py")
    moved, other = {"ran": {"code/old.py": today}}, {"ran": {"code/old.py": "0"}}
    assert carry.carried(moved, "code/old.py", "code/kprof/timing.py")
    assert moved == {"ran": {"code/kprof/timing.py": today}}
    assert not carry.carried(other, "code/old.py", "code/kprof/timing.py")
    assert other == {"ran": {"code/old.py": "0"}}
