"""`kprof run --swap`: kernels take over in an unmodified script, and the report says where."""

import tests.kernel_interpreter  # noqa: F401, I001 - before anything that imports Triton

import json
import re
import subprocess
import sys

import pytest
import torch

from kprof.collect.recorder.kprof_recorder.settings import Settings
from kprof.collect.recorder.kprof_recorder.start import Swapping
from kprof.collect.launch import LaunchResult
from kprof.errors import KprofError
from kprof.opened import Opened, open_trace
from kprof.run import NOT_SWAPPED, RunOptions, run
from kprof.run import run_service
from kprof.kernels.swap.swap_report import SwapReport
from kprof.kernels.swap.swap_report import GATE_PASSED, SWAP_REPORT, Checked, write_report
from tests.commands.test_cli import kprof

TRAIN = """
import torch
from torch import nn

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

model = nn.Sequential(nn.Linear(16, 16), Norm())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_kernels_take_over_after_a_step_and_the_report_says_where(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["--skip", "2", "--steps", "2", "--swap", "rmsnorm=eager"]
    exit_code = kprof("run", *words, "train.py")
    told = capfd.readouterr()
    assert exit_code == 0, told.err
    assert re.search(r"\bsites +1\b", told.out) and "Sequential.*" in told.out
    (site,) = json.loads((tmp_path / "train.kprof" / SWAP_REPORT).read_text())["sites"]
    assert (site["name"], site["calls"][0]["provider"]) == ("Sequential.1", "eager")
    assert site["calls"][0]["num_calls"] == 5
    assert "Sequential.*" in (tmp_path / "train.kprof/report.html").read_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"swap": "nosuch"}, "nosuch"),
        ({"swap": "rmsnorm", "skip": 0}, "--skip 0"),
        ({"swap": "rmsnorm", "ncu": True}, "--ncu"),
    ],
)
def test_what_cannot_be_swapped_is_an_error_before_anything_starts(tmp_path, options, problem):
    out = tmp_path / "run.kprof"
    with pytest.raises(KprofError, match=problem):
        run(RunOptions((sys.executable,), form="command", out=out, **options))
    assert not out.exists()


def test_a_service_is_not_swapped():
    with pytest.raises(KprofError, match="--trigger"):
        run_service(RunOptions(("serve.py",), swap="rmsnorm"), "signal")


def test_a_workload_in_which_no_kernel_took_over_is_told(tmp_path, monkeypatch):
    launched = LaunchResult(0, tmp_path / "raw", 1, (), ())
    monkeypatch.setattr("kprof.run.launch", lambda options, say: launched)
    options = RunOptions((sys.executable,), form="command", out=tmp_path / "x", swap="rmsnorm")
    assert run(options).messages == (NOT_SWAPPED,)


def test_a_swap_that_fails_in_the_workload_leaves_it_as_it_is(tmp_path):
    problems = []
    swapping = Swapping("nosuch", tmp_path, problems)
    swapping.make()
    swapping.make()
    swapping.tell()
    (problem,) = problems
    assert problem.startswith("nosuch ") and "KprofError" in problem
    assert list(tmp_path.iterdir()) == []


def test_a_run_inside_another_does_not_find_its_swap(tmp_path, monkeypatch):
    from kprof.collect.launch import injecting

    inner = injecting(Settings(tmp_path), Settings(tmp_path, swap="rmsnorm").to_environment())
    assert Settings.from_environment(inner).swap is None


def test_a_run_without_a_swap_has_no_such_section(tmp_path, monkeypatch):
    monkeypatch.setattr("kprof.opened.sections_of", lambda trace, **how: [])
    opened = Opened(None, tmp_path)
    assert opened.summary == []
    write_report(SwapReport(("rmsnorm",)), tmp_path / SWAP_REPORT)
    assert [section.title for section in opened.summary] == ["Swap"]


@pytest.mark.parametrize("names", [("rope=kprof", "adamw=kprof"), ()])
def test_auto_is_chosen_before_the_workload_starts_and_recorded(tmp_path, monkeypatch, names):
    launched, asked = [], []

    def launch(options, say):
        launched.append(options)
        return LaunchResult(0, options.out / "raw", 1, (), ())

    def choose(options, command, folder):
        assert folder.is_dir()
        asked.append((options.budget_s, command))
        return names

    monkeypatch.setattr("kprof.run.launch", launch)
    options = RunOptions((sys.executable,), form="command", out=tmp_path / "x", swap="auto")
    outcome = run(options, choose=choose)
    assert launched[0].swap == ",".join(names)
    assert asked == [(None, (sys.executable,))]
    # Where no kernel pays, the workload runs as it is.
    assert outcome.messages == ((NOT_SWAPPED,) if names else ())


@pytest.mark.slow
def test_a_run_records_with_the_kernels_that_pay_and_finds_the_choice_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Torch's own operator runs without a GPU, ours do not.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("kprof.ab.choose._judge", lambda place, end_s, one: Checked(GATE_PASSED))
    (tmp_path / "train.py").write_text(UNFUSED)
    for name, more in {"first": ("--budget", "120"), "again": ()}.items():
        words = ["--swap", "auto", *more, "--out", f"{name}.kprof", "train.py"]
        assert kprof("run", *words) == 0
        # The processes in which kernels were tried.
        assert (tmp_path / f"{name}.kprof" / "choice").exists() is (name == "first")
        sites = json.loads((tmp_path / f"{name}.kprof" / SWAP_REPORT).read_text())["sites"]
        assert {(one["kernel"], one["calls"][0]["provider"]) for one in sites} == {
            ("layernorm", "aten")
        }
        assert "Choice of kernels" in (tmp_path / f"{name}.kprof/report.html").read_text()


UNFUSED = """
import os, torch
from torch import nn
torch.set_num_threads(1)

class LayerNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = 1e-6

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x + self.bias

layers = [one for _ in range(3) for one in (nn.Linear(64, 64), LayerNorm(64))]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
x = torch.randn(2048, 64)
for _ in range(10**6 if "KPROF_SCHEDULE" in os.environ else 12):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


ON_A_GPU = """
import torch
from torch import nn
torch.manual_seed(1)

class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))

layers = [one for _ in range(8) for one in (nn.Linear(512, 512), Norm(512), nn.Dropout(0.1))]
model = nn.Sequential(*layers, nn.Linear(512, 1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(4096, 512, device="cuda"), torch.arange(4096, device="cuda") % 1000
losses = []
for _ in range(14):
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses, torch.cuda.max_memory_allocated(), torch.cuda.get_rng_state().sum().item())
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_dry_run_changes_no_bit_no_random_state_and_no_peak_of_memory(tmp_path):
    (tmp_path / "train.py").write_text(ON_A_GPU)
    command = [sys.executable, "train.py"]
    bare = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    command = [sys.executable, "-m", "kprof", "run", "--out", "run.kprof", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert bare.stdout.strip() in ran.stdout
    dry_run = open_trace(tmp_path / "run.kprof").meta.dry_run
    assert {row.kernel for row in dry_run.rows} >= {"rmsnorm", "adamw", "cross_entropy"}
    assert "adamw" in {row.kernel for row in dry_run.rows if row.provider}
    assert dry_run.took_ns < 3e9
