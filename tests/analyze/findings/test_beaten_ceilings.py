"""Nothing beats its ceiling: a finding that builds on such time is less certain."""

import pytest

from kprof.analyze.capture_quality.audit import audit
from kprof.analyze.findings.diagnose import MOST_BEATEN, beaten_share, diagnose
from tests.analyze.findings.rule_cases import CASES
from tests.analyze.findings.rule_traces import US, product, trace_of_work


def beyond(trace, times):
    """Return the trace with every activity at so many times its ceiling."""
    return trace.with_kernels(
        limit_ns=(trace.kernels["duration_ns"] * times).round().astype("Int64")
    )


@pytest.mark.parametrize("rule", sorted(CASES))
def test_no_certain_finding_builds_on_time_that_beats_its_ceiling(rule):
    trace = beyond(CASES[rule].faulty(), 1.8)
    findings = diagnose(trace).findings
    beaten = [one for one in findings if beaten_share(one, trace) > MOST_BEATEN]
    assert [one.rule for one in beaten if one.confidence == "high"] == []


@pytest.mark.parametrize(("times", "verdicts"), [(1.04, []), (1.8, ["bad"])])
def test_time_that_beats_its_ceiling_is_a_check_of_its_own(times, verdicts):
    trace = beyond(trace_of_work(product(500 * US, dtype="fp32")), times)
    assert [one.verdict for one in audit(trace) if one.name == "Ceilings"] == verdicts
