"""Every example runs unmodified under `kprof run`, and leaves a run that can be read."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kprof.kernels.swap.swap_report import SWAP_REPORT, read_report
from kprof.opened import open_trace
from tests.commands.test_cli import kprof

EXAMPLES = Path(__file__).parent.parent / "examples"

# Small enough for a CPU, long enough that two steps lie between the skipped ones and the end.
RECORDED = {
    "train_tiny.py": ["--steps", "6", "--layers", "1", "--width", "64", "--tokens", "16"],
    "train_convnet.py": ["--steps", "6", "--batch", "4", "--width", "4", "--workers", "1"],
    "generate.py": ["--tokens", "6", "--prompt", "8", "--layers", "1", "--width", "64"],
    "inference_service.py": ["--requests", "60", "--batch", "4", "--width", "16"],
    "compiled.py": ["--steps", "6", "--layers", "1", "--width", "32", "--batch", "8"],
    "train_llama.py": [
        *("--steps", "6", "--layers", "1", "--width", "64", "--vocabulary", "100"),
        *("--batch", "1", "--tokens", "8"),
    ],
    "serve_llama.py": ["decode", "--tiny", "--steps", "6", "--batch", "2", "--prompt", "16"],
    "plain_tensors.py": ["--iterations", "5", "--size", "64"],
}
# Some of the kernels that have calls in them.
WITH_KERNELS = {
    "train_tiny.py": set(),
    "generate.py": set(),
    "train_llama.py": {"adamw", "cross_entropy", "linear_cross_entropy", "rmsnorm", "swiglu"},
    "serve_llama.py": {"rmsnorm", "swiglu"},
}
OF_TRANSFORMERS = {"train_llama.py", "serve_llama.py"}
EDITED = {"api_profile.py": ["--steps", "6"]}
# A change that `kprof ab` switches on and off in another example.
PATCHES = {"fused_adamw.py": "fused"}
# Runs until it is ended: recorded, with its client, in tests/collect/test_service.py.
ENDLESS = {"serve_tiny.py"}
FILES_OF_A_RUN = {"meta.json", "kernels.parquet", "ranges.parquet", "report.html"}


OPTIONS = ["--skip", "1", "--steps", "2"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record an example, with the dry run of all kernels, for the first test that asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        # Without it, no kernel of Triton runs on a CPU.
        patch.setenv("TRITON_INTERPRET", "1")
        yield cache(lambda name: record(name, tmp_path_factory.mktemp("example") / "run.kprof"))


def record(name, run, *options):
    """Record an example; return its run."""
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    words = [*OPTIONS, *options, "--out", run, EXAMPLES / name, *RECORDED[name]]
    assert kprof("run", *words) == 0, f"kprof run of {name}; its output tells why"
    return run


def names_in(folder):
    """Return the names of the files directly in `folder`."""
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
def test_an_example_is_profiled_without_an_edit(name, recorded):
    run = recorded(name)
    assert names_in(run) >= FILES_OF_A_RUN
    assert json.loads((run / "meta.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernels_of_an_example_run_where_its_dry_run_says_so(name, recorded, tmp_path):
    pytest.importorskip("triton")
    dry_run = open_trace(recorded(name)).meta.dry_run
    assert (len(dry_run.kernels) > 9, dry_run.why_not) == (True, "")
    told = {(row.kernel, row.provider) for row in dry_run.rows if row.provider}
    assert {kernel for kernel, _ in told} >= WITH_KERNELS[name]
    # The loss alone has no calls where it is one kernel with the head.
    fused = ("linear_cross_entropy", "kprof")
    told -= {("cross_entropy", "kprof")} if fused in told else set()
    kernels = ",".join(kernel for kernel, _ in told)
    out = record(name, tmp_path / "swapped.kprof", "--swap", kernels)
    sites = read_report(out / SWAP_REPORT).replaced
    assert {(site.kernel, calls.provider) for site in sites for calls in site.calls} == told


@pytest.mark.slow
def test_of_compiled_code_there_is_no_dry_run(recorded):
    pytest.importorskip("triton")
    dry_run = open_trace(recorded("compiled.py")).meta.dry_run
    assert (dry_run.rows, bool(dry_run.why_not)) == ((), True)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATCHES)
def test_an_example_of_a_change_is_compared(name, tmp_path, capfdbinary):
    out = tmp_path / "ab.kprof"
    patch = f"{EXAMPLES / name}:{PATCHES[name]}"
    options = ["--patch", patch, "--pairs", "6", "--skip", "1", "--window", "0.01", "--out", out]
    script = [EXAMPLES / "train_tiny.py", "--steps", "100000", "--layers", "1", "--tokens", "16"]
    exit_code = kprof("ab", "--json", *options, *script)
    told = capfdbinary.readouterr()
    assert exit_code in (0, 1, 3), told.err
    claim = json.loads(told.out)["claims"][0]
    # Which one depends on the machine; that it came of pairs does not.
    assert claim["num_pairs"] == 6
    assert names_in(out) >= {"comparison.json", "report.html"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITED)
def test_an_example_that_uses_the_api_records_itself(name, tmp_path):
    run = tmp_path / "run.kprof"
    command = [sys.executable, EXAMPLES / name, *EDITED[name], "--out", run]
    recorded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert recorded.returncode == 0, recorded.stderr
    assert kprof("open", run) == 0
    assert names_in(run) >= FILES_OF_A_RUN


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*RECORDED, *EDITED, *PATCHES, *ENDLESS}
