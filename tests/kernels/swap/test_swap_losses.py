"""The losses of models of Hugging Face, with and without their head, by stand-ins of theirs."""

import copy
import functools
import io
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

import tests.kernel_interpreter  # noqa: F401 - first, before anything imports Triton.
from kprof.kernels.swap.reads import COMPARES
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap.reasons import (
    ANOTHER_LOSS,
    CHANGES_LOGITS,
    HEAD_HOOKS,
    NO_KNOWN_LOSS,
    RUNS_ADD,
    UNUSED_LOSS,
)

V, H = 13, 8
TOKENS = torch.arange(10).reshape(2, 5)
LABELS = torch.tensor([[1, 2, -100, 4, 5], [6, 7, 8, -100, 10]])


def causal_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_
):
    logits = logits.float()
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
    rows, targets = logits.view(-1, vocab_size), shift_labels.view(-1)
    if num_items_in_batch is None:
        return functional.cross_entropy(rows, targets, ignore_index=ignore_index)
    total = functional.cross_entropy(rows, targets, ignore_index=ignore_index, reduction="sum")
    return total / num_items_in_batch


def unshifted_loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    return functional.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))


class Output(OrderedDict):
    def __getattr__(self, name):
        return self.get(name)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.drop = nn.Dropout(0.5)

    def forward(self, input_ids):
        return Output(last_hidden_state=self.drop(self.embed(input_ids)))


class CausalLM(nn.Module):
    loss = staticmethod(causal_loss)

    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(H, V, bias=False)
        self.lm_head.weight = self.model.embed.weight

    @property
    def loss_function(self):
        return self.__dict__.get("_loss_function", type(self).loss)

    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V, **kwargs)
        return Output(loss=loss, logits=logits)


def trained(model, **kwargs):
    model.zero_grad()
    torch.manual_seed(4)
    labels = LABELS.clamp_min(0) if "ignore_index" in kwargs else LABELS
    output = model(TOKENS, labels=labels, **kwargs)
    output.loss.backward()
    return output.loss.detach(), model.lm_head.weight.grad.clone()


@pytest.mark.parametrize("kernel", ["cross_entropy=eager", "linear_cross_entropy=eager"])
@pytest.mark.parametrize("kwargs", [{}, {"num_items_in_batch": 6}, {"ignore_index": 4}])
def test_the_loss_and_its_gradients_are_what_they_were(kernel, kwargs):
    model = CausalLM()
    wanted = trained(model, **kwargs)
    with swapped(model, kernel) as swap:
        torch.testing.assert_close(trained(model, **kwargs), wanted)
    assert [site.num_replaced for site in swap.sites] == [1]


@pytest.mark.parametrize("kernel", ["cross_entropy=eager", "linear_cross_entropy=eager"])
def test_no_random_number_of_the_workload_is_drawn(kernel):
    model, before = CausalLM(), torch.get_rng_state()
    with swapped(model, kernel) as swap:
        assert [site.skipped for site in swap.sites] == [None]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("dtype", "replaced"), [(torch.float32, 1), (torch.float64, 0)])
def test_a_loss_is_counted_once_where_torchs_is_replaced_too(dtype, replaced):
    model = CausalLM().to(dtype).eval()
    with swapped(None, "cross_entropy=eager") as swap:
        model(TOKENS, labels=LABELS)
        functional.cross_entropy(torch.randn(3, 5), torch.tensor([1, 2, 3]))
    called = {site.name: site for site in swap.sites if site.calls}
    assert called["torch.nn.functional"].num_replaced == 1
    assert called["torch.nn.functional"].num_fallen_back == 0
    own = called["CausalLM"]
    assert (own.num_replaced, own.num_fallen_back) == (replaced, 1 - replaced)


class Masked(CausalLM):
    """The label of a position is its own token."""

    loss = staticmethod(unshifted_loss)


class Smoothed(CausalLM):
    """Spreads a share of each label over the vocabulary."""

    @staticmethod
    def loss(logits, labels, vocab_size, **_):
        rows = logits.float().view(-1, vocab_size)
        return functional.cross_entropy(rows, labels.view(-1), label_smoothing=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["cross_entropy", "linear_cross_entropy"])
