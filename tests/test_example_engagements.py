"""The example engagements: their commands exist, and the voice agent says the same in every way."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
import typer.main

from kprof.ab.engagement_folder import read_engagement
from kprof.cli import app

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "engagements"
MADE = sorted(path.parent for path in (ROOT / "docs" / "examples").glob("*/0001-opened.json"))
LARGEST_BYTES = 3_000_000
# A folder of one machine, an address of its network, the name that a machine has in one.
PLACES = re.compile(
    r"(?<![\w.:/-])/(?:home|root|tmp|work|workspace|mnt|media|opt|srv|var|private|Users)/[\w.]"
    r"|\b(?:10\.\d{1,3}|127\.0|192\.168|172\.(?:1[6-9]|2\d|3[01]))\.\d{1,3}\.\d{1,3}\b"
    r"|\b[\w-]+\.(?:internal|localdomain|corp|lan)\b"
)
# The command, with all of its commands: it takes long to build.
KPROF = typer.main.get_command(app)
OF_HOSTS = {"host", "hostname", "node", "user"}


def keys_in(value):
    """Yield the keys of every object in JSON."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    for one in value if isinstance(value, list) else []:
        yield from keys_in(one)


def loaded(name):
    """Return a script of the examples as a module."""
    specification = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build():
    return loaded("build")


@pytest.fixture(scope="module")
def voice():
    return loaded("voice_agent")


class Noting:
    """Takes the place of what runs commands: parses each as kprof would, and notes it."""

    is_gated = True

    def __init__(self, folder):
        self.folder, self.said = folder, []

    def __call__(self, *words, into=None):
        name, *rest = map(str, words)
        command = KPROF.get_command(None, name)
        command.make_context(name, list(rest), obj=[name, *rest]).close()
        self.said.append((name, *rest))

    def read(self, name):
        return {"claims": [{"interval": {"low": 0.2, "ratio": 0.25, "high": 0.5}}]}

    def check(self, *kernels):
        for kernel in kernels:
            self("kernels", "check", kernel, "--json")

    def engage(self, action, *words):
        self("engage", action, "engagement", *words)

    def first_predicted(self, *names):
        return {"name": names[0], "swap": "rmsnorm,rope"}


@pytest.mark.parametrize("name", ["llama_training", "slow_loader", "voice_agent"])
def test_an_engagement_is_made_of_commands_that_kprof_has(name, build, tmp_path, monkeypatch):
    monkeypatch.setattr(build.subprocess, "run", lambda *words, **options: None)
    kprof = Noting(tmp_path)
    build.BUILDERS[name](kprof, True, "cuda_graphs")
    verbs = [words[0] for words in kprof.said]
    assert verbs[:3] == ["run", "engage", "engage"]
    assert "ab" in verbs
    # The first thing that is added is what the predictions are made of.
    assert kprof.said[2][:4] == ("engage", "add", "engagement", "before.kprof")


def test_what_a_token_gets_cheaper_by_has_the_band_of_the_verdict(build, tmp_path):
    assert build.speedup_in(Noting(tmp_path).read("ab.json")) == "2,4,5"


def test_what_the_findings_propose_is_swapped_and_tests_what_they_predict(build, tmp_path):
    kprof = Noting(tmp_path)
    build.llama_training(kprof, True, None)
    (compared,) = [words for words in kprof.said if words[0] == "ab"]
    assert compared[compared.index("--swap") + 1] == "rmsnorm,rope"
    assert ("engage", "add", "engagement", "ab.json", "--tests", "all-swaps") in kprof.said
    assert ("kernels", "check", "rope", "--json") in kprof.said


@pytest.mark.parametrize(
    ("verdicts", "promise", "said"),
    [
        (("INCONCLUSIVE", "FASTER"), None, "Adopt the change: it is FASTER. Look at it."),
        (("FASTER", "INCONCLUSIVE"), None, "Do not adopt the change: it is INCONCLUSIVE."),
        (("FASTER",), "MET", "Adopt the change: it is FASTER. Look at it."),
        (
            ("FASTER",),
            "MISSED",
            "Do not adopt the change: it is FASTER, but the target is still missed.",
        ),
    ],
)
def test_the_decision_follows_from_the_last_comparison_and_target(
    build, tmp_path, verdicts, promise, said
):
    found = [{"claims": [{"verdict": verdict}]} for verdict in verdicts]
    found += [{"percentiles": [], "verdict": promise}] if promise else []
    for number, content in enumerate(found):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(content))
        os.utime(path, (number, number))
    assert build.decision_on(build.Kprof(tmp_path, True), "Look at it.") == said


