"""Weights in FP8 that linear layers keep: of which version, where, for how long."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import gc
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kprof.kernels.fp8 import _weights
from kprof.kernels.fp8.fp8_linear import fp8_linear
from kprof.kernels.fp8.quantize_fp8 import quantize_fp8
from tests.kernels.fp8_layers import given, nothing_kept  # noqa: F401
from tests.kernels.kernel_checks import INTERPRETED

pytestmark = INTERPRETED


def test_a_weight_is_quantised_once_for_each_version():
    x, weight, _ = given()
    first = fp8_linear(x, weight)
    kept = _weights.quantized(weight, is_kept=True)[0]
    fp8_linear(x, weight)
    assert _weights.quantized(weight, is_kept=True)[0] is kept
    weight.mul_(2)
    assert torch.equal(fp8_linear(x, weight), 2 * first)


def test_where_gradients_of_weights_are_recorded_they_are_quantised_in_every_call():
    x, weight, _ = given()
    before = fp8_linear(x, weight)
    weight.requires_grad_()
    weight.data.zero_()
    assert not fp8_linear(x, weight).any()
    with torch.no_grad():
        assert not fp8_linear(x, weight).any()
    assert before.any()


def test_a_new_version_is_put_where_a_captured_graph_reads_the_last_one():
    x, weight, _ = given()
    fp8_linear(x, weight)
    first = _weights.quantized(weight, is_kept=True)
    weight.mul_(2)
    second = _weights.quantized(weight, is_kept=True)
    assert [one.data_ptr() for one in first] == [one.data_ptr() for one in second]


def test_what_is_written_past_torchs_counting_can_be_forgotten():
    layer = torch.nn.Linear(64, 32).half().requires_grad_(False)
    x = given()[0]
    before = fp8_linear(x, layer.weight)
    layer.weight.data.zero_()
    assert torch.equal(fp8_linear(x, layer.weight), before)
    _weights.forget(layer)
    assert not fp8_linear(x, layer.weight).any()


def test_what_is_kept_goes_with_the_weight():
    x, weight, _ = given()
    fp8_linear(x, weight)
    assert len(_weights.quantized._kept) == 1
    del weight
    gc.collect()
    assert len(_weights.quantized._kept) == 0


class Doubled(_weights.ByVersion):
    """What a peer keeps of weights, and how often it made that."""

    def __init__(self):
        super().__init__(self._double)
        self.num_made = 0

    def _double(self, weight):
        self.num_made += 1
        return 2 * weight


def test_a_peer_keeps_weights_by_their_version_in_the_same_place():
    weight, doubled = given()[1], Doubled()
    first = doubled(weight)
    assert (doubled(weight) is first, doubled.num_made) == (True, 1)
    weight.mul_(2)
    assert (doubled(weight) is first, doubled.num_made) == (True, 2)
    assert torch.equal(first, 2 * weight)


def test_a_peer_makes_weights_without_versions_in_every_call():
    doubled = Doubled()
    with torch.inference_mode():
        weight = given()[1]
        assert doubled(weight) is not doubled(weight)
    assert doubled.num_made == 2


def test_a_weight_that_is_kept_is_not_made_again_while_a_graph_is_captured(monkeypatch):
    known, unknown, doubled = given()[1], given()[1], Doubled()
    first = doubled(known)
    monkeypatch.setattr(_weights, "_is_captured", lambda weight: True)
    assert (doubled(known) is first, doubled.num_made) == (True, 1)
    # What is first met there holds nothing yet.
    assert doubled(unknown) is not doubled(unknown)
    monkeypatch.setattr(_weights, "_is_captured", lambda weight: False)
    assert doubled(unknown) is doubled(unknown)
    assert doubled.num_made == 4


def test_what_peers_made_of_a_module_is_forgotten_with_ours():
    layer, doubled = torch.nn.Linear(64, 32), Doubled()
    kept = doubled(layer.weight)
    layer.weight.data.zero_()
    assert doubled(layer.weight).any()
    _weights.forget(layer)
    assert doubled(layer.weight) is kept
    assert not kept.any()


def test_tensors_made_in_inference_mode_are_quantised_in_every_call():
    with torch.inference_mode():
        x, weight, _ = given()
        first = fp8_linear(x, weight)
        weight.mul_(2)
        assert torch.equal(fp8_linear(x, weight), 2 * first)


def test_a_weight_on_another_device_than_before_is_not_put_where_it_was():
    weight = given()[1]
    _weights.quantized(weight, is_kept=True)
    known = _weights.quantized._kept[id(weight)]
    away = tuple(one.to("meta") for one in known.made)
    layout = (weight.shape, weight.dtype, torch.device("meta"))
    kept = replace(known, version=-1, layout=layout, made=away)
    _weights.quantized._kept[id(weight)] = kept
    assert _weights.quantized(weight, is_kept=True)[0].device == weight.device


def test_what_is_kept_is_no_part_of_what_this_thread_allocates_and_ready_for_every_stream(
    monkeypatch,
):
    seen = []
    main = threading.get_ident()

    def quantize_seen(weight):
        seen.append("here" if threading.get_ident() == main else "apart")
        return quantize_fp8(weight)

    monkeypatch.setattr(_weights, "_wait_for", lambda weight: seen.append("waited"))
    quantized, weight = _weights.ByVersion(quantize_seen), given()[1]
    quantized(weight)
    assert seen == ["waited", "waited", "apart", "waited", "waited"]
    quantized(weight.mul_(2))
    assert seen[5:] == ["here", "waited"]
    quantized(weight)
    assert len(seen) == 7


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "imported"])
def test_weights_that_fsdp_gathers_are_quantised_in_every_call(is_used, monkeypatch):
    sharded = type("FSDPModule", (), {})
    others = [type("FSDPBlock", (sharded,), {})] if is_used else []
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", SimpleNamespace(FSDPModule=sharded))
    x, weight, _ = given()
    before = fp8_linear(x, weight)
    weight.data.zero_()
    assert fp8_linear(x, weight).any() == (not others)
    assert before.any()
