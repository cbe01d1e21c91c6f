"""Decoding by `generate` of Hugging Face: tokens, stops, streams, and what runs the original."""

import tests.kernel_interpreter  # noqa: F401, I001 - first, before anything imports Triton.

import string

import pytest
import torch

from kprof.errors import KprofError
from kprof.kernels.decode import _reference, decode
from kprof.kernels.decode._engine import Engine, Sampling, sampled, tiling_of, tilings_of
from kprof.kernels.decode._model import decoder_of
from kprof.kernels.decode.decode import Decoding
from kprof.kernels.swap.swapping import swapped
from tests.kernels.kernel_checks import INTERPRETED

transformers = pytest.importorskip("transformers")
pytestmark = INTERPRETED

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 40,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# An interpreted step takes as long as there are weights.
SMALLER = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
# Columns, and heads for each of keys, that are no power of two.
LARGER = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 3}
TWO_LAYERS = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1}
ONE_LAYER = {**TWO_LAYERS, "num_hidden_layers": 1}
IDS = torch.tensor([[0, 0, 0, 7, 3, 9, 21], [5, 30, 2, 8, 17, 11, 4]])
MASK = (IDS != 0).long()
GREEDY = {"attention_mask": MASK, "max_new_tokens": 3, "do_sample": False}


def made(kind="llama", seed=0, **options):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for one in model.parameters():
            # Large enough that tokens differ, and norms and biases do something.
            one.copy_(one * 4 if one.dim() > 1 else one + torch.randn_like(one) / 4)
    return model


def reasons_of(swap):
    return [call.why for site in swap.sites for call in site.calls]


class Kept:
    """A streamer that keeps everything."""

    def __init__(self):
        self.parts, self.is_ended = [], False

    def put(self, value):
        self.parts.append(value)

    def end(self):
        self.is_ended = True


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3, **LARGER}),
        ("llama", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {}),
        ("qwen3", {"num_attention_heads": 2, "num_key_value_heads": 2}),
        ("gemma", {}),
        ("gemma2", {"sliding_window": 4}),
    ],
)
def test_a_swapped_model_generates_the_same_tokens_behind_padding(kind, options):
    model = made(kind, **{**SMALLER, **options})
    wanted = model.generate(IDS, **GREEDY)
    with swapped(model, "decode") as swap:
        assert torch.equal(model.generate(IDS, **GREEDY), wanted)
    assert reasons_of(swap) == [None]
    assert "generate" not in model.__dict__


def test_a_sequence_that_stops_gets_padding_and_the_streamer_every_token():
    model = made(**ONE_LAYER)
    free = model.generate(IDS, **GREEDY)[:, IDS.shape[1] :]
    stop = int(free[0, 1])
    asked = {**GREEDY, "eos_token_id": stop, "pad_token_id": 1}
    wanted = model.generate(IDS, **asked)
    with swapped(model, "decode"):
        assert torch.equal(model.generate(IDS, **asked), wanted)
        streamer = Kept()
        alone = {"max_new_tokens": 4, "do_sample": False, "streamer": streamer}
        found = model.generate(IDS[1:], **alone)
    assert torch.equal(torch.cat([one.flatten() for one in streamer.parts]), found[0])
    assert len(streamer.parts) == 5
    assert streamer.is_ended


def test_calls_that_are_not_supported_run_the_original_with_the_reason():
    model = made("llama")
    others = (
        {"num_beams": 2},
        {"repetition_penalty": 1.5},
        {"return_dict_in_generate": True},
        {"position_ids": torch.arange(7).expand(2, -1)},
        {"past_key_values": transformers.DynamicCache()},
    )
    with swapped(model, "decode") as swap:
        for given in others:
            found = model.generate(IDS, **{**GREEDY, "max_new_tokens": 2, **given})
            assert len(getattr(found, "sequences", found)) == 2
    reasons = reasons_of(swap)
    assert len(set(reasons)) == len(others)
    assert all(reasons)


def test_a_model_with_other_weights_since_runs_the_original():
    model = made(**ONE_LAYER)
    asked = {**GREEDY, "max_new_tokens": 2}
    with swapped(model, "decode") as swap:
        model.generate(IDS, **asked)
        # In place: the kernels read the same memory.
        model.lm_head.weight.data.mul_(-1)
        found = model.generate(IDS, **asked)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone())
        model.generate(IDS, **asked)
    assert torch.equal(found, model.generate(IDS, **asked))
    assert reasons_of(swap).count(None) == 1
    assert len(reasons_of(swap)) == 2


