"""A GPU that the new code breaks: a failure of the new code, and of nothing that comes after it."""

from dataclasses import replace

import pytest

from kprof.commands import kernels
from kprof.kernels.correctness import GateReport, check
from kprof.kernels.correctness.levels import LEVELS, not_run
from kprof.kernels.correctness.memory import large_calls
from tests.kernels.correctness.doubling import DOUBLED

ADVICE = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
SAID = f"CUDA error: an illegal memory access was encountered\n{ADVICE}"


class Gpu:
    """Runs functions until one call of `breaks` too many; then it refuses all, as CUDA does."""

    def __init__(self, breaks, at=3):
        self.breaks, self.calls_left, self.is_broken = breaks, at, False

    def running(self, name, function):
        def called(*arguments):
            self.calls_left -= name == self.breaks
            self.is_broken |= self.calls_left < 0
            if self.is_broken:
                raise RuntimeError(SAID)
            return function(*arguments)

        return called

    def subject(self):
        new, replaced, truth = (
            self.running(name, getattr(DOUBLED, name)) for name in ("new", "replaced", "truth")
        )
        return replace(DOUBLED, new=new, replaced=replaced, truth=truth)


def test_new_code_that_breaks_the_gpu_fails_and_its_case_is_named():
    report = check(Gpu("new").subject(), ("L0", "L1"))
    assert report["L0"].state == "failed"
    assert "new code broke" in report["L0"].why
    assert "illegal memory access" in report["L0"].why
    assert (report["L1"].state, report.is_gpu_broken) == ("not run", True)
    assert report.reached == "REJECT"


def test_replaced_code_that_breaks_the_gpu_is_not_held_against_the_new_code():
    report = check(Gpu("replaced").subject(), ("L0", "L1"))
    assert [report[name].state for name in ("L0", "L1")] == ["not run", "not run"]
    assert "replaced code broke" in report["L0"].why
    assert report.reached is None


@pytest.mark.slow
def test_rows_that_the_replaced_code_may_break_on_too_can_be_left_out():
    near = tuple(name for name in DOUBLED.layouts if name != "far")

    def breaks_far(x):
        if x.stride(0) > 2**24:
            raise RuntimeError(SAID)
        return x * 2

    far = check(replace(DOUBLED, new=breaks_far), ("L1",))
    assert (far["L1"].state, far.is_gpu_broken) == ("failed", True)
    left_out = check(replace(DOUBLED, new=breaks_far, layouts=near), ("L1",))
    assert left_out["L1"].state == "passed"


def test_memory_is_not_given_back_to_a_broken_gpu(monkeypatch, tmp_path):
    def refuses():
        raise RuntimeError(SAID)

    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("torch.cuda.empty_cache", refuses)
    with pytest.raises(ZeroDivisionError), large_calls("cuda"):
        raise ZeroDivisionError


def test_an_error_that_leaves_the_gpu_working_is_a_result_like_another():
    def refusing(*arguments):
        raise RuntimeError(f"CUDA error: operation would make the legacy stream depend\n{ADVICE}")

    report = check(replace(DOUBLED, new=refusing), ("L0", "L1"))
    assert report["L0"].state == "failed"
    assert not report.is_gpu_broken


@pytest.mark.parametrize("names", [["rmsnorm", "softmax", "rope"], ["rope", "rmsnorm"]])
def test_kernels_after_one_that_broke_the_gpu_are_checked_in_a_fresh_process(monkeypatch, names):
    def checked(subject, asked):
        levels = tuple(not_run(name, "not asked for") for name in LEVELS)
        is_broken = subject.name.startswith("rmsnorm")
        return GateReport(subject.name, levels, (), is_gpu_broken=is_broken)

    afresh = []
    monkeypatch.setattr(kernels, "device_to_check_on", lambda: "cuda")
    monkeypatch.setattr("kprof.kernels.correctness.check", checked)

    def check_in_fresh_process(rest, *more):
        afresh.append(rest)
        return []

    monkeypatch.setattr(kernels, "check_in_fresh_process", check_in_fresh_process)
    kernels.check_kernels(names, None)
    assert afresh == ([["softmax", "rope"]] if names[0] == "rmsnorm" else [])
