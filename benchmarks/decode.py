"""Whole-model decoding beside `generate` of Hugging Face, on one GPU, in one run.

python benchmarks/decode.py [MODEL ...] [--check | --tune | --fidelity] [--compiled]

Models have real configurations and random weights. Time per token is that of CUDA graphs behind a
prompt of 128 tokens; time to 64 tokens is that of `generate`, from the call until the host has the
last token. A share of read is a share of the rate at which torch adds up 4 GiB in the same process.
--check compares with the model on this GPU; --tune times each kernel and each tiling; --fidelity
compares logits at 10,000 positions of a model that has learnt a little with those in float64.
--long checks the tokens of a long conversation; --sanitize runs compute-sanitizer over a tiny one.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch
import transformers
from evidence import RESULTS, row, write_evidence

from kprof.kernels.decode import _engine, _reference
from kprof.kernels.decode._engine import Engine, Sampling, Tiling
from kprof.kernels.decode._model import decoder_of
from kprof.kernels.decode.decode import Decoding, generate

SOURCES = ("benchmarks/decode.py", "code/kprof/kernels/decode")
PROMPT, TOKENS = 128, 64
READ_BYTES = 4 << 30
REPLAYS, REPEATS = 12, 5
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}


def shape(hidden, inner, layers, heads, key_heads, dim, vocabulary, **others):  # noqa: PLR0913
    """Return the arguments of a configuration."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32_768,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        **others,
    }


# Configurations as published with the weights.
MODELS = {
    "llama-3.2-1b": (
        "Llama",
        shape(
            *(2_048, 8_192, 16, 32, 8, 64, 128_256),
            tie_word_embeddings=True,
            rope_parameters=LLAMA3,
        ),
    ),
    "qwen2.5-1.5b": (
        "Qwen2",
        shape(*(1_536, 8_960, 28, 12, 2, 128, 151_936), tie_word_embeddings=True),
    ),
    "qwen2.5-0.5b": (
        "Qwen2",
        shape(*(896, 4_864, 24, 14, 2, 64, 151_936), tie_word_embeddings=True),
    ),
    "qwen3-0.6b": (
        "Qwen3",
        shape(*(1_024, 3_072, 28, 16, 8, 128, 151_936), tie_word_embeddings=True),
    ),
    "smollm2-1.7b": (
        "Llama",
        shape(*(2_048, 8_192, 24, 32, 32, 64, 49_152), tie_word_embeddings=True),
    ),
    "llama-3.1-8b": (
        "Llama",
        shape(*(4_096, 14_336, 32, 32, 8, 128, 128_256), rope_parameters=LLAMA3 | {"factor": 8.0}),
    ),
    "mistral-7b": (
        "Mistral",
        shape(*(4_096, 14_336, 32, 32, 8, 128, 32_768), sliding_window=None),
    ),
    "gemma-2b": (
        "Gemma",
        shape(*(2_048, 16_384, 18, 8, 1, 256, 256_000), tie_word_embeddings=True),
    ),
}
# us per token, and ms to 64 tokens, on an H100.
REACHES = {"llama-3.2-1b": (979, 70), "qwen2.5-1.5b": (None, 90)}
TINY = shape(256, 512, 2, 8, 2, 64, 1_000)


def model_of(name, dtype=torch.bfloat16, **changes):
    """Return a model with random weights on the GPU."""
    family, arguments = MODELS[name]
    return build(family, dtype, **{**arguments, **changes})