def test_a_model_of_another_family_is_skipped():
    model = made("gpt2", n_embd=48, n_layer=1, n_head=2)
    with swapped(model, "decode") as swap:
        assert len(swap.skipped) == 1


def test_a_model_with_a_replaced_part_is_skipped():
    model = made("llama")
    model.model.layers[0].mlp.forward = lambda x: x
    with swapped(model, "decode") as swap:
        assert len(swap.skipped) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_many_keys_are_attended_to_in_parts_and_those_behind_the_last_never(dtype):
    model = made("llama").to(dtype)
    engine = Engine(decoder_of(model), batch=1, length=1_024)
    tokens = torch.randint(40, (1, 700), generator=torch.Generator().manual_seed(1))
    for cache in (engine.keys, engine.values):
        cache.fill_(float("nan"))
    engine.begin(tokens, None, [], 0)
    engine.step(Sampling(is_sampled=True))
    with torch.no_grad():
        wanted = model(tokens).logits[:, -1].float()
    error = (engine.logits - wanted).norm() / wanted.norm()
    assert error < {torch.float32: 1e-5, torch.float16: 5e-3}[dtype]
    assert engine.num_splits > 1


GEMMA = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        "final_logit_softcapping": 5.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        },
    },
}


@pytest.mark.parametrize("kind", GEMMA)
def test_gemma_with_caps_windows_and_four_norms_has_the_logits_of_hugging_face(kind):
    layers = ["sliding_attention", "full_attention"]
    options = {"sliding_window": 40, "query_pre_attn_scalar": 9, "layer_types": layers}
    model = made(kind, **options, **GEMMA[kind])
    model.set_attn_implementation("eager")
    engine = Engine(decoder_of(model), batch=1, length=512)
    tokens = torch.randint(40, (1, 300), generator=torch.Generator().manual_seed(1))
    engine.begin(tokens, None, [], 0)
    engine.step(Sampling(is_sampled=True))
    with torch.no_grad():
        wanted = model(tokens).logits[:, -1]
    assert (engine.logits - wanted).norm() / wanted.norm() < 1e-5


def test_samples_keep_to_the_most_likely_tokens_in_their_shares():
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.2, 0.1]])).expand(4_000, -1)
    torch.manual_seed(0)
    shares = torch.bincount(sampled(logits, Sampling(True)).flatten(), minlength=4) / 4_000
    assert torch.allclose(shares, torch.tensor([0.5, 0.2, 0.2, 0.1]), atol=0.03)
    assert set(sampled(logits, Sampling(True, top_k=1)).flatten().tolist()) == {0}
    assert set(sampled(logits, Sampling(True, top_p=0.5)).flatten().tolist()) == {0}
    assert 3 not in sampled(logits, Sampling(True, top_p=0.8))
    assert set(sampled(logits, Sampling(True, temperature=0.01)).flatten().tolist()) == {0}


def test_a_kernel_keeps_the_tokens_that_the_processors_of_hugging_face_keep():
    engine = Engine(decoder_of(made("llama", vocab_size=203)), batch=2, length=32)
    tokens = torch.randint(203, (2, 3), generator=torch.Generator().manual_seed(1))
    engine.begin(tokens, None, [], 0)
    logits = 3 * torch.randn(2, 203, generator=torch.Generator().manual_seed(2))
    size = engine.tilings.head.rows * engine.tilings.head.tiles
    padded = torch.nn.functional.pad(logits, (0, -203 % size), value=float("-inf"))
    engine.logits.copy_(logits)
    engine.best.copy_(padded.view(2, -1, size).amax(-1))
    processors = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(1.5),
            transformers.TopKLogitsWarper(6),
            transformers.TopPLogitsWarper(0.9),
        ]
    )
    is_kept = processors(None, logits).isfinite()
    found = torch.zeros_like(is_kept)
    for step in range(24):
        engine.state[:, 1] = step
        engine.launch_sample(Sampling(True, temperature=1.5, top_k=6, top_p=0.9))
        found.scatter_(1, engine.chosen.long(), True)
    assert not (found & ~is_kept).any()
    assert found.sum() >= 6
    assert (found.sum(dim=1) > 1).all()


def test_sampling_of_one_token_is_greedy():
    model = made(**ONE_LAYER)
    wanted = model.generate(IDS, **GREEDY)
    with swapped(model, "decode") as swap:
        found = model.generate(IDS, **{**GREEDY, "do_sample": True, "top_k": 1})
    assert torch.equal(found, wanted)
    assert reasons_of(swap) == [None]


