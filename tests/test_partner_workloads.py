"""A page that is made of several workloads says so: one's verdict is not another's."""

from dataclasses import replace

import pytest

from kprof.report.partner.evidence import Evidence
from tests.partner_evidence import comparison_of
from tests.partner_pages import said
from tests.section_traces import RICH


def page(run, a, b):
    """Return what the page says of a recorded command and a comparison of two others."""
    recorded = replace(RICH, meta=replace(RICH.meta, command=tuple(run.split())))
    compared = comparison_of(facts={"command of A": a, "command of B": b})
    return said(Evidence("t", runs=(recorded,), comparisons=(compared,)))


def test_a_run_beside_a_comparison_of_another_script_is_pointed_out():
    text = page("python3 /home/me/gan.py", "python3 mlp.py --fast", "python3 mlp.py")
    assert "measured of different workloads: gan.py; mlp.py." in text


@pytest.mark.parametrize(
    ("run", "a", "b"),
    [
        ("python3 train.py --steps 3", "python3 elsewhere/train.py", "python3 train.py --fused"),
        ("python3 new.py", "python3 old.py", "python3 new.py"),
        ("torchrun --nproc-per-node 2 train.py", "python3 train.py", "python3 train.py"),
        ("python3 -m train.main --fast", "python3 -m train.main", "python3 -m train.main --fast"),
        ("./serve --port 1", "bin/serve", "bin/serve"),
    ],
)
def test_one_workload_however_it_was_started_is_no_doubt(run, a, b):
    assert "different workloads" not in page(run, a, b)


def test_a_comparison_of_functions_names_no_script():
    recorded = replace(RICH, meta=replace(RICH.meta, command=("python3", "train.py")))
    evidence = Evidence("t", runs=(recorded,), comparisons=(comparison_of(facts={}),))
    assert "different workloads" not in said(evidence)