def build(family, dtype, seed=0, **arguments):
    """Return a model of a family."""
    config = getattr(transformers, f"{family}Config")(**arguments)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("cuda"):
            model = getattr(transformers, f"{family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    for one in model.parameters():
        # So that norms and biases do something.
        if one.dim() == 1:
            one.data.add_(0.1 * torch.randn_like(one))
    return model.eval()


def prompts(model, batch=1, count=PROMPT):
    """Return random prompts."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size, (batch, count), generator=generator).cuda()


def read_rate():
    """Return bytes a second of reading, the best of several."""
    x = torch.ones(READ_BYTES // 4, device="cuda")
    x.sum()
    return max(READ_BYTES / seconds(lambda: x.sum(), 1) for _ in range(10))


def seconds(work, count):
    """Return the seconds of `count` calls on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def captured(work):
    """Return the replay of a graph of some launches."""
    work()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        work()
    return graph.replay


def us_per_token(engine, tokens, sampling=_engine.GREEDY):
    """Return the median time of a token behind the prompt, in graphs."""
    found = []
    with engine.on_stream():
        for _ in range(REPEATS):
            engine.begin(tokens, None, [], 0)
            engine.run(_engine.STEPS_OF_GRAPH, sampling)
            steps = REPLAYS * _engine.STEPS_OF_GRAPH
            found.append(seconds(lambda: engine.run(steps, sampling), 1) / steps)  # noqa: B023
    engine.stream.synchronize()
    return 1e6 * statistics.median(found)


# Correctness


def check(names):
    """Compare with the model: tokens in float32, and errors of logits in bfloat16."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in names:
        check_logits(name)
    for family in ("Qwen2", "Llama", "Mistral", "Qwen3", "Gemma", "Gemma2"):
        check_tokens(family)


def check_tokens(family):
    """Compare greedy tokens of `generate` in float32."""
    model = build(family, torch.float32, **TINY)
    for one in model.parameters():
        if one.dim() == 2:
            one.data.mul_(4)
    tokens = prompts(model, 3, 70)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 100, "do_sample": False}
    expected = model.generate(tokens, **asked)
    notes = []
    decoding = Decoding(decoder_of(model))
    found = generate(model, model.generate, decoding, notes.append, tokens, **asked)
    again = generate(model, model.generate, decoding, notes.append, tokens, **asked)
    stops = [int(expected[0, 90]), int(expected[1, 120]), int(expected[2, 80])]
    asked |= {"eos_token_id": stops}
    stopped = model.generate(tokens, **asked)
    found_stopped = generate(model, model.generate, decoding, notes.append, tokens, **asked)
    print(
        f"check {family:8} float32 tokens equal: {torch.equal(expected, found)}, "
        f"again: {torch.equal(found, again)}, with stops: {torch.equal(stopped, found_stopped)} "
        f"({stopped.shape[1]} tokens), distinct: {expected[:, 70:].unique().numel()}, "
        f"notes {set(notes)}",
        flush=True,
    )


# Answers of a conversation, and new tokens of each: more than 10,000.
ANSWERS, ANSWER_TOKENS = 4, 2_600


def check_long():
    """Compare the greedy tokens of a long conversation in float32, answer by answer."""
    model = build("Qwen3", torch.float32, **TINY)
    decoding = Decoding(decoder_of(model))
    tokens = prompts(model, 1, 16)
    for number in range(ANSWERS):
        asked = asked_for(tokens) | {"max_new_tokens": ANSWER_TOKENS}
        expected = model.generate(tokens, **asked)
        notes = []
        found = generate(model, model.generate, decoding, notes.append, tokens, **asked)
        others = (expected != found)[0].nonzero()
        line = f"answer {number}, {expected.shape[1]} tokens: equal {not len(others)}"
        if len(others):
            # Rounding decides between tokens that are as likely.
            place = int(others[0])
            with torch.no_grad():
                best = model(expected[:, :place]).logits[0, -1].topk(2).values
            line += f" up to {place}, where the model's own margin is {best[0] - best[1]:.2g}"
        print(f"check long {line}, notes {set(notes)}", flush=True)
        tokens = expected


def decode_a_little():
    """Decode with a tiny model, by launches and by graphs: short enough for compute-sanitizer."""
    for batch in (1, 2, 8):
        decoder = decoder_of(build("Qwen3", torch.bfloat16, **TINY))
        engine = Engine(decoder, batch, 512)
        tokens = torch.randint(3, 1_000, (batch, 300)).cuda()
        with engine.on_stream():
            engine.begin(tokens, None, [], 0)
            for sampling in (_engine.GREEDY, Sampling(True, top_k=50, top_p=0.95)):
                engine.step(sampling)
                engine.run(_engine.STEPS_OF_GRAPH, sampling)
        engine.stream.synchronize()
        print(f"decoded, batch {batch}", flush=True)


def sanitize():
    """Run each tool of compute-sanitizer over a tiny model; print its last lines."""
    for tool in ("memcheck", "racecheck", "synccheck"):
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
        done = subprocess.run(
            [*command, __file__, "--little"], capture_output=True, text=True, check=False
        )
        told = (done.stdout + done.stderr).strip().splitlines()[-12:]
        print(f"sanitize {tool}: exit code {done.returncode}", *told, sep="\n  ", flush=True)


def check_logits(name):
    """Compare logits behind a prompt with the model's, both against float32."""
    model = model_of(name)
    decoder = decoder_of(model)
    wide = copy.deepcopy(model).float()
    for batch in (1, 2, 8):
        tokens = prompts(model, batch, 300)
        engine = Engine(decoder, batch, 512)
        # Whatever lies behind the last key must not matter.
        engine.keys.fill_(float("nan"))
        engine.values.fill_(float("nan"))
        with engine.on_stream():
            engine.begin(tokens, None, [], 0)
            engine.keys[:, :, :, 299:].fill_(float("nan"))
            engine.values[:, :, :, 299:].fill_(float("nan"))
            engine.step(Sampling(is_sampled=True))
        engine.wait()
        with torch.no_grad():
            own = model(tokens, logits_to_keep=1).logits[:, -1].float()
            truth = wide(tokens, logits_to_keep=1).logits[:, -1]
        errors = [((one - truth).norm() / truth.norm()).item() for one in (engine.logits, own)]
        # The graphs against launches one by one.
        decoded = []
        for is_graph in (True, False):
            engine = Engine(decoder, batch, 512)
            with engine.on_stream():
                engine.begin(tokens, None, [], 0)
                if is_graph:
                    engine.run(24)
                else:
                    for _ in range(24):
                        engine.step()
            engine.stream.synchronize()
            decoded.append((engine.tokens[:, :24] & 0xFFFFFFFF).clone())
        print(
            f"check {name} bfloat16 batch {batch}: error {errors[0]:.2e}, of the model "
            f"{errors[1]:.2e}; graphs = launches: {torch.equal(*decoded)}",
            flush=True,
        )


# Fidelity

SEQUENCES, LENGTH = 10, 1_000
STEPS_OF_LEARNING = 60
# KL divergence that is no difference, in nats.
FLOOR_NATS = 1e-6


def texts(vocabulary, rows, count, seed):
    """Return sequences of a language of a few thousand words, each with few that may follow it."""
    generator = torch.Generator().manual_seed(7)
    words = min(4_096, vocabulary)
    followers = torch.randint(words, (words, 4), generator=generator)
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([0.6, 0.25, 0.1, 0.05])
    chosen = torch.multinomial(shares, rows * count, True, generator=generator).view(rows, count)
    tokens = torch.randint(words, (rows, count), generator=generator)
    for place in range(1, count):
        tokens[:, place] = followers[tokens[:, place - 1], chosen[:, place]]
    return tokens.cuda()


def learn(model):
    """Train for a few steps, so that logits are peaked; return the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    model.train()
    for step in range(STEPS_OF_LEARNING):
        tokens = texts(model.config.vocab_size, 16, 256, 100 + step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    del optimizer
    torch.cuda.empty_cache()
    model.eval()
    return loss.item()


def fidelity(name):
    """Yield rows: KL divergence from float64, of the kernels and of the model, teacher-forced."""
    model = model_of(name)
    loss = learn(model)
    decoder = decoder_of(model)
    wide = copy.deepcopy(model).double()
    engine = Engine(decoder, 1, LENGTH + 1)
    found = []
    for tokens in texts(model.config.vocab_size, SEQUENCES, LENGTH + 1, 5).split(1):
        with torch.no_grad():
            truth = wide(tokens[:, :-1]).logits[0].log_softmax(-1)
            own = model(tokens[:, :-1]).logits[0]
        with engine.on_stream():
            engine.begin(tokens[:, :1], None, [], 0)
            for place in range(LENGTH):
                engine.copy.copy_(forced := _reference.embedded(tokens[:, place], decoder))
                engine.residual.copy_(forced)
                engine.run(1, Sampling(is_sampled=True))
                found.append(
                    divergences(truth[place], (engine.logits[0], own[place]), tokens[0, place + 1])
                )
        engine.stream.synchronize()
    del wide
    told = torch.stack(found).double().cpu()
    names = ("kl", "own_kl", "nll", "own_nll", "true_nll", "is_same", "own_is_same", "margin")
    of = dict(zip(names, told.T, strict=True))
    excess = upper_bound(of["kl"] - 1.05 * of["own_kl"])
    yield row(f"{name}-training-loss", loss, "nats", "lower")
    yield row(f"{name}-kl", of["kl"].mean().item(), "nats", "lower", positions=len(told))
    yield row(f"{name}-kl-of-the-model", of["own_kl"].mean().item(), "nats", "lower")
    yield row(f"{name}-kl-excess-upper-bound", excess, "nats", "lower", reach=FLOOR_NATS)
    difference = upper_bound(of["nll"] - of["own_nll"])
    yield row(f"{name}-nll-difference-upper-bound", difference, "nats", "lower", reach=1e-3)
    yield row(f"{name}-nll", of["true_nll"].mean().item(), "nats", "lower")
    same, own_same = of["is_same"].mean().item(), of["own_is_same"].mean().item()
    yield row(f"{name}-top1-agreement", same, "share", "higher", reach=0.995, of_model=own_same)
    margins = of["margin"][of["is_same"] == 0]
    largest = margins.max().item() if len(margins) else 0.0
    yield row(f"{name}-largest-margin-of-a-flip", largest, "nats", "lower", flips=len(margins))


def divergences(truth, logits, target):
    """Return KL divergences, losses and agreement of two sets of logits, as one tensor."""
    logs = [one.double().log_softmax(-1) for one in logits]
    kl = [(truth.exp() * (truth - one)).sum() for one in logs]
    nll = [-one[target] for one in logs]
    best = truth.argmax()
    same = [(one.argmax() == best).double() for one in logs]
    margin = truth[best] - truth[logs[0].argmax()]
    return torch.stack([*kl, *nll, -truth[target], *same, margin])


def upper_bound(values):
    """Return the upper 95 % bound of a mean, over sequences as they are independent."""
    means = values.view(SEQUENCES, -1).mean(1)
    # Student's t at 95 %, one-sided, of 9 degrees of freedom.
    return (means.mean() + 1.833 * means.std() / SEQUENCES**0.5).item()


# Tilings


def candidates(kind, columns):
    """Yield tilings of a kernel."""
    num_weights = 2 if kind == "gated" else 1
    for warps in (2, 4, 8, 16) if columns > 4_096 else (2, 4, 8):
        for rows in (1, 2, 4, 8, 16):
            tiling = Tiling(rows, warps, ahead=1)
            chunks = tiling.num_chunks(columns)
            loads = rows * chunks * num_weights
            if not 8 <= loads <= 32 or 256 * warps > 2 * columns:
                continue
            if kind != "head":
                yield replace(tiling, ahead=chunks)
                continue
            for tiles in (1, 2, 4, 8):
                ahead = chunks * (2 if tiles > 1 and loads <= 8 else 1)
                yield replace(tiling, ahead=ahead, tiles=tiles)


def tune(name):
    """Time each kernel alone and each tiling, alone and in a token; print what is best."""
    model = model_of(name)
    decoder = decoder_of(model)
    tokens = prompts(model)
    engine = Engine(decoder, 1, 512)
    rate = read_rate()
    num_bytes = decoder.bytes_per_token(192)
    whole_us = us_per_token(engine, tokens)
    print(f"read {rate / 1e9:.0f} GB/s; {num_bytes / 1e9:.3f} GB a token")
    print(f"token: {whole_us:.1f} us, {num_bytes / whole_us * 1e6 / rate:.3f} of read")
    ablations(decoder, tokens)
    best = engine.tilings
    for kind in ("gated", "down", "head", "qkv", "o"):
        whole_us, best = tune_one(decoder, kind, tokens, whole_us, best)
    print(f"best: {whole_us:.1f} us, {num_bytes / whole_us * 1e6 / rate:.3f} of read: {best}")


def tune_one(decoder, kind, tokens, whole_us, best):
    """Print the times of a kernel's tilings; return the best time of a token and its tilings."""
    found = []
    for tiling in candidates(kind, columns_of(decoder, kind)):
        try:
            one = Engine(decoder, 1, 512, best._replace(**{kind: tiling}))
            gb_s = alone(one, kind)
            found.append((us_per_token(one, tokens), gb_s, tiling))
        except Exception as error:  # noqa: BLE001
            print(f"  {kind} {tiling}: {type(error).__name__} {str(error)[:100]}")
    found.sort(key=lambda one: one[0])
    for us, gb_s, tiling in found[:6]:
        print(f"  {kind:6} {us:8.1f} us a token, {gb_s:6.0f} GB/s alone, {tiling}", flush=True)
    us, gb_s, tiling = max(found, key=lambda one: one[1])
    print(f"  {kind:6} fastest alone: {gb_s:.0f} GB/s, {tiling}, {us:.1f} us")
    us, _, tiling = found[0]
    return (us, best._replace(**{kind: tiling})) if us < whole_us else (whole_us, best)


def columns_of(decoder, kind):
    """Return the inputs of a kernel."""
    attended = decoder.heads * decoder.group * decoder.dim
    return {"down": decoder.inner, "o": attended}.get(kind, decoder.hidden)


def alone(engine, kind):
    """Return the GB/s of one kernel, over the weights of all layers in turn."""
    layers, tilings = engine.decoder.layers, engine.tilings
    calls = {
        "qkv": engine.launch_qkv,
        "gated": engine.launch_gated,
        "o": lambda layer: engine.launch_added(layer.o, engine.attended, tilings.o),
        "down": lambda layer: engine.launch_added(layer.down, engine.gated, tilings.down),
    }
    names = {"qkv": ("q", "k", "v"), "gated": ("gate", "up"), "o": ("o",), "down": ("down",)}
    if kind == "head":
        head = engine.decoder.head.weight
        num_bytes = head.numel() * head.element_size()
        work = lambda: engine.launch_head(keeps_logits=False)  # noqa: E731
    else:
        weights = [getattr(layer, one).weight for layer in layers for one in names[kind]]
        num_bytes = sum(one.numel() * one.element_size() for one in weights)

        def work():
            for layer in layers:
                calls[kind](layer)

    with engine.on_stream():
        engine.copy.normal_()
        engine.residual.normal_()
        engine.attended.normal_()
        engine.gated.normal_()
        replay = captured(work)
        replay()
        found = [seconds(replay, 10) / 10 for _ in range(3)]
    return num_bytes / statistics.median(found) / 1e9


def ablations(decoder, tokens):
    """Print the time of a token without one of its parts, and in other ways."""
    nothing = lambda *args, **kwargs: None  # noqa: E731
    for name in ("qkv", "attention", "added", "gated", "head", "next"):
        engine = Engine(decoder, 1, 512)
        engine.candidates.zero_()
        engine.best.zero_()
        setattr(engine, f"launch_{name}", nothing)
        print(f"  without {name:10} {us_per_token(engine, tokens):8.1f} us", flush=True)
    engine = Engine(decoder, 1, 512)
    engine.pdl = False
    print(f"  without dependent launch {us_per_token(engine, tokens):8.1f} us")
    least = _engine.LEAST_KEYS
    for _engine.LEAST_KEYS in (64, 128, 512):
        us = us_per_token(Engine(decoder, 1, 512), tokens)
        print(f"  splits of {_engine.LEAST_KEYS} keys {us:8.1f} us", flush=True)
    _engine.LEAST_KEYS = least
    before = _engine.STEPS_OF_GRAPH
    for steps in (1, 4, 16):
        _engine.STEPS_OF_GRAPH = steps
        engine = Engine(decoder, 1, 512)
        print(f"  {steps:2} steps a graph {us_per_token(engine, tokens):8.1f} us", flush=True)
    _engine.STEPS_OF_GRAPH = before


# Measurements


def measure(name, args):
    """Yield the rows of a model, the most wanted first, until the time is over."""
    model = model_of(name)
    decoder = decoder_of(model)
    tokens = prompts(model)
    rate = read_rate()
    token_reach, first_reach = REACHES.get(name, (None, None))
    us = us_per_token(Engine(decoder, 1, 512), tokens)
    share = decoder.bytes_per_token(PROMPT + 64) / us * 1e6 / rate
    yield row(f"{name}-us-per-token", us, "us", "lower", reach=token_reach)
    yield row(f"{name}-share-of-read", share, "of read", "higher", gb_s=rate / 1e9)
    middle_ms = yield from measure_first(name, model, tokens, args, first_reach)
    yield from measure_batches(name, model, decoder)
    yield from measure_peers(name, model, tokens, args, middle_ms)
    yield from measure_contexts(name, model, decoder, rate)


def measure_batches(name, model, decoder):
    """Yield the rows of batches, and of sampling."""
    for batch in (1, 8):
        error = difference(model, decoder, batch)
        yield row(f"{name}-batch{batch}-difference-from-the-model", error, "relative L2", "lower")
    for batch in (8, 4, 2):
        us = us_per_token(Engine(decoder, batch, 512), prompts(model, batch))
        yield row(f"{name}-batch{batch}-us-per-step", us, "us", "lower")
    for batch in (8, 4):
        plain = Engine(decoder, batch, 512, _engine.tilings_of(decoder, batch, uses_dots=False))
        us = us_per_token(plain, prompts(model, batch))
        yield row(f"{name}-batch{batch}-without-tensor-cores-us-per-step", us, "us", "lower")
    sampling = Sampling(is_sampled=True, temperature=0.8, top_k=50, top_p=0.95)
    us = us_per_token(Engine(decoder, 1, 512), prompts(model), sampling)
    yield row(f"{name}-sampled-us-per-token", us, "us", "lower")


def measure_contexts(name, model, decoder, rate):
    """Yield the rows of longer contexts."""
    for context in (2_048, 8_192):
        engine = Engine(decoder, 1, context + 512)
        us = us_per_token(engine, prompts(model, 1, context))
        share = decoder.bytes_per_token(context + 64) / us * 1e6 / rate
        yield row(f"{name}-{context}-us-per-token", us, "us", "lower", share=share)


def difference(model, decoder, batch):
    """Return the relative difference of the logits behind a prompt from those of the model."""
    tokens = prompts(model, batch, 300)
    engine = Engine(decoder, batch, 512)
    with engine.on_stream():
        engine.begin(tokens, None, [], 0)
        engine.step(Sampling(is_sampled=True))
    engine.wait()
    with torch.no_grad():
        own = model(tokens, logits_to_keep=1).logits[:, -1].float()
    return ((engine.logits - own).norm() / own.norm()).item()


def asked_for(tokens):
    """Return the arguments of `generate`."""
    return {
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }


def measure_first(name, model, tokens, args, reach):
    """Yield the rows of the time to 64 tokens; return its median in milliseconds."""
    asked = asked_for(tokens)
    notes = []
    decoding = Decoding(decoder_of(model))
    ours = functools.partial(generate, model, model.generate, decoding, notes.append)
    found = times_ms(lambda: ours(tokens, **asked), args.runs)
    middle, worst = percentile(found, 50), percentile(found, 99)
    noted = {"notes": sorted(set(notes)), "runs": len(found)}
    yield row(f"{name}-ms-to-64-tokens-p50", middle, "ms", "lower", reach=reach, **noted)
    yield row(f"{name}-ms-to-64-tokens-p99", worst, "ms", "lower", runs=len(found))
    joules = joules_of(lambda: ours(tokens, **asked))
    yield row(f"{name}-joules-per-token", joules, "J", "lower")
    return middle


def measure_peers(name, model, tokens, args, middle):
    """Yield the rows of the time to 64 tokens beside `generate` as it is."""
    asked = asked_for(tokens)
    eager = percentile(times_ms(lambda: model.generate(tokens, **asked), 3), 50)
    peer = {"peer": "generate", "peer_value": eager}
    yield row(f"{name}-ms-to-64-tokens-against-eager", middle, "ms", "lower", **peer)
    if args.compiled:
        static = {**asked, "cache_implementation": "static"}
        compiled = percentile(times_ms(lambda: model.generate(tokens, **static), 10), 50)
        peer = {"peer": "generate, static cache, compiled", "peer_value": compiled}
        yield row(f"{name}-ms-to-64-tokens-against-compiled", middle, "ms", "lower", **peer)


def times_ms(work, count):
    """Return the milliseconds of calls, after some that warm up, until the host has the tokens."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        work().tolist()
        found.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
    return found


def percentile(values, percent):
    """Return a percentile: the smallest value that so many percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def joules_of(work):
    """Return the energy of a token by NVML, over three seconds; None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        begin_mj, count = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), 0
        ends_s = time.monotonic() + 3
        while time.monotonic() < ends_s:
            work().tolist()
            count += TOKENS
        return (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - begin_mj) / 1e3 / count
    except Exception as error:  # noqa: BLE001
        print(f"energy: {type(error).__name__} {str(error)[:100]}")
        return None


def is_done_without_results(args):
    """Do the work that writes no results, and return whether any was asked for."""
    works = {
        "check": lambda: check(args.models),
        "tune": lambda: [tune(name) for name in args.models],
        "long": check_long,
        "sanitize": sanitize,
        "little": decode_a_little,
    }
    asked = [work for name, work in works.items() if getattr(args, name)]
    for work in asked:
        work()
    return bool(asked)


def main():
    """Check, tune or measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["llama-3.2-1b"], metavar="MODEL")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--long", action="store_true", help="check 10,400 tokens in four answers")
    parser.add_argument("--sanitize", action="store_true", help="run compute-sanitizer's tools")
    parser.add_argument("--little", action="store_true", help="decode with a tiny model, no more")
    parser.add_argument("--fidelity", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="beside the compiled peer, too")
    parser.add_argument(
        "--seconds", type=float, default=600, help="begin no row of a model after these"
    )
    parser.add_argument("--runs", type=int, default=500, help="calls of generate")
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    if is_done_without_results(args):
        return
    what = "decode_fidelity" if args.fidelity else "decode"
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    for name in args.models:
        ends_s = time.monotonic() + args.seconds
        path, rows = RESULTS / f"{what}_{name}_h200_{month}.json", []
        written_s = time.monotonic()
        for one in fidelity(name) if args.fidelity else measure(name, args):
            rows.append(one)
            told = {key: one[key] for key in ("ratio", "reach", "met") if one[key] is not None}
            print(f"{one['name']:48} {one['value']} {one['unit']} {told}", flush=True)
            if time.monotonic() > ends_s:
                break
            # Now and then, as the time on a GPU may end.
            if time.monotonic() > written_s + 2:
                with contextlib.redirect_stdout(None):
                    write_evidence(path, what, rows, SOURCES, commit=args.commit)
                written_s = time.monotonic()
        write_evidence(path, what, rows, SOURCES, commit=args.commit)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