@pytest.mark.parametrize("batch", [3, 8])
def test_tensor_cores_and_threads_have_the_same_logits(batch):
    decoder = decoder_of(made("qwen2"))
    tokens = torch.randint(40, (batch, 9), generator=torch.Generator().manual_seed(1))
    logits = []
    for uses_dots in (False, True):
        tilings = tilings_of(decoder, batch, uses_dots=uses_dots)
        engine = Engine(decoder, batch, 64, tilings)
        engine.begin(tokens, None, [], 0)
        engine.step(Sampling(is_sampled=True))
        logits.append(engine.logits)
    assert torch.allclose(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("outputs", "columns", "num_weights", "tiling"),
    [
        # Llama-3.2-1B: down and O.
        (2_048, 8_192, 1, (4, 8, 4)),
        (2_048, 2_048, 1, (8, 4, 2)),
        # Qwen2.5-1.5B: gate and up fill three chunks of 512; O has CTAs for all SMs.
        (8_960, 1_536, 2, (4, 2, 3)),
        (1_536, 1_536, 1, (4, 4, 2)),
    ],
)
def test_tilings_fill_registers_and_sms(outputs, columns, num_weights, tiling):
    found = tiling_of(outputs, columns, 132, num_weights=num_weights)
    assert (found.rows, found.warps, found.ahead) == tiling


class Interrupting(Kept):
    """A streamer whose reader leaves at the third part."""

    def put(self, value):
        super().put(value)
        if len(self.parts) == 3:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_call_that_is_interrupted_leaves_the_next_one_right():
    model = made("qwen3")
    wanted = model.generate(IDS, **GREEDY)
    alone = {"max_new_tokens": 6, "do_sample": False}
    with swapped(model, "decode") as swap:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model.generate(IDS[1:], **alone, streamer=Interrupting())
            assert torch.equal(model.generate(IDS, **GREEDY), wanted)
    assert reasons_of(swap) == [None]


def test_a_check_that_is_interrupted_is_done_again():
    decoding = Decoding(decoder_of(made()))

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoding.why_wrong(interrupted)
    assert decoding.why_wrong(made(seed=1)) is not None


def test_tokens_that_do_not_arrive_end_in_an_error(monkeypatch):
    model = made(**ONE_LAYER)
    with swapped(model, "decode"):
        expected = model.generate(IDS[1:], **SHORT)
        with monkeypatch.context() as patch:
            patch.setattr(decode, "PATIENCE_S", 0.01)
            patch.setattr(Engine, "arrived", lambda self, step: None)
            with pytest.raises(KprofError) as error:
                model.generate(IDS[1:], **SHORT)
        assert error.value.exit_code == 2
        assert torch.equal(model.generate(IDS[1:], **SHORT), expected)


def test_an_engine_whose_gpu_has_not_answered_is_not_used_again():
    decoding = Decoding(decoder_of(made()))
    engine = decoding.engine(1, 5)
    assert decoding.engine(1, 5) is engine
    engine.is_lost = True
    assert decoding.engine(1, 5) is not engine


def test_a_token_behind_32_000_others_attends_to_all_of_them():
    decoder = decoder_of(made(**ONE_LAYER))
    engine = Engine(decoder, batch=1, length=32_768)
    torch.manual_seed(0)
    for cache in (engine.keys, engine.values):
        cache[:, :, :, :32_000].normal_()
        cache[:, :, :, 32_000:].fill_(float("nan"))
    keys, values = engine.keys.clone(), engine.values.clone()
    token = torch.tensor([[7]])
    engine.begin(token, None, [], 0)
    engine.state[:, 0] = 32_000
    engine.step(Sampling(is_sampled=True))
    rotations = {None: decoder.rotations(32_768)}
    hidden = _reference.forward(decoder, token, keys, values, rotations, first=32_000)
    wanted = _reference.logits_of(hidden[:, -1], decoder)
    assert (engine.logits - wanted).norm() / wanted.norm() < 1e-4


@pytest.mark.slow
def test_many_tokens_over_several_answers_do_not_drift():
    model = made(**ONE_LAYER)
    tokens = IDS[1:]
    with swapped(model, "decode"):
        for count in (11, 3, 20):
            tokens = model.generate(tokens, max_new_tokens=count, do_sample=False)
    own = IDS[1:]
    for count in (11, 3, 20):
        own = model.generate(own, max_new_tokens=count, do_sample=False)
    assert torch.equal(tokens, own)


