"""What a partner report leaves out: secrets, and outside the house hosts, paths and prompts."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

import pytest

from kprof.analyze.cost.facts import FIELDS, detail
from kprof.commands.report import write_partner_report
from kprof.report.partner.disclosure import LEVELS, Redactor
from kprof.report.partner.evidence import Evidence
from kprof.trace import Caveat
from tests.report.partner_evidence import (
    comparison_of,
    costs_of,
    everything,
    finding_of,
    level_of,
    run_of,
)
from tests.report.partner_pages import page_of

HOST = "gpu-node-17"
PATHS = ("/home/alice/secret_project/train.py", "/srv/models/llama", "C:\\Users\\alice\\run.bat")
PROMPT = "tell me about the merger"
USD = "7.7731"


def private(**more):
    """Return evidence that mentions a host, paths, a prompt and a price wherever it can."""
    command = f"{PATHS[0]} --data {PATHS[1]} --prompt '{PROMPT}' --price {USD}"
    facts = {"host": HOST, "command of A": command, "log": f"file://{PATHS[0]}", "at": PATHS[2]}
    return everything(
        runs=(
            run_of(
                finding_of(details=(f"{PATHS[0]}:12 forward",)),
                host=HOST,
                command=("python", PATHS[0], "--prompt", PROMPT),
                caveats=(
                    Caveat("recorder", f"{HOST} was busy; see {PATHS[1]}/log.txt"),
                    Caveat("recorder", f"a GPU-hour costs ${USD}"),
                ),
            ),
        ),
        comparisons=(
            comparison_of(
                facts=facts, a=command, doubts=(Caveat("host", f"{HOST} 10.1.2.3 was slow"),)
            ),
        ),
        service_levels=(level_of(doubts=(f"see {PATHS[0]} on {HOST}",)),),
        costs=(costs_of(USD, USD),),
        **more,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_evidence_gives_the_same_bytes(level, tmp_path):
    for name in ("first.html", "second.html"):
        write_partner_report(private(), tmp_path / name, level=level)
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "second.html").read_bytes()


@pytest.mark.parametrize("template", ["partner", "engineer"])
@pytest.mark.parametrize("level", ["partner", "public"])
def test_no_path_host_name_or_prompt_leaves_the_house(level, template):
    page = page_of(private(), level, template)
    for secret in ("alice", "/home", "/srv", "secret_project", HOST, "10.1.2.3", "merger"):
        assert secret not in page


@pytest.mark.parametrize("template", ["partner", "engineer"])
def test_no_price_is_public(template):
    page = page_of(private(), "public", template)
    assert "7.77" not in page
    assert "$" not in page[page.index("<body>") : page.index("<script>")]
    assert "price list" not in page


@pytest.mark.parametrize(
    "name", [name for name, one in FIELDS.items() if "$" in detail(one.type, "description")]
)
def test_every_input_in_dollars_is_hidden_from_the_public(name):
    field = name.rpartition(".")[2]
    clean = Redactor("public", Evidence("")).clean
    for text in (
        f"--{field.replace('_', '-')} {USD}",
        f"--{field.replace('_', '-')}={USD}",
        f"{field} = {USD}",
        f'{{"{field}": {USD}}}',
    ):
        assert USD not in clean(text)
        assert USD in Redactor("partner", Evidence("")).clean(text)


def test_the_partner_sees_prices_and_everything_is_shown_inside_the_house():
    assert "$7.77" in page_of(private(), "partner")
    page = page_of(private(), "internal")
    assert HOST in page
    assert PATHS[0] in page
    assert "merger" in page


def test_a_password_is_shown_nowhere():
    command = ("python", "t.py", "--api-key=hunter2", "DB_PASSWORD=hunter2", "--max-tokens", "64")
    for level in LEVELS:
        page = page_of(Evidence("T", runs=(run_of(command=command),)), level)
        assert "hunter2" not in page
        assert "--max-tokens 64" in page


NAMED_SECRETS = [
    ("--hf-token s3cret --lr 1", "--hf-token [left out] --lr 1"),
    ("--token=s3cret --wandb-key s3cret", "--token=[left out] --wandb-key [left out]"),
    ("--bearer s3cret --hub_token s3cret", "--bearer [left out] --hub_token [left out]"),
    ("--hfToken s3cret --token-2 s3cret", "--hfToken [left out] --token-2 [left out]"),
    (
        "--env WANDB_KEY=s3cret hub.token=s3cret",
        "--env WANDB_KEY=[left out] hub.token=[left out]",
    ),
    ("'--password=p s3cret' --lr 1", "'--password=[left out]' --lr 1"),
    ("--password 'p'\"'\"'q s3cret' --lr 1", "--password [left out] --lr 1"),
    ("-H 'Authorization: Bearer s3cret'", "-H 'Authorization: [left out]'"),
    ("['--hf-token', 's3cret', '--lr']", "['--hf-token', [left out], '--lr']"),
    ('{"hf_token": "s3cret", "lr": 1}', '{"hf_token": [left out], "lr": 1}'),
    ("bash -c 't.py --token s3cret' (or not)", "bash -c 't.py --token [left out]' (or not)"),
    ("through bob:s3cret@proxy7", "through [left out]@proxy7"),
    ("hf_AbCdEfGhIjKlMnOpQrStUvWx", "[left out]"),
    ("sk-proj-1234567890abcdef and", "[left out] and"),
    ("ghp_1234567890abcdefABCDEF.", "[left out]."),
]


@pytest.mark.parametrize("level", LEVELS)
def test_a_secret_is_shown_nowhere_however_it_is_named(level):
    clean = Redactor(level, Evidence("T")).clean
    assert [(text, clean(text)) for text, _ in NAMED_SECRETS] == NAMED_SECRETS
    assert [shown for _, shown in NAMED_SECRETS if clean(shown) != shown] == []


SCHEMES = ["postgres", "https", "redis"]


@pytest.mark.parametrize("level", LEVELS)
def test_who_logs_in_at_an_address_is_shown_nowhere(level):
    clean = Redactor(level, Evidence("T")).clean
    text = "--db {0}://bob:hunter2zz@db7/x see {0}://x.com/y?token=hunter2zz"
    shown = {scheme: clean(text.format(scheme)) for scheme in SCHEMES}
    assert [one for one in shown.values() if "hunter2zz" in one or "bob" in one] == []
    assert [one for one in shown.values() if " see " not in one] == []
    named = [scheme for scheme, one in shown.items() if f"{scheme}://[left out]@db7/x" in one]
    assert named == (SCHEMES if level == "internal" else [])


HARMLESS = [
    "--num-tokens 64 --max-new-tokens 64 --tokens-per-step 64 --tokens-per-step=auto",
    "--sort-key 64 --sort-key name --key 12 --token-budget 8k --use-auth-token --steps 3",
    "--eos-token EOS --tokenizer gpt2 --key-dtype fp8 --monkey patch --token-dispatcher any",
    "--observer minmax --num-hosts 4 --ghost-norm layer --curl big --pin-host-memory true",
    "time-to-first-token: missing, J/token = 3, per_token=P, key=lambda",
    "foo_token::bar<3>, secret.py:12, image:tag@sha256:12ab",
    "hf_transfer hf_quantizer hf_model_of_many_words sk-learn risk-of-1000-hours-or-more",
]


@pytest.mark.parametrize("level", LEVELS)
def test_what_merely_sounds_like_a_secret_or_a_host_stays(level):
    clean = Redactor(level, Evidence("T")).clean
    assert [clean(text) for text in HARMLESS] == HARMLESS


NAMED_HOSTS = [
    ("--master-addr node17zz --lr 1", "--master-addr [host] --lr 1"),
    ("--master_addr=node17zz --lr 1", "--master_addr=[host] --lr 1"),
    ("--rdzv-endpoint node18zz:29500", "--rdzv-endpoint [host]:29500"),
    ("--host node19zz.acme.com", "--host [host]"),
    ("--server gpu-node-17 --lr 1", "--server [host] --lr 1"),
    ("--url https://llm.acme-corp.com:8000/v1 --lr 1", "--url [host] --lr 1"),
    ("--base-url=https://llm.acme-corp.com:8000/v1", "--base-url=[host]"),
    ("MASTER_ADDR=node17zz python t.py", "MASTER_ADDR=[host] python t.py"),
    ("see https://llm.acme-corp.com:8000/v1", "see [left out]"),
]


@pytest.mark.parametrize("level", ["partner", "public"])
def test_what_an_option_names_as_a_host_is_known_in_the_house_alone(level):
    outside, inside = (Redactor(one, Evidence("T")).clean for one in (level, "internal"))
    assert [(text, outside(text)) for text, _ in NAMED_HOSTS] == NAMED_HOSTS
    assert [text for text, _ in NAMED_HOSTS if inside(text) != text] == []


def test_the_address_of_a_price_list_stays_where_it_is_the_source_of_a_price():
    costs = costs_of()
    lists = ("Cloud: https://lambda.ai/pricing?of=1",)
    evidence = everything(costs=(replace(costs, price=replace(costs.price, sources=lists)),))
    assert "Cloud: https://lambda.ai/pricing<" in page_of(evidence, "partner")
    assert "lambda.ai" not in page_of(evidence, "public")


@pytest.mark.parametrize("part", ["--token ", "a=", 'token="', "x:", "a:b@", "a+", "hf_", "sk-"])
def test_no_text_takes_long(part):
    begun = monotonic()
    Redactor("public", Evidence("T")).clean(part * 20_000)
    assert monotonic() - begun < 5


PATHS_SHOWN = [
    ("python /a/b/train.py --lr 0.1", "python train.py --lr 0.1"),
    ("open ~/runs/x.kprof, then ../y/z.json", "open x.kprof, then z.json"),
    ("see src/model/attention.py(12)", "see attention.py(12)"),
    ("5 tokens/s and and/or 3/4", "5 tokens/s and and/or 3/4"),
    ("/", "/"),
    ("throughput>=2000tok/s/gpu, 2026/11/20", "throughput>=2000tok/s/gpu, 2026/11/20"),
    (
        "--data team/models/llama meta-llama/Llama-3.2-1B",
        "--data llama meta-llama/Llama-3.2-1B",
    ),
    ("A=/x/y:/z/w", "A=y:w"),
    ("http://node7.cluster.local:80/x", "[left out]"),
    ("node7.cluster.local:8000", "[host]:8000"),
    ("https://me:word@cloud.com/x?key=1 https://a.com/x?key=1", "[left out] [left out]"),
    ("2 questions that nobody answers", "2 questions that nobody answers"),
    ("--prompt tell me all --steps 3", "--prompt [left out] --steps 3"),
    ("prompt='tell me' --steps 3", "prompt=[left out] --steps 3"),
    ("s3://bucket/customer", "[left out]"),
    ("P * overhead / (T * 3,600 / 10^6)", "P * overhead / (T * 3,600 / 10^6)"),
    ("https://lambda.ai/pricing", "[left out]"),
    (r"\\server\share\x.bin", "x.bin"),
]


def test_of_a_path_its_last_part_stays_and_what_is_none_stays_whole():
    clean = Redactor("partner", Evidence("T")).clean
    assert [(text, clean(text)) for text, _ in PATHS_SHOWN] == PATHS_SHOWN
