"""The example engagements: their commands exist, and the voice agent says the same in every way."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import typer.main

from kprof.cli import app
from kprof.entries import read_engagement

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "engagements"
MADE = sorted(path.parent for path in (ROOT / "docs" / "examples").glob("*/0001-opened.json"))
LARGEST_BYTES = 3_000_000


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
        command = typer.main.get_command(app).commands[name]
        command.make_context(name, list(rest), obj=[name, *rest]).close()
        self.said.append((name, *rest))

    def read(self, name):
        return {"claims": [{"interval": {"low": 0.2, "ratio": 0.25, "high": 0.5}}]}

    def check(self, *kernels):
        self("kernels", "check", *kernels, "--json", into="gate.json")

    def engage(self, action, *words):
        self("engage", action, "engagement", *words)

    def first_predicted(self, *names):
        return names[0]


@pytest.mark.parametrize("name", ["llama_training", "slow_loader", "voice_agent"])
def test_an_engagement_is_made_of_commands_that_kprof_has(name, build, tmp_path, monkeypatch):
    monkeypatch.setattr(build.subprocess, "run", lambda *words, **options: None)
    kprof = Noting(tmp_path)
    build.BUILDERS[name](kprof, True, "graphs")
    verbs = [words[0] for words in kprof.said]
    assert verbs[:3] == ["run", "engage", "engage"]
    assert "ab" in verbs
    # The first thing that is added is what the predictions are made of.
    assert kprof.said[2][:4] == ("engage", "add", "engagement", "before.kprof")


def test_what_a_token_gets_cheaper_by_has_the_band_of_the_verdict(build, tmp_path):
    assert build.speedup_in(Noting(tmp_path).read("ab.json")) == "2,4,5"


def test_the_decision_follows_from_the_last_comparison(build, tmp_path):
    for number, verdict in enumerate(("FASTER", "INCONCLUSIVE")):
        path = tmp_path / f"{number}.json"
        path.write_text(f'{{"claims": [{{"verdict": "{verdict}"}}]}}')
    assert build.decision_on(build.Kprof(tmp_path, True)).startswith("Do not adopt")


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


@pytest.mark.parametrize("way", ["static", "graphs"])
def test_a_cache_of_fixed_size_says_what_a_growing_one_does(way, voice):
    grown = answers_of(voice, "eager")
    assert answers_of(voice, way) == grown
    assert [len(tokens) for tokens in grown] == [19, 19]
    assert len(set(grown[0])) > 3


def test_another_way_is_switched_on_and_off_again(voice, monkeypatch):
    agent = agent_of(voice, "eager")
    monkeypatch.setattr(sys.modules["__main__"], "agent", agent, raising=False)
    with voice.graphs():
        assert agent.serve == "graphs"
    assert agent.serve == "eager"
    with pytest.raises(AttributeError, match="no_such_way"):
        voice.no_such_way  # noqa: B018


@pytest.mark.parametrize("folder", MADE, ids=lambda folder: folder.name)
def test_an_engagement_that_was_made_is_whole_and_its_page_can_be_mailed(folder, build):
    engagement = read_engagement(folder)
    assert engagement.problems == ()
    assert folder.name in build.BUILDERS
    page = folder / "report.html"
    assert page.stat().st_size <= LARGEST_BYTES
    assert "Content-Security-Policy" in page.read_text(encoding="utf-8")
