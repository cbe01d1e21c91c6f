"""Secrets and identities: what is found, what stays, and that no output shows a secret."""

import json
import random
from pathlib import Path

import pytest

from kprof.cli import run_command_line
from kprof.commands.report import write_partner_report
from kprof.report.partner.evidence import Evidence
from kprof.report.redaction import redacted, redacted_json, without_identities, without_secrets
from kprof.storage import save
from kprof.trace import Caveat
from tests.report.partner_evidence import finding_of, run_of
from tests.secrets_drawn import (
    HELD_OUT_IDENTITIES,
    HELD_OUT_SECRETS,
    IDENTITIES,
    PLACES_OF_IDENTITIES,
    PLACES_OF_SECRETS,
    SECRETS,
    Source,
    drawn,
)

HARMLESS = Path(__file__).parents[1] / "data" / "harmless_commands.tsv"
PIECE = 8


def survives(shown, hidden):
    """Tell whether a text shows a hidden value, or a piece of it that could not be a word."""
    pieces = {hidden[at : at + PIECE] for at in range(max(1, len(hidden) - PIECE + 1))}
    return hidden in shown or any(piece in shown for piece in pieces if not piece.isalpha())


def recall(kinds, clean):
    """Return the share of hidden values of which nothing is left, and the kinds that fail."""
    found = [
        (one.kind, any(survives(clean(one.text), hidden) for hidden in one.hidden))
        for one in drawn(kinds)
    ]
    return 1 - sum(leaks for _, leaks in found) / len(found), {
        kind for kind, leaks in found if leaks
    }


@pytest.mark.parametrize("kinds", [SECRETS, HELD_OUT_SECRETS], ids=["known", "held out"])
def test_of_100_secrets_98_are_hidden(kinds):
    share, failing = recall(kinds, without_secrets)
    assert share >= 0.98, failing


@pytest.mark.parametrize("kinds", [IDENTITIES, HELD_OUT_IDENTITIES], ids=["known", "held out"])
def test_of_100_identities_98_are_hidden_from_partners(kinds):
    share, failing = recall(kinds, without_identities)
    assert share >= 0.98, failing


@pytest.mark.parametrize("kinds", [SECRETS, HELD_OUT_SECRETS], ids=["known", "held out"])
def test_what_hides_identities_hides_secrets_too(kinds):
    share, failing = recall(kinds, without_identities)
    assert share >= 0.98, failing


def test_the_texts_are_at_least_300_of_40_kinds_of_which_half_were_held_out():
    known, held_out = [*SECRETS, *IDENTITIES], [*HELD_OUT_SECRETS, *HELD_OUT_IDENTITIES]
    assert len(drawn({**SECRETS, **HELD_OUT_SECRETS})) >= 300
    assert len(held_out) >= len(known) >= 40


def test_of_300_harmless_commands_at_most_5_percent_are_altered():
    lines = [line.split("\t", 1)[1] for line in HARMLESS.read_text().splitlines()]
    altered = [line for line in lines if without_secrets(line) != line]
    assert len(lines) == 300
    assert len(altered) <= 15, altered


def test_what_was_cleaned_once_stays_as_it_is():
    for one in drawn({**SECRETS, **HELD_OUT_SECRETS}):
        once = without_secrets(one.text)
        assert without_secrets(once) == once


def test_a_password_is_hidden_in_every_place():
    passwords = {
        p: Source(p).choice(("swordfish", "hunter2", "Copper4821!")) for p in PLACES_OF_SECRETS
    }
    shown = [place for place, one in passwords.items() if one in without_secrets(place.format(one))]
    assert shown == []


def test_a_name_is_hidden_from_partners_in_every_place():
    texts = [place.replace("{}", "jweiss") for place in PLACES_OF_IDENTITIES]
    assert [text for text in texts if "jweiss" in without_identities(text)] == []


