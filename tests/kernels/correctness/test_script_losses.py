"""The losses that a training script's own process writes for level L6."""

import math

import pytest

torch = pytest.importorskip("torch")

from kprof.kernels.correctness.script_losses import read, watched  # noqa: E402


def model_and_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def loss_of(model, number):
    return (model(torch.full((2, 4), float(number))) ** 2).mean()


def written(path, num_steps=9):
    return read(path, num_steps)


def test_a_step_has_the_sum_of_its_losses_and_the_norm_of_its_gradients(tmp_path):
    path = tmp_path / "losses.jsonl"
    model, optimizer = model_and_optimizer()
    expected, norms = [], []
    with watched(str(path)):
        for step in range(3):
            losses = [loss_of(model, step + half) for half in (0.5, 1.0)]
            for loss in losses:
                loss.backward()
            expected.append(sum(loss.item() for loss in losses))
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
            optimizer.step()
            optimizer.zero_grad()
    found = written(path)
    assert found.curve.losses == pytest.approx(expected)
    assert found.curve.gradient_norms == pytest.approx(norms)
    assert found.dtype == "float32"
    assert written(path, 2).curve.losses == pytest.approx(expected[:2])


def test_outside_of_it_nothing_is_heard_and_an_entry_begins_anew(tmp_path):
    path = tmp_path / "losses.jsonl"
    model, optimizer = model_and_optimizer()
    before = torch.autograd.backward, torch.autocast.__enter__, torch.amp.GradScaler.scale
    for _ in range(2):
        with watched(str(path)):
            loss_of(model, 1).backward()
            optimizer.step()
        loss_of(model, 1).backward()
        optimizer.step()
    assert len(written(path).curve.losses) == 1
    assert before == (
        torch.autograd.backward,
        torch.autocast.__enter__,
        torch.amp.GradScaler.scale,
    )


def test_a_scaled_loss_is_written_without_its_scale(tmp_path):
    path = tmp_path / "losses.jsonl"
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watched(str(path)):
        loss = loss_of(model, 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    assert written(path).curve.losses == [pytest.approx(loss.item())]


def test_the_narrowest_arithmetic_is_that_of_autocast(tmp_path):
    path = tmp_path / "losses.jsonl"
    model, optimizer = model_and_optimizer()
    with watched(str(path)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, 1)
        loss.backward()
        optimizer.step()
    assert written(path).dtype == "bfloat16"


def test_what_is_no_loss_is_none_and_sparse_gradients_have_no_norm(tmp_path):
    path = tmp_path / "losses.jsonl"
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    with watched(str(path)):
        optimizer.step()
        rows = table(torch.tensor([0, 1]))
        rows.backward(torch.ones_like(rows), retain_graph=True)
        optimizer.step()
        rows.sum().backward()
        optimizer.step()
    found = written(path)
    assert len(found.curve.losses) == 1
    assert math.isfinite(found.curve.losses[0])
    assert found.curve.gradient_norms == ()


def test_of_a_process_that_wrote_nothing_there_are_no_losses(tmp_path):
    assert written(tmp_path / "missing").curve.losses == []
