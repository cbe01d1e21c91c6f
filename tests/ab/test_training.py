"""Level L6 of a training script as it is: `kprof ab --losses`."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from kprof.ab.training import report_of, trained_alike
from kprof.ab.variants import AbOptions, variants_of
from kprof.kernels.correctness.script_losses import read

NUM_STEPS = 40
SCRIPT = """
import os, random
import torch
change = os.environ.get("CHANGE", "")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
if change == "by chance":
    with torch.no_grad():
        model[2].weight *= random.SystemRandom().random()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for _ in range(5000 if change != "short" else 20):
    x = torch.randn(16, 8)
    loss = torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    loss.backward()
    if change == "worse":
        model[0].weight.grad.zero_()
    optimizer.step()
    optimizer.zero_grad()
"""


def level_of(folder, *, a="", b=""):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    options = AbOptions((str(script),), environment=(f"CHANGE={b}",), losses=NUM_STEPS)
    first, second = variants_of(options)
    first = replace(first, environment={"CHANGE": a})
    return trained_alike(first, second, options, folder / "runs", lambda message: None)


@pytest.mark.slow
def test_a_script_that_sets_no_seed_trains_as_well_as_itself_to_the_bit(tmp_path):
    level = level_of(tmp_path)
    assert (level.state, [one.value for one in level.measures]) == ("passed", [0, 0])
    curves = [read(one, NUM_STEPS).curve for one in tmp_path.glob("runs/*/losses.jsonl")]
    # Of three seeds; A of the first of them twice, and B.
    assert (len(curves), len({tuple(one.losses) for one in curves})) == (5, 3)


@pytest.mark.slow
def test_lost_gradients_fail(tmp_path):
    level = level_of(tmp_path, b="worse")
    assert level.state == "failed"
    assert report_of("a change", level).passed is False


@pytest.mark.slow
@pytest.mark.parametrize("change", ["by chance", "short"])
def test_runs_that_cannot_be_compared_prove_nothing(tmp_path, change):
    level = level_of(tmp_path, a=change, b=change)
    assert (level.state, level.measures) == ("not run", ())
    assert report_of("a change", level).reached is None