def test_what_the_gate_said_before_is_added_and_nothing_is_checked_again(build, tmp_path):
    checked, folder = tmp_path / "checked", tmp_path / "made"
    checked.mkdir()
    folder.mkdir()
    (checked / "rope.json").write_text('[{"subject": "rope"}]')
    (checked / "swiglu.json").write_text('[{"subject": "swiglu"}]')
    kprof = build.Kprof(folder, True, checked)
    said = []
    kprof.engage = lambda *words: said.append(words)
    kprof.check("rope", "rmsnorm", "swiglu")
    assert [one["subject"] for one in kprof.read("gate.json")] == ["rope", "swiglu"]
    assert said == [("add", "gate.json")]


def test_kernels_go_through_the_gate_at_the_same_time(build, tmp_path, monkeypatch):
    begun, waited = [], []

    class Started:
        def __init__(self, command, stdout, **_):
            begun.append(command[-2])
            stdout.write('[{"subject": "one"}]')

        def wait(self):
            waited.append(len(begun))
            return 3

    monkeypatch.setattr(build.subprocess, "Popen", Started)
    kprof = build.Kprof(tmp_path, True)
    kprof.engage = lambda *words: None
    kprof.check("rope", "swiglu")
    assert begun == ["rope", "swiglu"]
    assert waited == [2, 2]
    assert len(kprof.read("gate.json")) == 2


def agent_of(voice, way, num_tokens=19):
    torch.manual_seed(0)
    agent = voice.Agent(layers=2, width=128, vocabulary=50, longest=40).eval()
    for parameter in agent.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    agent.serve, agent.num_tokens = way, num_tokens
    return agent


def answers_of(voice, way, num_tokens=19):
    """Return what the agent says to two prompts, one after the other."""
    agent = agent_of(voice, way, num_tokens)
    said = []
    for seed in (1, 2):
        prompt = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(seed))
        listener = voice.Listener()
        agent.generate(prompt, listener)
        said.append(listener.tokens)
    return said


@pytest.mark.parametrize("way", ["static", "cuda_graphs"])
def test_a_cache_of_fixed_size_says_what_a_growing_one_does(way, voice):
    grown = answers_of(voice, "eager")
    assert answers_of(voice, way) == grown
    assert [len(tokens) for tokens in grown] == [19, 19]
    assert len(set(grown[0])) > 3


def test_another_way_is_switched_on_and_off_again(voice, monkeypatch):
    agent = agent_of(voice, "eager")
    monkeypatch.setattr(sys.modules["__main__"], "agent", agent, raising=False)
    with voice.cuda_graphs():
        assert agent.serve == "cuda_graphs"
    assert agent.serve == "eager"
    with pytest.raises(AttributeError, match="no_such_way"):
        voice.no_such_way  # noqa: B018


@pytest.mark.parametrize("folder", MADE, ids=lambda folder: folder.name)
def test_an_engagement_that_was_made_is_whole_and_its_page_can_be_mailed(folder, build):
    assert read_engagement(folder).entries[0].number == 1
    assert folder.name in build.BUILDERS
    page = folder / "report.html"
    assert page.stat().st_size <= LARGEST_BYTES
    assert "Content-Security-Policy" in page.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["']?https?:""", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", MADE, ids=lambda folder: folder.name)
def test_an_engagement_that_was_made_names_no_folder_and_no_machine(folder):
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8")
        assert PLACES.search(text) is None, path.name
        if path.suffix == ".json":
            assert OF_HOSTS.isdisjoint(keys_in(json.loads(text))), path.name
    page = (folder / "report.html").read_text(encoding="utf-8")
    host = re.search(r"<div>host</div></td>.*?<div>(.*?)</div>", page, re.DOTALL)
    assert host is None or host[1] == "[host]"


@pytest.mark.parametrize(
    "text",
    [
        "python /home/anna/train.py",
        '"/tmp/engage.x1/before.kprof"',
        "at 10.1.2.3:80",
        "node-3.internal",
    ],
)
def test_what_names_a_folder_or_a_machine_is_seen(text):
    assert PLACES.search(text)
    assert not PLACES.search("train.py of https://host.com/work/page, torch 2.11.0, driver 580.1.2")
