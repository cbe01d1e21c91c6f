"""Fully qualified names of modules, as ranges carry them."""

import sys

import pytest

torch = pytest.importorskip("torch")

from kprof.collect.inject.kprof_recorder.ranges import Models  # noqa: E402


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
    assert models.name_of(model) == "Llama"
    assert models.name_of(model.layers[0].attn) == "layers.0.attn"


def test_a_second_model_carries_its_class_in_every_name():
    first, second, models = Llama(), Critic(), Models()
    models.name_of(first)
    models.name_of(second)
    assert models.name_of(first.layers[0]) == "layers.0"
    assert models.name_of(second.layers[0]) == "Critic.layers.0"


def test_a_wrapper_leaves_no_segment_in_the_names_below_it():
    model, models = Llama(), Models()
    wrapper = DataParallel(model)
    assert models.name_of(wrapper) == "DataParallel"
    assert models.name_of(model.layers[0]) == "layers.0"


def test_a_compiled_model_carries_the_models_own_name():
    compiled, models = OptimizedModule(Llama()), Models()
    assert models.name_of(compiled) == "Llama"
    assert models.has_compiled


def test_frozen_parameters_are_counted_but_cannot_be_trained():
    model, models = Llama().requires_grad_(False), Models()
    assert models.describe(model).num_parameters == 6
    assert not models.describe(model).is_trainable


def test_importing_the_recorders_package_imports_no_torch_of_its_own():
    assert "torch" not in vars(sys.modules["kprof.collect.inject.kprof_recorder"])