@pytest.mark.parametrize(
    ("draw", "least"),
    [
        (lambda s: s.chars(40), 0.98),
        (lambda s: s.chars(24), 0.93),
        (lambda s: s.base64(48), 0.94),
        (lambda s: s.url_base64(48), 0.94),
        (lambda s: s.hexadecimal(32), 0.98),
    ],
)
def test_random_characters_are_hidden_whatever_names_them(draw, least):
    source = Source(36)
    values = [draw(source) for _ in range(400)]
    hidden = [value not in without_secrets(f"python t.py --x {value} --lr 1") for value in values]
    assert sum(hidden) >= least * len(values)


HARMLESS_WORDS = [
    "pip install git+https://github.com/a/b@" + "3f2a" * 10,
    "git checkout " + "9c1e" * 10,
    "docker run image@sha256:" + "0a1b" * 16,
    "--revision=" + "7d3f" * 10 + " --lr 1",
    "python train.py --mesh 4096x28672x4096x1-deep-gemm --plan 128x32x8x1x2048x128",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize256x128x64_warpgroupsize2x1x1_execute",
    "_ZN5aiter15add_norm_kernelIDF16bDF16bLi256EEEvPT0_",
    "triton_per_fused_native_layer_norm_0d1d2d3d4d5d6d7de8de9de",
    "vllm serve Qwen/Qwen2.5-VL-72B-Instruct-GPTQ-Int4 --api-key $VLLM_API_KEY",
    "HF_TOKEN=${HF_TOKEN} python train.py --token <your_token> --password-file /run/secrets/db",
    "--max-tokens 64 --stop-token-ids 2 --tokenizer-path a/b --pass-through --auth none",
    "PWD=/root/kprof python -m pytest -p no:cacheprovider",
    "srun -p a100-80gb --pty bash",
    "/tmp/torchinductor_root/x5/cx5xk3v7q2n4m6p7t2y5w3z6a7b2c4d6e7f2g3h5j6k7m2n4p5q.py:40",
]


def test_revisions_digests_kernels_places_and_variables_stay():
    assert [without_secrets(text) for text in HARMLESS_WORDS] == HARMLESS_WORDS


NOBODYS_NAMES = [
    "pass@16 and recall@10 of model@v2, at::native::add, x[1::2], dead::beef",
    "nvidia-cudnn-cu12==9.1.0.70 --host 0.0.0.0 --addr 127.0.0.1:8000 --server localhost",
    "--num-prompts 100 --prompt-len 512 --max-prompt-length=64 --user-batch 4",
    "12:30:45 2026-11-26T12:30:45 16:9 a:b:c",
]


def test_versions_counts_times_and_this_machine_stay_on_partner_pages():
    assert [without_identities(text) for text in NOBODYS_NAMES] == NOBODYS_NAMES


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ssh alice@gpu7 nvidia-smi", "ssh [left out] nvidia-smi"),
        ("--out /home/alice --name alice-7", "--out [left out] --name [left out]-7"),
        ("--cc anke.weiss@acme.com", "--cc [left out]"),
        ("--addr 10.0.0.7:29500", "--addr [host]:29500"),
        ("tell fd00:1234::1 of 52:54:00:12:34:56", "tell [host] of [host]"),
        ("CUDA_VISIBLE_DEVICES=GPU-" + "-".join("a1" * n for n in (4, 2, 2, 2, 6)),
         "CUDA_VISIBLE_DEVICES=[left out]"),
        ('--prompt "the \\"secret\\" deal" --n 1', "--prompt [left out] --n 1"),
        ("mpirun -H gpu1:8,gpu2:8 python t.py", "mpirun -H [host] python t.py"),
    ],
)  # fmt: skip
def test_partner_pages_say_that_something_was_left_out(text, shown):
    assert without_identities(text) == shown


def test_an_option_hides_the_word_after_it_in_a_list():
    words = ["python", "t.py", "--api-key", "two words", "--lr", "1", "-p", "8000"]
    assert redacted(words) == [*words[:3], "[left out]", *words[4:]]