def test_a_masked_models_loss_and_its_gradients_are_what_they_were(kernel, dtype):
    torch.manual_seed(0)
    model = Masked().to(dtype).train()
    wanted = trained(model)
    with swapped(model, f"{kernel}=eager") as swap:
        found = trained(model)
    assert [(one.num_replaced, one.num_fallen_back) for one in swap.sites] == [(1, 0)]
    rounding = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, wanted, **rounding)


def test_a_modernbert_is_trained_to_guess_masked_tokens_with_the_same_gradients():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": 32, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes))
    tokens = torch.arange(12).view(2, 6) + 1
    labels = tokens.masked_fill(tokens % 3 > 0, -100)

    def found():
        model.zero_grad()
        output = model(tokens, labels=labels)
        output.loss.backward()
        return output.loss.detach(), output.logits.detach(), model.decoder.weight.grad.clone()

    wanted = found()
    with swapped(model, "cross_entropy=eager") as swap:
        torch.testing.assert_close(found(), wanted)
    assert [(one.num_replaced, one.num_fallen_back) for one in swap.sites] == [(1, 0)]


def test_a_loss_of_labels_that_are_spread_is_left_alone():
    with swapped(Smoothed(), "cross_entropy=eager", "linear_cross_entropy=eager") as swap:
        pass
    assert [site.skipped for site in swap.sites] == 2 * [NO_KNOWN_LOSS]


def test_a_step_of_training_makes_no_logits():
    model = CausalLM()
    with swapped(model, "linear_cross_entropy=eager"):
        output = model(TOKENS, labels=LABELS)
    assert list(output) == ["loss"]
    assert output.logits is None


def test_logits_are_there_for_who_does_not_train():
    model = CausalLM()
    with swapped(model, "linear_cross_entropy=eager") as swap:
        assert model(TOKENS).logits.shape == (2, 5, V)
        with torch.no_grad():
            assert model(TOKENS, labels=LABELS).logits is not None
        model.eval()
        assert model(TOKENS, labels=LABELS).logits is not None
    assert swap.sites[0].num_fallen_back == 2


