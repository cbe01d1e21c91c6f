"""The commands of the documents run, on small inputs that have the names of the documents."""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from kprof.kernels.correctness.levels import result_of_gate
from kprof.report.calibration import result_of_calibration
from kprof.report.sla_verdict import result_of_sla
from tests.analyze.test_fit import CONFIG
from tests.collect import nsys_files
from tests.commands.test_cli import kprof
from tests.ncu_files import launch, raw_page
from tests.report.partner_evidence import everything
from tests.test_repository import DOCUMENTS, commands_in

ROOT = Path(__file__).parent.parent
RECORDINGS = ROOT / "tests" / "data" / "h200"
EXAMPLES = ROOT / "docs" / "examples"
# The beginnings of commands that do not run here.
LEFT_OUT = {
    "kprof ab": "measures for minutes; tests/ab runs it",
    "kprof kernels bench": "needs a GPU",
    "kprof kernels check": "needs a GPU",
    "kprof mcp": "serves until its client ends it; tests/commands/test_mcp.py",
    "kprof ncu": "needs a GPU",
    "kprof open s3:": "needs an object store; tests/collect/test_remote.py",
    "kprof roofline": "measures for minutes without a GPU, too",
    "kprof run --counters": "needs a GPU",
    "kprof run --ncu": "needs a GPU",
    "kprof run --nsys": "needs a GPU",
    "kprof run --skip 3 --steps 1 examples/engagements/voice_agent.py": "a model for a GPU",
    "kprof run --swap": "needs a GPU",
    "kprof run --trigger": "records a service until it is ended; tests/collect/test_service.py",
    "kprof selftest": "measures for minutes; tests/ab runs it",
}
# An answer that is no, or unclear, is an answer.
ANSWERS = {"sla": {0, 1, 3}, "gate": {0, 1, 3}, "doctor": {0, 1}}
TRAIN = '''"""Trains for a few steps."""

import torch

model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(8):
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
'''


def documented():
    """Return the documents' commands, each once, in the order of reading."""
    return list(dict.fromkeys(line for path in DOCUMENTS for line in commands_in(path)))


def reason_to_leave_out(line):
    """Return why a command does not run here; None where it runs."""
    return next((why for start, why in LEFT_OUT.items() if line.startswith(start)), None)


def run(line, heard):
    """Run a command line; return how it ended, or None where that is expected."""
    words = shlex.split(line)[1:]
    # Of an earlier command, in another document.
    Path("report.html").unlink(missing_ok=True)
    shutil.rmtree("report.kprof", ignore_errors=True)
    code = kprof(*words)
    told = heard.readouterr().err
    return None if code in ANSWERS.get(words[0], {0}) else f"{code}: {told[-800:]}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder that holds the files that the documents speak of, and work in it."""
    monkeypatch.chdir(tmp_path)
    # torchrun lies beside Python.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").write_text(TRAIN)
    for name in ("package", "llama"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "package" / "train.py").write_text(TRAIN)
    for name, text in re.findall(r"```toml\n# (\w+\.toml)\n(.*?)```", texts(), re.DOTALL):
        (tmp_path / name).write_text(text)
    write_recordings(tmp_path)
    write_answers(tmp_path)
    return tmp_path


def texts():
    return "\n".join(path.read_text() for path in DOCUMENTS)


def write_recordings(folder):
    """Write traces and opened runs."""
    for name, source in {
        "trace.json.gz": "llama_train.json.gz",
        "before.json.gz": "llama_train.json.gz",
        "after.json.gz": "compiled.json.gz",
    }.items():
        shutil.copy(RECORDINGS / source, folder / name)
    shutil.copytree(RECORDINGS / "whole_step", folder / "ranks")
    (folder / "report.csv").write_text(raw_page(launch()))
    nsys_files.write(folder, nsys_files.kernel(), name="report.sqlite")
    for name, source in {"train": "llama_train", "after": "compiled"}.items():
        assert kprof("open", RECORDINGS / f"{source}.json.gz", "--out", f"{name}.kprof") == 0
    for name in ("before", "main"):
        shutil.copytree(folder / "train.kprof", folder / f"{name}.kprof")


def write_answers(folder):
    """Write comparisons, and the JSON of commands, as somebody saved it."""
    for name in ("ab", "train-ab", "main-ab"):
        shutil.copytree(EXAMPLES / "ab_llama_swap", folder / f"{name}.kprof")
    for name in ("comparison", "calibration"):
        shutil.copy(EXAMPLES / "ab_planted_2_percent" / f"{name}.json", folder)
    shutil.copytree(ROOT / "tests/data/responses/aiperf", folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "tests/data/responses/vllm.json", folder / "results.json")
    assert kprof("engage", "init", "customer", "A customer") == 0
    evidence = everything()
    before, after = (result_of_sla(level) for level in evidence.service_levels)
    gate = result_of_gate(evidence.gates[0])
    for name, content in {
        "main-sla": before,
        "sla": after,
        "main": before,
        "pr": after,
        "main-gate": gate,
        "gate": gate,
        "cost": msgspec.to_builtins(evidence.costs[0]),
        "selftest": result_of_calibration(evidence.calibration),
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_every_reason_to_leave_a_command_out_is_needed():
    lines = documented()
    assert [one for one in LEFT_OUT if not any(line.startswith(one) for line in lines)] == []


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_a_documented_command_runs(capfd):
    lines = [line for line in documented() if reason_to_leave_out(line) is None]
    assert len(lines) > 50
    assert {line: how for line in lines if (how := run(line, capfd)) is not None} == {}