def test_a_key_after_login_is_hidden_in_a_list_and_a_digest_alone_stays():
    digest = "3f2a" * 10
    assert redacted(["wandb", "login", digest]) == ["wandb", "login", "[left out]"]
    assert redacted(["source", digest]) == ["source", digest]


def test_a_name_hides_its_value_in_a_mapping_and_a_row_keeps_its_key():
    before = {"db_password": "river", "key": "rmsnorm/4096", "commit": "3f2a" * 10}
    assert redacted(before) == {**before, "db_password": "[left out]"}


def test_json_without_secrets_keeps_its_bytes():
    assert redacted_json(b'{"a": 1.50,\n "b": [1e3]}') == b'{"a": 1.50,\n "b": [1e3]}'


def test_random_text_never_fails_and_numbers_stay():
    draw = random.Random(7)
    alphabet = "ab1-=:@%/\\\"' \n$.,{}[]&;GtokenpasskeyAI"
    texts = ["".join(draw.choices(alphabet, k=80)) for _ in range(300)]
    for text in texts:
        without_identities(text)
    assert redacted({"share": 0.5, "n": [1, 2], "none": None}) == {
        "share": 0.5, "n": [1, 2], "none": None,
    }  # fmt: skip


@pytest.fixture(name="secret")
def a_secret():
    return Source(5).chars(32)


@pytest.fixture(name="run")
def a_run_with_a_secret(tmp_path, secret, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("python", "train.py", "--api-key", secret, "--lr", "1")
    caveats = (Caveat("recorder", f"could not reach https://bob:{secret}@files/a"),)
    folder = tmp_path / "a.kprof"
    folder.mkdir()
    save(run_of(finding_of(), command=command, caveats=caveats), folder)
    return folder


def outputs(run, capfdbinary, *options):
    """Return what `kprof open` prints, as text and as JSON, and the files beside it."""
    for form in ([], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            run_command_line(["open", str(run), "--out", f"b{len(form)}.kprof", *form, *options])
        assert ended.value.code == 0
    printed = capfdbinary.readouterr()
    pages = [(Path(name) / file).read_text() for name in ("b0.kprof", "b1.kprof")
             for file in ("report.html", "summary.json", "terminal.json")]  # fmt: skip
    return [printed.out.decode(), printed.err.decode(), *pages]


@pytest.mark.slow
def test_open_shows_no_secret_in_terminal_json_or_report(run, secret, capfdbinary):
    shown = outputs(run, capfdbinary)
    assert not any(survives(text, secret) for text in shown)
    assert "--api-key [left out] --lr 1" in shown[2]
    assert '"--lr"' in shown[0]
    # The run folder itself keeps the command: kprof ncu starts it again.
    assert secret in Path("b0.kprof/meta.json").read_text()


@pytest.mark.slow
def test_show_secrets_shows_them_in_every_output(run, secret, capfdbinary):
    printed, _, page, summary, *_ = outputs(run, capfdbinary, "--show-secrets")
    assert secret in printed
    assert secret in page
    assert json.loads(summary)["command"][3] == secret


@pytest.mark.parametrize("level", ["internal", "partner", "public"])
def test_a_partner_page_shows_no_secret_and_no_identity(level, tmp_path):
    lines = [one for kinds in (SECRETS, HELD_OUT_SECRETS) for one in drawn(kinds, each=1)]
    people = [one for kinds in (IDENTITIES, HELD_OUT_IDENTITIES) for one in drawn(kinds, each=1)]
    caveats = tuple(Caveat("recorder", one.text) for one in [*lines, *people])
    write_partner_report(
        Evidence("T", runs=(run_of(caveats=caveats),)), tmp_path / "p.html", level=level
    )
    page = (tmp_path / "p.html").read_text()
    hidden = [*lines, *people] if level != "internal" else lines
    leaks = [one.kind for one in hidden if any(survives(page, each) for each in one.hidden)]
    assert len(leaks) <= 0.02 * len(hidden), leaks
