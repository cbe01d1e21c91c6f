"""Traces that kprof recorded on a real H200, opened from the file to the last column."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from kprof.analyze.attribution.ledger import balance
from kprof.analyze.attribution.steps import find_steps
from kprof.analyze.passes import analyze
from kprof.analyze.roofline.bound import beaten_ceilings
from kprof.analyze.roofline.utilisation import share_of_time
from kprof.device import find_device
from kprof.opened import read
from kprof.trace import Trace

FOLDER = Path(__file__).parents[2] / "data" / "h200"
NAMES = ["llama_train", "hf_generate", "convnet_dataloader", "compiled", "cudagraph"]
L2_BYTES = 60 << 20
LAUNCHED_ONE_BY_ONE = [name for name in NAMES if name != "cudagraph"]


@cache
def opened(name) -> Trace:
    trace = read([FOLDER / f"{name}.json.gz"])
    device = find_device(trace.meta.gpus[0].name)
    return analyze(replace(trace, meta=replace(trace.meta, device=device)))


def share(trace, rows) -> float:
    return share_of_time(trace.kernels, pd.Series(rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_books_balance(name):
    assert balance(opened(name)).balances


@pytest.mark.parametrize("name", NAMES)
def test_no_activity_is_an_orphan(name):
    assert balance(opened(name)).num_orphans == 0


@pytest.mark.parametrize("name", LAUNCHED_ONE_BY_ONE)
def test_all_device_time_is_attributed(name):
    assert balance(opened(name)).unattributed_ns == 0


@pytest.mark.parametrize("name", LAUNCHED_ONE_BY_ONE)
def test_nearly_all_device_time_has_a_work_model(name):
    kernels = opened(name).kernels
    assert share(opened(name), kernels["bytes"].notna()) >= 0.99


@pytest.mark.parametrize("name", NAMES)
def test_only_what_fits_in_the_cache_runs_faster_than_its_roofline(name):
    beaten = beaten_ceilings(opened(name))
    assert (beaten["bytes"] <= L2_BYTES).all()
    is_bound = beaten["work_from"] == "bounds"
    known, bounded = beaten.index[~is_bound], beaten.index[is_bound]
    assert share(opened(name), opened(name).kernels.index.isin(known)) <= 0.01
    # 32 sums of 38 MB in the graph, whose operator nobody knows and whose operands the L2 holds.
    assert share(opened(name), opened(name).kernels.index.isin(bounded)) <= 0.03


@pytest.mark.parametrize("name", NAMES)
def test_both_recorded_steps_are_found_and_hold_the_device_time(name):
    trace = opened(name)
    assert len(find_steps(trace)) == 2
    assert share(trace, trace.kernels["step"].notna()) >= 0.99


@pytest.mark.parametrize("name", ["llama_train", "convnet_dataloader"])
def test_a_training_steps_device_time_lies_in_modules_and_phases(name):
    trace = opened(name)
    in_module = trace.kernels["module"].notna()
    in_optimizer = trace.kernels["phase"] == "optimizer"
    assert share(trace, in_module | in_optimizer) >= 0.95
    assert share(trace, trace.kernels["phase"].notna()) >= 0.95


def test_the_llamas_products_have_the_flops_of_its_parameters():
    # 6 FLOPs for each weight of a product and token; 617,646,080 parameters, of which the
    # embedding (65,536,000) takes part in no product and the norms' 34,816 in none either.
    kernels = opened("llama_train").kernels
    flops = kernels.loc[kernels["kind"] == "gemm", "flops"].sum()
    weights, tokens, steps = 617_646_080 - 65_536_000 - 34_816, 4 * 1024, 2
    assert flops == pytest.approx(6 * weights * tokens * steps, rel=0.01)


def test_a_graphs_activities_have_a_bucket_of_their_own():
    ledger = balance(opened("cudagraph"))
    assert ledger.num_graph_launches == 2
    assert ledger.buckets["graph"] > 0.8 * ledger.sum_ns


def test_where_a_graph_is_replayed_does_not_tell_the_phase_of_its_nodes():
    kernels = opened("cudagraph").kernels
    assert kernels.loc[kernels["bucket"] == "graph", "phase"].isna().all()
    assert set(kernels["phase"].dropna()) == {"optimizer"}


def test_generating_leaves_the_device_idle_because_the_host_is_late():
    trace = opened("hf_generate")
    idle = trace.idle.groupby("cause", observed=True)["duration_ns"].sum()
    assert idle["launch-bound"] > 0.9 * idle.sum()


def test_an_item_of_the_model_costs_what_the_docs_say():
    trace = opened("llama_train")
    waits = trace.idle[trace.idle["cause"] == "synchronization"]
    second = waits[(trace.kernels["step"].iloc[waits["kernel_row"]] == 6).to_numpy(bool)]
    assert (second["duration_ns"].sum(), len(second)) == (1_054_367, 33)
    assert set(second["place"]) == {"aten::_local_scalar_dense"}
    assert set(second["module"]) == {"model"}
