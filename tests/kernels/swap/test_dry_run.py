"""The dry run of a swap: it tells what a swap would do, and changes nothing."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import gc
import json
import random
import subprocess
import sys
import time
from collections import Counter
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kprof.errors import KprofError
from kprof.findings import NOT_CALLED
from kprof.kernels.swap import dry_run
from kprof.kernels.swap.providers import DryProviders
from kprof.kernels.swap.sites import function_calls
from kprof.kernels.swap.swap_report import SwapError
from kprof.kernels.swap.swapping import Swap
from tests.kernels.kernel_checks import INTERPRETED
from tests.kernels.swap_models import Attention, GemmaNorm, Mlp, Model, Norm, snapshot, tokens

pytestmark = INTERPRETED


@pytest.fixture(autouse=True)
def without_end(monkeypatch):
    """Search to the end, and not among the models that tests before have left behind."""
    gc.collect()
    monkeypatch.setattr(dry_run, "MOST_S", 600.0)


class Dropping(nn.Module):
    """A model whose results depend on the random state."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.drop = GemmaNorm(16), Mlp(16), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.mlp(self.norm(x))).sum()


def llama(dtype=torch.bfloat16):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    config = transformers.AutoConfig.for_model("llama", **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


IDS = torch.arange(20).view(2, 10)
# Model, and the loss of a step.
WORKLOADS = {
    "model": (Model, lambda model: model(tokens(), tokens())),
    "dropout": (Dropping, lambda model: model(torch.randn(4, 16))),
    "alone": (
        lambda: nn.Sequential(nn.Linear(16, 16), Norm(16)),
        lambda m: m(torch.ones(2, 16)).sum(),
    ),
    "llama": (llama, lambda model: model(input_ids=IDS, labels=IDS).loss),
    "autocast": (lambda: llama(torch.float32), lambda m: under_autocast(m)),
    "inference": (lambda: llama(torch.float32), lambda model: generated(model)),
}


def under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(input_ids=IDS, labels=IDS).loss


def generated(model):
    with torch.no_grad():
        return model.eval().generate(IDS, max_new_tokens=3, do_sample=True, pad_token_id=0)


def made(name):
    torch.manual_seed(5)
    model = WORKLOADS[name][0]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return model, optimizer, scheduler


def step(name, model, optimizer, scheduler):
    """Return the bits that a step leaves."""
    result = WORKLOADS[name][1](model)
    if result.requires_grad:
        result.backward()
    gradients = [one.grad for one in model.parameters()]
    gradients = [one if one is None else one.clone() for one in gradients]
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return result.detach(), gradients, [one.detach().clone() for one in model.parameters()]


def own(things):
    """Return what a swap replaces in a model and its optimizer."""
    model, optimizer, _ = things
    modules = [
        (vars(one).get("forward"), vars(one).get("_loss_function")) for one in model.modules()
    ]
    return modules, vars(optimizer)["step"]


def states():
    return torch.get_rng_state(), random.getstate()


def watched(tmp_path, name, things, *, is_dry=True):
    """Return the bits of three steps, with the dry run of the second, and its table."""
    path = tmp_path / "dry_run.json"
    found = [step(name, *things)]
    watch = dry_run.begin(str(path)) if is_dry else None
    found.append(step(name, *things))
    if watch is not None:
        watch.end()
    found += [step(name, *things), states()]
    return found, json.loads(path.read_text())["rows"] if is_dry else None


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_dry_run_changes_no_bit_and_leaves_everything_as_it_was(tmp_path, name):
    wanted, _ = watched(tmp_path, name, made(name), is_dry=False)
    things = made(name)
    before = own(things)
    found, _ = watched(tmp_path, name, things)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert own(things) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_swap_does_what_the_dry_run_told(tmp_path, name):
    things = made(name)
    _, rows = watched(tmp_path, name, things)
    for kernel in {row["kernel"] for row in rows} - {"fp8_linear"}:
        told = Counter()
        for row in rows:
            if row["kernel"] == kernel and row["why"] != NOT_CALLED:
                told[row["provider"], row["why"]] += row["num_calls"]
        try:
            swap = Swap(None, [kernel])
        except KprofError as error:
            # Gluon has no interpreter.
            assert all(provider is None for provider, _ in told), error
            continue
        with swap:
            step(name, *things)
        done = Counter()
        for site in swap.sites:
            if site.skipped is not None:
                done[None, site.skipped] += 0
            for calls in site.calls:
                done[calls.provider, calls.why or ""] += calls.num_calls
        assert done == told, kernel


def test_a_kernel_is_neither_launched_nor_compiled(tmp_path, monkeypatch):
    from kprof.kernels import norm

    monkeypatch.setattr(norm, "rmsnorm", lambda *arguments: pytest.fail("it was launched"))
    _, rows = watched(tmp_path, "model", made("model"))
    assert ("rmsnorm", "kprof", 4) in {(r["kernel"], r["provider"], r["num_calls"]) for r in rows}


def test_a_function_of_torch_that_nobody_calls_is_no_call_site(tmp_path):
    _, rows = watched(tmp_path, "alone", made("alone"))
    kernels = {row["kernel"] for row in rows}
    assert "rmsnorm" in kernels
    assert not kernels & {"cross_entropy", "attention_forward"}


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        SEEN.append(function)
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        SEEN.append(function)
        return function(*args, **(kwargs or {}))


class Seeing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        SEEN.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


SEEN = []


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_where_a_mode_of_the_workload_sees_all_operations_there_is_no_dry_run(tmp_path, mode):
    model = nn.Sequential(Norm(16))
    with mode():
        SEEN.clear()
        with pytest.raises(SwapError):
            dry_run.begin(str(tmp_path / "dry_run.json"))
        assert SEEN == []
    assert "forward" not in vars(model[0])


def test_where_a_weight_sees_its_operations_there_is_no_dry_run():
    model = nn.Sequential(Norm(16))
    assert dry_run.why_seen() == ""
    model[0].weight = nn.Parameter(torch.ones(16).as_subclass(Seeing))
    SEEN.clear()
    assert "Seeing" in dry_run.why_seen()
    assert SEEN == []


def test_a_default_device_sees_nothing():
    torch.set_default_device("cpu")
    try:
        assert dry_run.why_seen() == ""
    finally:
        torch.set_default_device(None)


def test_kernels_that_no_finding_names_are_in_no_dry_run(tmp_path):
    watch = dry_run.begin(str(tmp_path / "dry_run.json"))
    watch.end()
    kernels = json.loads((tmp_path / "dry_run.json").read_text())["kernels"]
    assert {"rmsnorm", "cross_entropy", "adamw", "decode"} <= set(kernels)
    assert not {"add_rmsnorm", "add_layernorm"} & set(kernels)


def test_an_error_while_sites_are_entered_leaves_everything_as_it_was(monkeypatch):
    from kprof.kernels.swap.site import Site

    model = Model()
    before, entered, enter = snapshot(model), [], Site.enter

    def failing(site):
        if len(entered) == 3:
            raise RuntimeError("planted")
        entered.append(site)
        enter(site)

    monkeypatch.setattr(Site, "enter", failing)
    with pytest.raises(RuntimeError, match="planted"):
        Swap([model], ["rmsnorm"]).__enter__()
    assert snapshot(model) == before


def test_a_gated_mlp_in_a_dry_run_frees_its_products_before_its_last_layer():
    import weakref

    held = []

    class Watching(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            held.append(weakref.ref(out))
            return out

    class Last(nn.Linear):
        def forward(self, x):
            self.num_alive = sum(one() is not None for one in held)
            return super().forward(x)

    model = Mlp(16)
    model.gate_proj, model.up_proj = Watching(16, 32), Watching(16, 32)
    model.down_proj = Last(32, 16)
    with torch.no_grad(), Swap([model], ["swiglu"], providers=DryProviders) as swap:
        model(torch.ones(2, 16))
    assert [calls.num_calls for site in swap.sites for calls in site.calls] == [1]
    assert model.down_proj.num_alive == 0


def test_call_sites_without_a_call_have_a_row_of_their_own():
    model = nn.ModuleList([Attention(16), Attention(16)])
    with Swap([model], ["rope"], providers=DryProviders) as swap:
        model[0](torch.ones(1, 3, 16), torch.ones(1, 3, 8), torch.ones(1, 3, 8))
    rows = list(dry_run.rows_of(swap.sites))
    assert {(row.provider, row.why, row.num_sites, row.num_calls) for row in rows} == {
        ("kprof", "", 1, 1),
        (None, NOT_CALLED, 1, 0),
    }


@pytest.mark.parametrize("is_on_before", [True, False])
def test_the_workloads_own_swap_is_entered_and_left_as_without_a_dry_run(tmp_path, is_on_before):
    things = made("model")
    before = own(things)
    swap = Swap([things[0]], ["rmsnorm"])
    if is_on_before:
        swap.__enter__()
        with pytest.raises(SwapError):
            dry_run.begin(str(tmp_path / "dry_run.json"))
    else:
        watch = dry_run.begin(str(tmp_path / "dry_run.json"))
        swap.__enter__()
        watch.end()
    step("model", *things)
    swap.__exit__(None, None, None)
    assert own(things) == before
    assert {calls.why for site in swap.replaced for calls in site.calls} == {None}


class Watching(nn.Module):
    """A module whose attributes run code, which fails."""

    asked: ClassVar[list[str]] = []

    @property
    def weight(self):
        self.asked.append("property")
        raise RuntimeError("an attribute was asked for")

    in_features = out_features = eps = weight

    def __getattr__(self, name):
        self.asked.append(name)
        return super().__getattr__(name)

    def forward(self, x):
        return x


class WatchingMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.norm = Watching(), Watching(), Watching()


class WatchingAttention(WatchingMlp):
    pass


@pytest.mark.parametrize("kind", [WatchingMlp, WatchingAttention])
def test_a_dry_run_runs_no_code_of_a_modules_attributes(tmp_path, kind):
    model = kind()
    Watching.asked.clear()
    dry_run.begin(str(tmp_path / "dry_run.json")).end()
    assert (Watching.asked, len(model._modules)) == ([], 3)


def test_the_search_for_call_sites_ends_after_a_while_and_says_what_it_did_not_come_to(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(dry_run, "MOST_S", 0.0)
    watch = dry_run.begin(str(tmp_path / "dry_run.json"))
    watch.end()
    found = json.loads((tmp_path / "dry_run.json").read_text())
    assert (found["kernels"], found["rows"], found["why_not"]) == ([], [], "")
    assert found["why_others"]


def test_a_search_that_is_ended_at_the_functions_of_torch_knows_the_modules(tmp_path, monkeypatch):
    def spends_all_of_the_time(request):
        clock[0] = 1_000.0
        yield from functions(request)

    functions, clock = function_calls.process_sites, [0.0]
    monkeypatch.setattr(function_calls, "process_sites", spends_all_of_the_time)
    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    model = Dropping()
    watch = dry_run.begin(str(tmp_path / "dry_run.json"))
    model(torch.randn(4, 16))
    watch.end()
    found = json.loads((tmp_path / "dry_run.json").read_text())
    assert "rmsnorm" in found["kernels"]
    assert found["why_others"]


ACTIVATION = """
import sys, torch
from kprof.kernels.swap import dry_run

class NewGelu(torch.nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))

model = torch.nn.Sequential(torch.nn.Linear(8, 8), NewGelu(), torch.nn.LayerNorm(8))
watch = dry_run.begin(sys.argv[1])
model(torch.randn(4, 8))
watch.end()
print(sorted({"sympy", "torch._dynamo"} & sys.modules.keys()))
"""


def test_the_search_imports_no_compiler_of_torchs_which_takes_seconds(tmp_path):
    path = tmp_path / "dry_run.json"
    command = [sys.executable, "-c", ACTIVATION, path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {row["kernel"] for row in json.loads(path.read_text())["rows"]}
    assert (found >= {"gelu", "layernorm"}, done.stdout) == (True, "[]\n")