class Shaped(CausalLM):
    """It does something to its logits, and may be told to do something else."""

    def __init__(self, shape):
        super().__init__()
        self.shape = [shape]

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.shape[0](self.lm_head(self.model(input_ids).last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, V, **kwargs)
        return Output(loss=loss, logits=logits)


SHAPES = [
    lambda logits: logits * 0.25,
    lambda logits: 3 * logits,
    lambda logits: logits / 8,
    lambda logits: torch.tanh(logits / 0.5) * 0.5,
    lambda logits: (logits / 2.0).float().tanh() * 2.0,
    lambda logits: 0.3 * torch.tanh(logits * 0.7 / 0.3),
]
OTHER_SHAPES = [
    lambda logits: logits.clamp(-1, 1),
    lambda logits: logits * -1.0,
    lambda logits: torch.sigmoid(logits),
    lambda logits: logits + 1,
    lambda logits: logits.roll(1, -1),
    lambda logits: torch.nan_to_num(logits / 0.0),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_that_are_scaled_or_capped_have_the_same_loss_and_gradients(shape):
    model = Shaped(shape)
    wanted = trained(model)
    with swapped(model, "linear_cross_entropy=eager") as swap:
        torch.testing.assert_close(trained(model), wanted)
    assert swap.sites[0].num_replaced == 1


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_a_model_that_changes_its_logits_in_another_way_keeps_its_head(shape):
    with swapped(Shaped(shape), "linear_cross_entropy=eager") as swap:
        pass
    assert swap.sites[0].skipped is not None


def test_a_cap_that_changes_within_the_swap_counts_and_another_form_brings_the_logits_back():
    model, last = Shaped(SHAPES[0]), Shaped(SHAPES[3])
    last.load_state_dict(model.state_dict())
    with swapped(model, "linear_cross_entropy=eager") as swap:
        for shape, number in ((SHAPES[3], 1), (OTHER_SHAPES[0], 1)):
            model.shape[0] = last.shape[0] = shape
            torch.testing.assert_close(trained(model), trained(last))
            assert swap.sites[0].num_replaced == number
    assert swap.sites[0].num_fallen_back == 1


def test_a_shaped_model_has_its_logits_where_the_kernel_cannot_run():
    model = Shaped(SHAPES[3])
    torch.manual_seed(4)
    wanted = model(TOKENS, labels=LABELS)
    torch.manual_seed(4)
    with swapped(model, "linear_cross_entropy=eager"):
        found = model(TOKENS, labels=LABELS, weight=torch.ones(V))
    torch.testing.assert_close(found.logits, wanted.logits)


def test_a_hooked_head_runs():
    model, seen = CausalLM(), []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    with swapped(model, "linear_cross_entropy=eager") as swap:
        assert model(TOKENS, labels=LABELS).logits is not None
    assert (seen, swap.sites[0].calls[0].why) == ([1], HEAD_HOOKS)


def test_a_head_that_is_no_linear_layer_is_left_alone():
    class Head(nn.Linear):
        pass

    model = CausalLM()
    model.lm_head = Head(H, V)
    with swapped(model, "linear_cross_entropy=eager") as swap:
        pass
    assert re.findall(r"\bHead\b|torch\.nn\.\w+", swap.sites[0].skipped) == [
        "Head",
        "torch.nn.Linear",
    ]


def test_where_the_kernel_refuses_the_logits_come_back():
    model = CausalLM().double()
    with swapped(model, "linear_cross_entropy=eager") as swap:
        output = model(TOKENS, labels=LABELS)
    assert output.logits.dtype == torch.float64
    assert "float64" in swap.sites[0].calls[0].why


def test_a_compiled_model_keeps_its_logits():
    torch.compiler.reset()
    model = CausalLM().eval()
    wanted = model(TOKENS, labels=LABELS)
    with swapped(model, "linear_cross_entropy=eager") as swap:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        got = compiled(TOKENS, labels=LABELS)
    torch.testing.assert_close(got.logits, wanted.logits)
    assert swap.sites[0].calls[0].is_compiled


@pytest.mark.parametrize("kernel", ["cross_entropy=eager", "linear_cross_entropy=eager"])
def test_copies_and_files_carry_the_original(kernel):
    model = CausalLM()
    before = set(model.__dict__)
    with swapped(model, kernel) as swap:
        other = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        assert other(TOKENS, labels=LABELS).logits is not None
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert read.loss_function is causal_loss
    assert read(TOKENS, labels=LABELS).logits is not None
    assert swap.sites[0].num_replaced == 0
    assert set(model.__dict__) == before


class Around(CausalLM):
    """A class around a model, which gets the output of its forward."""

    def forward(self, input_ids, labels=None, is_penalized=False, **kwargs):
        output = super().forward(input_ids, labels, **kwargs)
        if self.training or is_penalized:
            self.look(output)
        return output


class Penalized(Around):
    def look(self, output):
        output["loss"] = output["loss"] + list(output.values())[1].square().mean()


class Keeping(Around):
    def look(self, output):
        self.last = list(output.values())[1]


class Measuring(Around):
    def look(self, output):
        output["size"] = list(output.values())[1].detach().norm()


class Flagged(CausalLM):
    def forward(self, input_ids, labels=None, is_penalized=False, **kwargs):
        output = super().forward(input_ids, labels, **kwargs)
        if is_penalized:
            output["loss"] = output.loss + output.logits.square().mean()
        return output


@pytest.mark.parametrize("kind", [Penalized, Keeping, Measuring, Flagged])
def test_a_model_that_reads_or_keeps_its_logits_keeps_its_head(kind):
    model = kind().eval()
    with swapped(model, "linear_cross_entropy=eager") as swap:
        pass
    assert swap.sites[0].skipped is not None


def test_a_model_whose_output_has_no_logits_keeps_its_head():
    class Plain(CausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            return dict(super().forward(input_ids, labels, **kwargs))

    with swapped(Plain(), "linear_cross_entropy=eager") as swap:
        pass
    assert swap.sites[0].skipped is not None


def test_logits_that_are_a_part_of_others_have_the_same_loss():
    model, logits = CausalLM(), torch.randn(2, 6, V).bfloat16()[:, :5]
    wanted = model.loss_function(logits, LABELS, V)
    with swapped(model, "cross_entropy=eager"):
        torch.testing.assert_close(model.loss_function(logits, LABELS, V), wanted)


class Counting(CausalLM):
    calls = 0

    def forward(self, input_ids, labels=None):
        self.calls = self.calls + 1
        return super().forward(input_ids, labels)


def test_a_model_without_logits_keeps_what_its_forward_writes_and_another_loss():
    model = Counting().train()
    with swapped(model, "linear_cross_entropy=eager") as swap:
        model(TOKENS, labels=LABELS)
        assert model.calls == 1
        model.__dict__["_loss_function"] = lambda logits, labels, vocab_size, **_: logits.sum() * 0
        assert model(TOKENS, labels=LABELS).loss.item() == 0
    assert [one.why for one in swap.sites[0].calls] == [None, ANOTHER_LOSS]


SCALE = 1.0
CLASS_WEIGHTS = torch.ones(V)


def with_smoothing(logits, labels, vocab_size, label_smoothing=0.0, **_):
    rows, targets = logits[:, :-1].float().reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return functional.cross_entropy(rows, targets, label_smoothing=label_smoothing)


def with_penalty(logits, labels, vocab_size, z_loss=0.0, **_):
    rows = logits[:, :-1].float().reshape(-1, vocab_size)
    loss = functional.cross_entropy(rows, labels[:, 1:].reshape(-1))
    return loss + z_loss * rows.logsumexp(-1).square().mean()


def masking_a_token(logits, labels, vocab_size, **_):
    return causal_loss(logits, labels.masked_fill(labels == 12, -100), vocab_size)


def masking_what_is_rare(logits, labels, vocab_size, **_):
    labels = torch.where(labels > 30, -100, labels)
    return causal_loss(logits, labels, vocab_size)


def scaled(logits, labels, vocab_size, **_):
    return SCALE * causal_loss(logits, labels, vocab_size)


def weighted(logits, labels, vocab_size, **_):
    rows, targets = logits[:, :-1].float().reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    return functional.cross_entropy(rows, targets, weight=CLASS_WEIGHTS)


def capped(logits, labels, vocab_size, **_):
    return causal_loss(50 * torch.tanh(logits / 50), labels, vocab_size)


def ignoring_options(logits, labels, vocab_size, num_items_in_batch=None, **_):
    return causal_loss(logits, labels, vocab_size, num_items_in_batch)


def without_options(logits, labels, vocab_size):
    return causal_loss(logits, labels, vocab_size)


def doubled_where_long(logits, labels, vocab_size, **_):
    loss = causal_loss(logits, labels, vocab_size)
    return loss * 2 if labels.shape[1] > 50 else loss


def detached(logits, labels, vocab_size, **_):
    return causal_loss(logits.detach() + 0 * logits, labels, vocab_size)


KERNELS = ("cross_entropy=eager", "linear_cross_entropy=eager")
OPTIONS = (
    {},
    {"num_items_in_batch": 6},
    {"num_items_in_batch": torch.tensor(6)},
    {"shift_labels": LABELS.flip(1)},
    {"label_smoothing": 0.3},
    {"z_loss": 0.1},
)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("function", "num_replaced"),
    [
        (causal_loss, 4),
        (with_smoothing, 1),
        (ignoring_options, 3),
        (without_options, 1),
        (scaled, 1),
        (functools.partial(causal_loss, ignore_index=-100), 4),
    ],
)
def test_calls_with_options_that_a_loss_does_not_share_run_it(kernel, function, num_replaced):
    model = CausalLM()
    model.__dict__["_loss_function"] = function
    with swapped(model, kernel) as swap:
        pass
    for options in OPTIONS:
        try:
            wanted = trained(model, **options)
        except TypeError:
            with swap, pytest.raises(TypeError):
                trained(model, **options)
            continue
        with swap:
            torch.testing.assert_close(trained(model, **options), wanted)
    assert swap.sites[0].num_replaced == num_replaced


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (with_penalty, RUNS_ADD),
        (masking_a_token, NO_KNOWN_LOSS),
        (masking_what_is_rare, NO_KNOWN_LOSS),
        (weighted, "CLASS_WEIGHTS, a tensor"),
        (capped, NO_KNOWN_LOSS),
        (doubled_where_long, COMPARES),
        (detached, RUNS_ADD),
        (functools.partial(with_smoothing, label_smoothing=0.1), NO_KNOWN_LOSS),
    ],
)
def test_a_loss_that_does_more_is_left_alone_with_the_reason(function, why):
    model = CausalLM()
    model.__dict__["_loss_function"] = function
    with swapped(model, *KERNELS) as swap:
        pass
    (skipped,) = {site.skipped for site in swap.sites}
    assert why in skipped


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_global_of_a_loss_that_changes_counts(kernel, monkeypatch):
    model = CausalLM()
    model.__dict__["_loss_function"] = scaled
    with swapped(model, kernel) as swap:
        trained(model)
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        got = trained(model)
    torch.testing.assert_close(got, trained(model))
    assert [one.num_calls for one in swap.sites[0].calls] == [1, 1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_loss_that_is_exchanged_between_two_entries_counts(kernel):
    model = CausalLM()
    swap = swapped(model, kernel)
    with swap:
        trained(model)
    model.__dict__["_loss_function"] = unshifted_loss
    wanted = trained(model)
    with swap:
        torch.testing.assert_close(trained(model), wanted)
    whys = ("it has another loss now", "other code has replaced it since")
    assert swap.sites[0].skipped in whys


class Padded(CausalLM):
    """Its head has more rows than its vocabulary."""

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        rows = logits[..., :7] if labels is not None else logits
        loss = None if labels is None else self.loss_function(rows, labels, 7, **kwargs)
        return Output(loss=loss, logits=logits)


def test_a_head_with_rows_beyond_the_vocabulary_is_left_alone():
    with swapped(Padded(), "linear_cross_entropy=eager") as swap:
        pass
    assert swap.sites[0].skipped == CHANGES_LOGITS


SEEN = []


class Recording(CausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        SEEN.append(input_ids)
        return super().forward(input_ids, labels, **kwargs)


def test_a_model_with_effects_is_not_run_to_recognise_its_head():
    with swapped(Recording(), "linear_cross_entropy=eager") as swap:
        assert SEEN == []
    assert "SEEN, a list" in swap.sites[0].skipped


class Ignoring(CausalLM):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        chances = functional.log_softmax(logits[0], -1)
        return Output(loss=functional.nll_loss(chances, labels[0]), logits=logits)


class MaskedLM(CausalLM):
    """As BERT and T5: it has a loss function, and makes torch's loss instead."""

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss_fct = nn.CrossEntropyLoss()
        return Output(loss=loss_fct(logits.view(-1, V), labels.view(-1)), logits=logits)


class WithLossModule(MaskedLM):
    """As DistilBERT: torch's loss is a module of its own."""

    def __init__(self):
        super().__init__()
        self.mlm_loss_fct = nn.CrossEntropyLoss()

    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return Output(loss=self.mlm_loss_fct(logits.view(-1, V), labels.view(-1)), logits=logits)


def test_a_loss_function_that_the_forward_does_not_call_is_no_site():
    with swapped(Ignoring(), "cross_entropy=eager") as swap:
        pass
    assert [site.skipped for site in swap.sites] == [UNUSED_LOSS]


@pytest.mark.parametrize("cls", [MaskedLM, WithLossModule])
def test_a_model_that_calls_torchs_loss_has_one_site_of_it(cls):
    model = cls()
    wanted = trained(model)
    with swapped(model, "cross_entropy=eager") as swap:
        torch.testing.assert_close(trained(model), wanted)
    assert [(site.skipped, site.num_replaced) for site in swap.sites] == [(None, 1)]
