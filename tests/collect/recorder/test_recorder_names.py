"""Fully qualified names of modules, as ranges carry them."""

import sys

import pytest

torch = pytest.importorskip("torch")

from kprof.collect.recorder.kprof_recorder import named_ranges  # noqa: E402
from kprof.collect.recorder.kprof_recorder.named_ranges import Models  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Linear(2, 2)


class Llama(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block()])


class Critic(Llama):
    pass


class DataParallel(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class OptimizedModule(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_the_root_is_named_for_its_class_and_children_for_their_path():
    model, models = Llama(), Models()
    assert models.range_name_of(model) == "kprof.module#Llama"
    assert models.range_name_of(model.layers[0].attn) == "kprof.module#layers.0.attn"


def test_a_second_model_carries_its_class_in_every_name():
    first, second, models = Llama(), Critic(), Models()
    models.range_name_of(first)
    models.range_name_of(second)
    assert models.range_name_of(first.layers[0]) == "kprof.module#layers.0"
    assert models.range_name_of(second.layers[0]) == "kprof.module#Critic.layers.0"


def test_a_wrapper_leaves_no_segment_in_the_names_below_it():
    model, models = Llama(), Models()
    wrapper = DataParallel(model)
    assert models.range_name_of(wrapper) == "kprof.module#DataParallel"
    assert models.range_name_of(model.layers[0]) == "kprof.module#layers.0"


def test_a_compiled_model_carries_the_models_own_name():
    compiled, models = OptimizedModule(Llama()), Models()
    assert models.range_name_of(compiled) == "kprof.module#Llama"
    assert models.has_compiled


def test_frozen_parameters_are_counted_but_cannot_be_trained():
    model, models = Llama().requires_grad_(False), Models()
    assert models.describe(model).source.size == 6
    assert not models.describe(model).could_train


class Peculiar(Llama):
    __hash__ = None

    def parameters(self):
        return [{"params": list(super().parameters()), "lr": 0.1}]

    def named_modules(self):
        raise RuntimeError("mine")

    def __eq__(self, other):
        raise RuntimeError("no two are alike")


def test_what_a_model_overrides_is_not_asked():
    model, models = Peculiar(), Models()
    assert models.describe(model).source.size == 6
    assert models.range_name_of(model.layers[0].attn) == "kprof.module#Linear"
    assert models.range_name_of(model) == "kprof.module#Peculiar"


def test_a_wrapper_with_nothing_in_it_is_a_module_like_any_other():
    wrapper, models = DataParallel(None), Models()
    assert models.range_name_of(wrapper) == "kprof.module#DataParallel"


def test_names_keep_no_module_alive():
    models = Models()
    models.range_name_of(Llama())
    assert models.range_names == {}


def test_before_the_window_names_are_given_anew_to_the_largest_model_first():
    small, large, models = torch.nn.Sequential(torch.nn.ReLU()), Llama(), Models()
    for module in (small, large):
        models.describe(module)
        models.range_name_of(module)
    assert models.range_name_of(large.layers[0]) == "kprof.module#Llama.layers.0"
    models.name_known()
    assert models.range_name_of(large.layers[0]) == "kprof.module#layers.0"


def test_nvtx_is_spoken_only_where_a_tool_listens(monkeypatch):
    monkeypatch.setattr(torch._C, "_nvtx", object(), raising=False)
    assert named_ranges.range_type({"NVTX_INJECTION64_PATH": "/nsys.so"}) is named_ranges.NvtxRange
    assert named_ranges.range_type({}) is named_ranges.TorchRange


def test_importing_the_recorders_package_imports_no_torch_of_its_own():
    assert "torch" not in vars(sys.modules["kprof.collect.recorder.kprof_recorder"])
