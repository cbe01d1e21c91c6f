"""The swap: kernels take over in one model, count what they do, and leave nothing behind."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import copy
import gc
import io
import operator
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

from tests.kernels.swap.reasons import SWAPPED_ALREADY
from kprof import kernels
from kprof.errors import KprofError, modules_in
from kprof.kernels.swap import sites
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import (
    NAMES,
    Attention,
    DroppingNorm,
    Mlp,
    Model,
    Norm,
    apply_rotary_pos_emb,
    snapshot,
    tokens,
    turn,
)


def site_named(swap, name):
    return next(site for site in swap.sites if site.name == name)


def test_every_site_of_a_model_is_replaced_and_counted():
    model = Model()
    with swapped(model, *NAMES) as swap:
        model(tokens(), tokens())
    found = sorted({(site.kernel, site.what) for site in swap.replaced})
    assert found == [
        ("cross_entropy", "Model: functional.cross_entropy"),
        ("layernorm", "LayerNorm"),
        ("rmsnorm", "Norm"),
        ("rope", "Attention: apply_rotary_pos_emb"),
        ("swiglu", "Mlp"),
    ]
    assert [site.num_replaced for site in swap.replaced] == [1] * 10
    assert swap.skipped == ()


def test_a_model_computes_the_same_within_a_swap_forward_and_backward():
    model = Model()
    wanted = model(tokens(), tokens())
    wanted.backward()
    gradients = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    with swapped(model, *NAMES):
        loss = model(tokens(), tokens())
        loss.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close([one.grad for one in model.parameters()], gradients)


def test_leaving_leaves_everything_as_it_was():
    model = Model()
    model.layers[0].before.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    with swapped(model, *NAMES):
        assert snapshot(model) != before
        assert list(model.state_dict()) == before[1]
    assert snapshot(model) == before


def test_an_error_inside_leaves_everything_as_it_was():
    model = Model()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), swapped(model, *NAMES):
        _ = 1 / 0
    assert snapshot(model) == before


def test_a_swap_is_entered_again_with_the_same_sites():
    model = Model()
    swap = swapped(model, *NAMES)
    for _ in range(3):
        with swap:
            model(tokens())
        model(tokens())
    assert site_named(swap, "layers.0.before").num_replaced == 3


def test_another_model_of_the_same_class_is_not_touched():
    student, teacher = Model(), Model()
    before = snapshot(teacher)
    with swapped(student, *NAMES) as swap:
        assert snapshot(teacher) == before
        teacher(tokens(), tokens())
    assert [site.num_replaced for site in swap.replaced] == [0] * 10


def test_a_part_of_a_model_can_be_swapped():
    model = Model()
    with swapped(model.layers[1], "rmsnorm=eager") as swap:
        assert "forward" not in model.layers[0].before.__dict__
    assert [site.name for site in swap.replaced] == ["before", "after"]


def test_swaps_of_one_model_nest_and_the_inner_one_leaves_the_outers_sites():
    model = Model()
    before = snapshot(model)
    with swapped(model, "rmsnorm=eager") as outer:
        with swapped(model, "rmsnorm=eager", "swiglu=eager") as inner:
            model(tokens())
        model(tokens())
    assert snapshot(model) == before
    assert site_named(inner, "layers.0.before").skipped == SWAPPED_ALREADY
    assert site_named(inner, "layers.0.mlp").num_replaced == 1
    assert site_named(outer, "layers.0.before").num_replaced == 2


def test_leaving_the_outer_swap_first_is_refused():
    model = Model()
    outer, inner = swapped(model, "rmsnorm=eager"), swapped(model, "swiglu=eager")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(KprofError, match="inner"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert "forward" not in model.layers[0].before.__dict__


def test_swaps_of_different_models_may_be_left_in_any_order():
    first, second = swapped(Model(), "rmsnorm=eager"), swapped(Model(), "rmsnorm=eager")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)


def test_a_swap_cannot_be_entered_twice_at_once():
    with swapped(Model(), "rmsnorm=eager") as swap, pytest.raises(KprofError, match="on already"):
        swap.__enter__()


def test_a_forward_replaced_by_other_code_is_left_alone():
    norm = Norm(16)
    norm.forward = lambda x: x
    with swapped(nn.Sequential(norm), "rmsnorm=eager") as swap:
        (site,) = swap.sites
    assert "replaced by tests.kernels.swap.test_swap" in site.skipped
    assert norm.forward(3) == 3


def test_a_class_whose_forward_was_replaced_is_left_alone():
    class Patched(Norm):
        forward = operator.methodcaller("abs")

        def __init__(self):
            super().__init__(8)

    Patched.forward = nn.Identity.forward
    with swapped(nn.Sequential(Patched()), "rmsnorm=eager") as swap:
        (site,) = swap.sites
    assert "replaced by torch.nn" in site.skipped


def test_a_module_of_another_library_of_kernels_is_left_alone():
    class LigerRMSNorm(Norm):
        __module__ = "liger_kernel.transformers.rms_norm"

    with swapped(nn.Sequential(LigerRMSNorm(8)), "rmsnorm=eager") as swap:
        (site,) = swap.sites
    assert site.skipped.startswith("LigerRMSNorm of liger_kernel")


def test_a_wrapper_around_a_replacement_stays_and_runs_the_original():
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm=eager") as swap:
        inner = model[0].forward
        model[0].forward = lambda x: inner(x)
    model(torch.ones(2, 16))
    (site,) = swap.sites
    assert "it stays" in site.skipped
    assert site.num_replaced == 0


def test_who_replaces_a_forward_between_two_entries_keeps_it():
    model = nn.Sequential(Norm(16))
    swap = swapped(model, "rmsnorm=eager")
    with swap:
        pass
    theirs = model[0].forward = lambda x: x
    with swap:
        assert model[0].forward is theirs
    assert "other code" in swap.sites[0].skipped


def test_hooks_fire_as_often_and_in_the_same_order():
    model = Model(layers=1)
    seen = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(("before", name)))
        module.register_forward_hook(lambda *_, name=name: seen.append(("after", name)))
    model(tokens())
    wanted, seen[:] = list(seen), []
    with swapped(model, *NAMES):
        model(tokens())
    assert seen == wanted


def test_without_a_hook_on_it_an_activation_is_passed_over():
    mlp = Mlp(16)
    with swapped(mlp, "swiglu=eager") as swap:
        mlp(torch.ones(2, 16))
        mlp.act_fn.register_forward_hook(lambda *_: None)
        mlp(torch.ones(2, 16))
    (site,) = swap.sites
    assert site.num_replaced == 1


def test_hooks_on_backward_passes_fire():
    model = nn.Sequential(nn.Linear(16, 16), Norm(16))
    seen = []
    model[1].register_full_backward_hook(lambda *_: seen.append("norm"))
    with swapped(model, "rmsnorm=eager"):
        model(torch.ones(2, 16)).sum().backward()
    assert seen == ["norm"]


def test_a_copy_of_a_swapped_model_computes_with_its_own_weights_and_is_not_swapped():
    model = Model()
    with swapped(model, *NAMES) as swap:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.layers[0].before.weight.fill_(3.0)
        assert not torch.equal(other(tokens()), model(tokens()))
    assert site_named(swap, "layers.0.before").num_replaced == 1
    plain = copy.deepcopy(model)
    with torch.no_grad():
        plain.layers[0].before.weight.fill_(3.0)
    assert torch.equal(other(tokens()), plain(tokens()))


def test_a_copy_of_a_swapped_model_can_be_swapped_itself():
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm=eager"):
        other = copy.deepcopy(model)
    with swapped(other, "rmsnorm=eager") as swap:
        other(torch.ones(2, 16))
    assert swap.sites[0].num_replaced == 1


def test_a_swapped_model_is_saved_as_if_it_were_not():
    model = Model()
    with swapped(model, *NAMES):
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert torch.equal(read(tokens()), model(tokens()))
    assert read.layers[0].before.forward.__func__ is Norm.forward


def test_a_model_is_freed_although_it_was_swapped():
    model = Model()
    swap = swapped(model, *NAMES)
    with swap:
        model(tokens())
    del model
    gc.collect()
    with swap:
        assert all(site.num_replaced == 1 for site in swap.replaced[:1])


def test_the_random_numbers_of_the_workload_stay_the_same():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    model = nn.Sequential(Model(), DroppingNorm(16))
    torch.manual_seed(3)
    with swapped(model, *NAMES):
        assert torch.equal(torch.rand(4), wanted)


class Nested(Attention):
    """Its forward makes functions, which look names up, too."""

    def forward(self, x, cos, sin):
        q, k = apply_rotary_pos_emb(*(one for one in (x[:, None], x[:, None])), cos, sin)
        return (lambda: turn(q + k))()[:, 0]


def test_functions_of_a_forward_find_its_globals():
    model, x = Nested(16), torch.randn(2, 3, 16)
    angles = torch.linspace(0, 1, 48).reshape(1, 3, 16)
    wanted = model(x, angles, angles)
    with swapped(model, "rope=eager") as swap, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            torch.testing.assert_close(model(x.requires_grad_(), angles, angles), wanted)
    assert swap.sites[0].num_replaced == 1


def test_anomaly_detection_which_imports_in_c_finds_what_it_needs():
    model = Model()
    with swapped(model, *NAMES) as swap, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            model(tokens(), tokens()).backward()
    assert {site.kernel for site in swap.replaced if site.num_replaced} >= {"rope", "cross_entropy"}


def test_a_swap_in_another_thread_counts_too():
    model = nn.Sequential(Norm(16))
    with swapped(model, "rmsnorm=eager") as swap:
        thread = threading.Thread(target=model, args=(torch.ones(2, 16),))
        thread.start()
        thread.join()
    assert swap.sites[0].num_replaced == 1


def test_a_model_in_data_parallel_is_refused():
    with pytest.raises(KprofError, match="DataParallel"):
        swapped(nn.DataParallel(Model()), "rmsnorm=eager").__enter__()


def test_what_does_not_exist_is_an_error_that_says_what_does():
    with pytest.raises(KprofError, match=r"choose among.*rmsnorm"):
        swapped(Model(), "rmsnrom")
    with pytest.raises(KprofError, match=r"choose among.*eager"):
        swapped(Model(), "rmsnorm=nobody")
    with pytest.raises(KprofError, match="no kernel"):
        swapped(Model())
    with pytest.raises(KprofError, match="cannot be swapped"):
        swapped("model", "rmsnorm")


def test_only_the_asked_for_attention_gets_another_rotation():
    swapped_one, other = Attention(16), Attention(16)
    angles = torch.ones(1, 3, 8)
    with swapped(swapped_one, "rope=eager") as swap:
        other(torch.ones(2, 3, 16), angles, angles)
        assert swap.sites[0].num_replaced == 0
        swapped_one(torch.ones(2, 3, 16), angles, angles)
    assert swap.sites[0].num_replaced == 1


def test_a_kernel_is_found_without_the_modules_of_others():
    homes = {
        name: kernels.kernel_named(name) is kernel for name, kernel in kernels.all_kernels().items()
    }
    assert set(kernels.HOMES) <= set(homes)
    assert all(homes.values())


def test_a_family_of_call_sites_is_found_without_the_modules_of_others():
    found = modules_in("kprof.kernels.swap.sites")
    kernels_by_module = {one.__name__.rpartition(".")[2]: one.FAMILY.kernels for one in found}
    assert {name: set(given) for name, given in sites.FAMILIES.items()} == {
        name: set(given) for name, given in kernels_by_module.items()
    }
    assert list(sites.FAMILIES)[-2:] == ["function_calls", "readers"]


SECOND_CALL = """
import sys, torch
from kprof import swapped

