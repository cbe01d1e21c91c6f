"""Models in pieces, on two processes: FSDP2, and weights that are distributed tensors."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import Model, Norm, tokens

KERNELS = ("rmsnorm", "swiglu", "cross_entropy", "adamw")


def train(model, *names):
    """Return the losses of two steps, and what a swap says of itself."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), []
    # Each process has rows of its own.
    batch = tokens() + distributed.get_rank()
    keys, forwards = list(model.state_dict()), [one.forward for one in model.modules()]
    swap = swapped([model, optimizer], *names)
    with swap:
        for _ in range(2):
            losses.append(model(batch % 11, batch % 11))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert list(model.state_dict()) == keys
    assert [one.forward for one in model.modules()] == forwards
    return torch.stack(losses).detach(), calls_of(swap)


def calls_of(swap):
    """Return of each kernel how many calls went to whom, or why they did not."""
    return {one.kernel: (c.num_calls, c.provider, c.why) for one in swap.sites for c in one.calls}


def trained_in_pieces(mesh):
    torch.manual_seed(1)
    told = []
    state = Model().state_dict()
    for names in (("adamw=aten",), KERNELS):
        model = Model()
        model.load_state_dict(state)
        for one in (*model.layers, model):
            fully_shard(one, mesh=mesh)
        losses, calls = train(model, *names)
        told.append((losses, [one.full_tensor().detach() for one in model.parameters()], calls))
    return told


def normed_in_pieces(mesh):
    torch.manual_seed(1)
    norm = Norm(16)
    distribute_module(norm, mesh)
    x = distribute_tensor(torch.randn(4, 16), mesh, [Shard(0)])
    wanted = norm(x)
    with swapped(norm, "rmsnorm") as swap:
        got = norm(x)
    assert got.placements == wanted.placements == (Shard(0),)
    assert norm.weight.placements == (Replicate(),)
    return wanted.full_tensor().detach(), got.full_tensor().detach(), calls_of(swap)


def work(rank, folder):
    """Be one of two processes."""
    torch.set_num_threads(1)
    met = f"file://{folder}/met"
    distributed.init_process_group("gloo", init_method=met, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.save((trained_in_pieces(mesh), normed_in_pieces(mesh)), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return what each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(work, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_a_model_in_shards_trains_the_same_and_its_sharded_optimizer_steps_as_before(told):
    for ((wanted, weights, _), (got, others, calls)), _ in told:
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(others, weights)
        assert {calls[one] for one in KERNELS[:3]} == {(2, "kprof", None)}
        *counted, why = calls["adamw"]
        assert (counted, "DTensor" in why) == ([2, None], True)


@pytest.mark.slow
def test_a_norm_of_distributed_tensors_is_the_original(told):
    for _, (wanted, got, calls) in told:
        assert torch.equal(got, wanted)
        assert calls.keys() == {"rmsnorm"}
        *counted, why = calls["rmsnorm"]
        assert (counted, "DTensor" in why) == ([1, None], True)
