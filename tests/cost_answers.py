"""Asks `kprof cost` and reads its answers, on a day when all prices are known."""

import json
from datetime import date

from kprof.ab.pricing import calculate, json_of
from tests.commands.test_cli import kprof

TODAY = date(2026, 11, 20)
DAY = ("--as-of", "2026-11-20")
SERVING = ("--gpu", "H100", "--tokens-per-s", "5000")
OWN_LINE = {
    "gpu": "H100",
    "usd_per_gpu_hour": 2.5,
    "term": "on-demand",
    "price_list": "our contract",
    "source": "contract 7",
    "date": "2026-11-01",
}


def own_file(tmp_path, **changes):
    """Write a file of one price."""
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"quotes": [{**OWN_LINE, **changes}]}))
    return path


def answer(capsys, *words):
    """Return the JSON that `kprof cost` prints."""
    assert kprof("cost", *words, *DAY, "--json") == 0
    return json.loads(capsys.readouterr().out)


def assuming(facts, **assumptions):
    """Return the JSON of what follows from facts and assumptions."""
    return json.loads(json_of(calculate({**facts, "assumptions": assumptions}, TODAY)))


def figures(result, topic):
    """Return the figures of a topic, by name and unit."""
    return {(f["name"], f["unit"]): f for f in result["figures"] if f["topic"] == topic}


def mid(result, topic, name, unit):
    return figures(result, topic)[name, unit]["mid"]


def refusal(capsys, *words):
    """Return what `kprof cost` says when it refuses."""
    assert kprof("cost", *words, *DAY) == 2
    return capsys.readouterr().err
