"""A swap of a whole process, as `--swap` makes it, and its report."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.quantities import quantities_in
from kprof.errors import KprofError
from kprof.report.swap import sections_of_swap
from kprof.kernels.swap.swap_report import Calls, SiteReport, SwapReport
from kprof.kernels.swap.swap_report import read_report
from kprof.kernels.swap.swapping import all_models, swapped
from tests.kernels.swap_models import Model, Norm, WithoutRootNorm, tokens


def test_all_models_of_the_process_are_found_and_told_apart():
    first, second = Model(layers=1), nn.Sequential(Norm(8))
    with swapped(None, "rmsnorm=eager") as swap:
        first(tokens())
        second(torch.ones(2, 8))
    called = {site.name: site.num_replaced for site in swap.replaced if site.num_replaced}
    assert called == {
        "Model.layers.0.before": 1,
        "Model.layers.0.after": 1,
        "Sequential.0": 1,
    }


def test_losses_that_a_script_calls_itself_are_replaced_and_given_back():
    original, x, y = functional.cross_entropy, torch.randn(3, 5), torch.tensor([1, 2, 3])
    wanted = functional.cross_entropy(x, y, label_smoothing=0.2)
    with swapped(None, "cross_entropy=eager") as swap:
        torch.testing.assert_close(functional.cross_entropy(x, y, label_smoothing=0.2), wanted)
    assert functional.cross_entropy is original
    assert swap.sites[0].num_replaced == 1


def test_a_models_own_swap_leaves_the_losses_of_others_alone():
    original = functional.cross_entropy
    with swapped(Model(), "cross_entropy=eager"):
        assert functional.cross_entropy is original


def test_a_kept_reference_to_a_function_is_the_original_afterwards():
    with swapped(None, "cross_entropy=kprof") as swap:
        kept = functional.cross_entropy
    loss = torch.compile(lambda x, y: kept(x, y), backend="eager")
    loss(torch.randn(3, 5), torch.tensor([1, 2, 3]))
    assert all(not site.calls for site in swap.sites)
    torch.compiler.reset()


def test_swaps_of_all_the_process_are_left_in_order(monkeypatch):
    monkeypatch.setattr("kprof.kernels.swap.swapping.all_roots", list)
    original = functional.cross_entropy
    outer, inner = swapped(None, "cross_entropy=eager"), swapped(None, "cross_entropy=kprof")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(KprofError, match="inner one first"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert functional.cross_entropy is original


def test_a_site_replaced_by_other_code_is_reported_again():
    norm = Norm(8)
    swap = swapped(norm, "rmsnorm=eager")
    with swap:
        norm.forward = norm.forward
        norm.__dict__["forward"] = lambda x: x
    assert "other code replaced" in swap.sites[0].skipped
    del norm.__dict__["forward"]
    with swap:
        norm(torch.ones(2, 8))
        assert [site.num_replaced for site in swap.replaced] == [1]


def test_entering_again_finds_the_same_models_and_the_report_goes_on(tmp_path):
    model, path = Model(layers=1), tmp_path / "swap.json"
    for _ in range(2):
        with all_models("rmsnorm=eager,swiglu=eager", str(path)):
            model(tokens())
        model(tokens())
    report = read_report(path)
    assert {"rmsnorm", "swiglu"} == {site.kernel for site in report.sites}
    assert any(site.name.endswith("layers.0.mlp") and site.calls for site in report.sites)


def test_a_report_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(KprofError, match="no report"):
        read_report(tmp_path / "none.json")


def test_the_report_says_what_was_replaced_what_was_left_and_why():
    model = nn.Sequential(Norm(8), Norm(8), WithoutRootNorm(8))
    with swapped(model, "rmsnorm=eager") as swap:
        model(torch.ones(2, 8))
        model(torch.ones(2, 8, dtype=torch.float64))
    (section,) = sections_of_swap(swap.report)
    facts, replaced, skipped = section.parts
    assert [value for _, value, _ in facts.items] == ["2", "1", "2", "2"]
    by_eager, by_original = replaced.rows
    assert by_eager == ("* (2)", "Norm", "rmsnorm", "eager", "2", "")
    assert by_original[:-1] == ("* (2)", "Norm", "rmsnorm", "original", "2")
    assert "float64" in by_original[-1]
    assert skipped.rows[0][:3] == ("*", "WithoutRootNorm", "rmsnorm")


def test_a_report_of_nothing_says_so():
    (section,) = sections_of_swap(SwapReport(("rmsnorm",)))
    assert "No call site" in section.parts[1].text


def test_compiled_sites_and_uncalled_sites_are_named():
    sites = (
        SiteReport("a", "rope", "Attention", calls=(Calls(3, "kprof", None, True),)),
        SiteReport("b", "rmsnorm", "Norm"),
    )
    (section,) = sections_of_swap(SwapReport(("rmsnorm", "rope"), sites))
    facts, table = section.parts
    assert facts.items[-1][:2] == ("compiled", "1")
    assert [row[3:] for row in table.rows] == [("kprof", "compiled", ""), ("", "0", "never called")]


def test_layers_that_found_their_input_in_fp8_are_told_with_how_often():
    calls = Calls(4, "kprof", num_joined=3), Calls(2, None, "with float64, it is refused")
    sites = (SiteReport("a", "fp8_linear", "Linear", calls=calls),)
    (section,) = sections_of_swap(SwapReport(("fp8_linear",), sites))
    joined, refused = (row[3:] for row in section.parts[1].rows)
    assert (joined[:2], quantities_in(joined[2])) == (("kprof", "4"), ["3"])
    assert refused == ("original", "2", calls[1].why)