entered, x = set(), torch.ones(4, 64)
norm = torch.nn.RMSNorm(64, eps=1e-6)

def note(frame, event, argument):
    if event == "call" and "/kprof/" in frame.f_code.co_filename:
        entered.add(frame.f_code.co_filename)

with torch.no_grad(), swapped(norm, "rmsnorm") as swap:
    norm(x), norm(x)
    sys.setprofile(note)
    norm(x)
    sys.setprofile(None)
assert swap.sites[0].num_replaced == 3
print(len(entered), sum(name.partition(".")[0] == "kprof" for name in sys.modules))
"""


def test_a_further_call_enters_few_files_and_a_swap_imports_few_modules():
    # The interpreter of Triton, which this process runs for the CPU, is inherited.
    command = [sys.executable, "-c", SECOND_CALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_files, num_modules = map(int, done.stdout.split())
    assert num_files <= 4
    assert num_modules <= 40


PATCHED_FIRST = """
import torch
from torch.nn import functional
from kprof import swapped

class Loss(torch.nn.Module):
    def forward(self, x, y):
        return functional.cross_entropy(x, y)

theirs = functional.cross_entropy
functional.cross_entropy = lambda x, y: theirs(x, y)
with swapped(Loss(), "cross_entropy") as swap:
    print(len(swap.sites))
"""


def test_a_function_that_was_patched_before_the_first_swap_is_not_torchs():
    command = [sys.executable, "-c", PATCHED_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