class Adapted(torch.nn.Module):
    """A linear layer with an adapter."""

    weight, bias = property(lambda self: self.base.weight), None

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return -self.base(x)


def negated(module):
    forward = module.forward
    module.forward = lambda x: -forward(x)


CHANGES = {
    "hook": lambda body: body.layers[0].mlp.register_forward_hook(lambda _, x, y: -y),
    "forward": lambda body: negated(body.layers[1].mlp),
    "adapter": lambda body: setattr(
        body.layers[0].mlp, "up_proj", Adapted(body.layers[0].mlp.up_proj)
    ),
    "weight": lambda body: setattr(
        body.layers[0].mlp.up_proj, "weight", torch.nn.Parameter(torch.randn(16, 16))
    ),
    "norm": lambda body: setattr(
        body.layers[1].input_layernorm, "weight", torch.nn.Parameter(torch.randn(16))
    ),
    "epsilon": lambda body: setattr(body.norm, "variance_epsilon", 5.0),
    "scale": lambda body: setattr(body.layers[1].self_attn, "scaling", 2.0),
    "activation": lambda body: setattr(body.layers[0].mlp, "act_fn", torch.nn.ReLU()),
    "no norm": lambda body: setattr(body, "norm", torch.nn.Identity()),
    "another norm": lambda body: setattr(body, "norm", torch.nn.LayerNorm(16)),
    "several layers": lambda body: setattr(
        body.layers[0].mlp, "down_proj", torch.nn.Sequential(body.layers[0].mlp.down_proj)
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_with_another_part_runs_its_own_loop(change, when):
    model = made(**TWO_LAYERS)
    if when == "before":
        CHANGES[change](model.model)
    with swapped(model, "decode") as swap:
        if when == "after":
            model.generate(IDS, **{**SHORT, "max_new_tokens": 1})
            CHANGES[change](model.model)
        tokens = model.generate(IDS, **SHORT)
    expected = model.generate(IDS, **SHORT)
    is_replaced = change in ("weight", "norm") and when == "before"
    assert torch.equal(tokens, expected)
    # Small models choose alike tokens: the call itself tells what ran.
    assert any(reasons_of(swap)) == (when == "after")
    assert (sum(site.num_replaced for site in swap.sites) == 1) == (when == "after" or is_replaced)


SHORT = {"do_sample": False, "max_new_tokens": 3}


def test_a_call_in_inference_mode_leaves_the_next_one_right():
    model = made(**ONE_LAYER)
    wanted = model.generate(IDS[1:], **SHORT)
    with swapped(model, "decode") as swap:
        with torch.inference_mode():
            inside = model.generate(IDS[1:], **SHORT)
        assert torch.equal(inside, wanted)
        assert torch.equal(model.generate(IDS[1:], **SHORT), wanted)
    assert reasons_of(swap) == [None]


def test_random_numbers_of_the_caller_are_left_alone():
    model = made(**ONE_LAYER)
    asked = {"do_sample": True, "max_new_tokens": 4}
    with swapped(model, "decode"):
        before = torch.get_rng_state()
        model.generate(IDS[1:], **SHORT)
        assert torch.equal(torch.get_rng_state(), before)
    samples = []
    with swapped(model, "decode"):
        for _ in range(2):
            torch.manual_seed(3)
            samples.append(model.generate(IDS[1:], **asked))
    assert torch.equal(*samples)


def test_a_call_within_a_call_runs_the_original():
    model = made(**ONE_LAYER)
    wanted, others = model.generate(IDS[1:], **SHORT), model.generate(IDS[1:] + 1, **SHORT)
    found = []

    class Asking(Kept):
        def put(self, value):
            super().put(value)
            if len(self.parts) == 2:
                found.append(model.generate(IDS[1:] + 1, **SHORT))

    with swapped(model, "decode") as swap:
        found.append(model.generate(IDS[1:], **SHORT, streamer=Asking()))
    assert torch.equal(found[0], others)
    assert torch.equal(found[1], wanted)
    assert sorted(map(bool, reasons_of(swap))) == [False, True]


def test_tokens_have_the_dtype_and_the_number_of_the_original():
    model = made(**ONE_LAYER)
    over = [transformers.MaxLengthCriteria(3)]
    calls = (
        (IDS[1:].int(), {}),
        (IDS[1:], {"stopping_criteria": transformers.StoppingCriteriaList(over)}),
    )
    wanted = [model.generate(ids, **SHORT, **options) for ids, options in calls]
    with swapped(model, "decode") as swap:
        found = [model.generate(ids, **SHORT, **options) for ids, options in calls]
    assert [one.dtype for one in found] == [one.dtype for one in wanted]
    assert all(map(torch.equal, found, wanted))
    assert reasons_of(swap) == [None]


def test_without_stop_tokens_a_sequence_goes_on_behind_a_stop_string():
    tokenizers = pytest.importorskip("tokenizers")
    letters = string.ascii_letters[:40]
    made_of = tokenizers.models.WordLevel({one: i for i, one in enumerate(letters)}, unk_token="a")
    splitting = tokenizers.Tokenizer(made_of)
    splitting.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    splitting.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splitting)
    model = made(**ONE_LAYER)
    free = model.generate(IDS, **GREEDY)[:, IDS.shape[1] :]
    asked = {**GREEDY, "stop_strings": letters[int(free[0, 1])], "tokenizer": tokenizer}
    wanted = model.generate(IDS, **asked)
    with swapped(model, "decode") as swap:
        found = model.generate(IDS, **asked)
    assert torch.equal(found, wanted)
    assert reasons_of(swap) == [None]


class TopKLogitsWarper(transformers.TopKLogitsWarper):
    """Another processor of the same name."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.arange(20), -1e9)


class EosTokenCriteria(transformers.EosTokenCriteria):
    """Another criterion of the same name."""

    def __call__(self, input_ids, scores, **others):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9)


def processed_by(*processors):
    return {"logits_processor": transformers.LogitsProcessorList(processors)}


@pytest.mark.parametrize(
    "options",
    [
        processed_by(TopKLogitsWarper(40)),
        {"stopping_criteria": transformers.StoppingCriteriaList([EosTokenCriteria(3)])},
        processed_by(transformers.TopPLogitsWarper(0.5), transformers.TopKLogitsWarper(3)),
        processed_by(transformers.TopPLogitsWarper(0.5, min_tokens_to_keep=5)),
        processed_by(transformers.TopKLogitsWarper(3, filter_value=-10.0)),
    ],
)
def test_processors_and_criteria_are_known_by_class_order_and_options(options):
    model = made(**ONE_LAYER)
    wanted = model.generate(IDS[1:], **SHORT, **options)
    with swapped(model, "decode") as swap:
        assert torch.equal(model.generate(IDS[1:], **SHORT, **options), wanted)
    assert all(reasons_of(swap))


def test_hooks_for_all_modules_and_a_part_in_training_run_the_original():
    model, calls = made(**ONE_LAYER), []
    hook = torch.nn.modules.module.register_module_forward_hook
    with swapped(model, "decode") as swap:
        handle = hook(lambda module, *others: calls.append(module))
        model.generate(IDS[1:], **SHORT)
        handle.remove()
        model.model.layers[0].train()
        model.generate(IDS[1:], **SHORT)
    assert model.lm_head in calls
    assert len(reasons_of(swap)) == 2
    assert all(reasons_of(swap))


def test_a_rotation_that_was_changed_in_place_is_seen():
    model = made(**TWO_LAYERS)
    before = model.generate(IDS, **GREEDY)
    with swapped(model, "decode") as swap:
        model.generate(IDS, **{**GREEDY, "max_new_tokens": 1})
        model.model.rotary_emb.inv_freq.zero_()
        found = model.generate(IDS, **GREEDY)
    assert torch.equal(found, model.generate(IDS, **GREEDY))
    assert not torch.equal(found, before)
    assert reasons_of(swap) == [None]


def test_a_mask_of_other_numbers_and_an_early_exit_run_the_original():
    model, halves = made(**ONE_LAYER), {**SHORT, "attention_mask": MASK * 0.5}
    wanted = model.generate(IDS, **halves)
    with swapped(model, "decode") as swap:
        assert torch.equal(model.generate(IDS, **halves), wanted)
        # Of one sequence only.
        with pytest.raises(ValueError, match="batch_size"):
            model.generate(IDS, **SHORT, assistant_early_exit=1)
    assert all(reasons_of(swap))


def test_an_attention_of_other_code_runs_the_original():
    def attend(module, query, key, value, mask, **others):
        return torch.zeros_like(query).transpose(1, 2), None

    transformers.AttentionInterface.register("of this test", attend)
    model = made(**ONE_LAYER)
    with swapped(model, "decode") as swap:
        model.generate(IDS[1:], **SHORT)
        model.set_attn_implementation("of this test")
        model.generate(IDS[1:], **SHORT)
    assert sorted(map(bool, reasons_of(swap))) == [False, True]
