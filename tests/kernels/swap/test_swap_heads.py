"""Heads with torch's own loss, heads inside other modules, and labels of which few count."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tests.kernel_interpreter  # noqa: F401 - first, before anything imports Triton.
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap.reasons import ANOTHER_LOSS, CHANGES_LOGITS, HEAD_HOOKS
from tests.kernels.swap.test_swap_losses import LABELS, TOKENS, CausalLM, Output, Shaped, V
from tests.kernels.swap.test_swap_losses import H as WIDTH

KERNEL = "linear_cross_entropy=eager"
FEW = torch.full_like(LABELS, -100).index_put(
    (torch.tensor([0, 1]), torch.tensor([3, 1])), torch.tensor([4, 9])
)


class Transform(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, hidden):
        return self.norm(functional.gelu(self.dense(hidden)))


class Predictions(nn.Module):
    def __init__(self):
        super().__init__()
        self.transform, self.decoder = Transform(), nn.Linear(WIDTH, V)

    def forward(self, hidden):
        return self.decoder(self.transform(hidden))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.predictions = Predictions()

    def forward(self, hidden):
        return self.predictions(hidden)


class MaskedLM(CausalLM):
    """As BERT: its head is inside two modules, and has a bias; its loss is torch's."""

    def __init__(self, **options):
        super().__init__()
        self.cls = Wrapped()
        del self.lm_head
        self.options = options

    def get_output_embeddings(self):
        return self.cls.predictions.decoder

    def forward(self, input_ids, labels=None):
        logits = self.cls(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            loss = nn.CrossEntropyLoss(**self.options)(logits.view(-1, V), labels.view(-1))
        return Output(loss=loss, logits=logits)


class Seq2Seq(CausalLM):
    """As T5 and BART: hidden states are scaled, and a buffer is added to logits."""

    def __init__(self, bias):
        super().__init__()
        self.bias = nn.Buffer(bias.view(1, -1))

    def forward(self, input_ids, labels=None):
        hidden = self.model(input_ids).last_hidden_state * WIDTH**-0.5
        logits = self.lm_head(hidden)
        logits = logits + self.bias.to(logits.device)
        labels = labels.to(logits.device)
        loss = nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels.view(-1))
        return Output(loss=loss, logits=logits)


class Sparse(CausalLM):
    """As ModernBERT with sparse prediction: it selects the rows of labels that count."""

    @staticmethod
    def loss(logits, labels, vocab_size, **_):
        return functional.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))

    def forward(self, input_ids, labels=None):
        hidden = self.model(input_ids).last_hidden_state
        labels = labels.view(-1)
        hidden = hidden.view(labels.shape[0], -1)[labels != -100]
        logits = self.lm_head(hidden)
        loss = self.loss_function(logits, labels[labels != -100], vocab_size=V)
        return Output(loss=loss, logits=logits)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.layer(x)


class OwnGPT(nn.Module):
    """As nanoGPT: its parts are its own, its loss is torch's function, it returns a pair."""

    def __init__(self):
        super().__init__()
        parts = {"wte": nn.Embedding(V, WIDTH), "wpe": nn.Embedding(8, WIDTH)}
        parts |= {"drop": nn.Dropout(0.5), "h": nn.ModuleList([Block(), Block()])}
        self.transformer = nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, V, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        places = torch.arange(idx.size()[1], device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        rows, places = logits.view(-1, logits.size(-1)), targets.view(-1)
        return logits, functional.cross_entropy(rows, places, ignore_index=-1)


class OwnLlama(nn.Module):
    """As llama2.c: it returns logits alone, and keeps its loss."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.norm = nn.Embedding(V, WIDTH), nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, V, bias=False)
        self.last_loss = None

    def forward(self, tokens, targets=None):
        logits = self.output(self.norm(self.embeddings(tokens)))
        if targets is not None:
            rows, places = logits.view(-1, logits.size(-1)), targets.view(-1)
            self.last_loss = functional.cross_entropy(rows, places, ignore_index=-1)
        return logits


def trained(model, labels=LABELS, cast=None):
    model.zero_grad()
    torch.manual_seed(4)
    with torch.autocast("cpu", cast, enabled=cast is not None):
        output = model(TOKENS, labels=labels)
    output.loss.backward()
    return output.loss.detach(), *(one.grad.clone() for one in model.parameters())


def only_site(swap):
    (site,) = [one for one in swap.sites if one.kernel == "linear_cross_entropy"]
    return site


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_a_model_of_ones_own_is_trained_without_logits(cast):
    torch.manual_seed(0)
    model, targets = OwnGPT().train(), LABELS.masked_fill(LABELS < 0, -1)

    def step():
        model.zero_grad()
        torch.manual_seed(4)
        with torch.autocast("cpu", cast, enabled=cast is not None):
            logits, loss = model(TOKENS, targets)
        loss.backward()
        return logits, (loss.detach(), *(one.grad.clone() for one in model.parameters()))

    _, wanted = step()
    with swapped(model, KERNEL) as swap:
        logits, found = step()
        assert model(TOKENS)[0].shape == (2, 1, V)
        assert model.eval()(TOKENS, targets)[0].shape == (2, 5, V)
    most = {"rtol": 2e-2, "atol": 2e-2} if cast else {}
    torch.testing.assert_close(found, wanted, **most)
    assert (logits, only_site(swap).num_replaced) == (None, 1)


def test_a_model_that_keeps_its_loss_is_trained_without_logits():
    torch.manual_seed(0)
    model = OwnLlama().train()
    assert model(TOKENS, LABELS.clamp_min(0)) is not None
    wanted = model.last_loss.detach()
    with swapped(model, KERNEL) as swap:
        assert model(TOKENS, LABELS.clamp_min(0)) is None
    torch.testing.assert_close(model.last_loss.detach(), wanted)
    assert only_site(swap).num_replaced == 1


def test_a_compiled_model_of_ones_own_keeps_its_logits_in_one_graph():
    torch.compiler.reset()
    model = OwnGPT().eval()
    wanted = model(TOKENS, LABELS.clamp_min(0))
    with swapped(model, KERNEL) as swap:
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = compiled(TOKENS, LABELS.clamp_min(0))
    torch.testing.assert_close(found, wanted)
    assert only_site(swap).calls[0].is_compiled


ROW = torch.linspace(-1, 1, V)


class WithLossModule(CausalLM):
    """As DistilBERT: torch's loss is a module; as Mamba, it reads the dtype of its head."""

    def __init__(self):
        super().__init__()
        self.loss_fct = nn.CrossEntropyLoss()

    def forward(self, input_ids, labels=None):
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        loss = self.loss_fct(logits.view(-1, V), labels.view(-1))
        return Output(loss=loss, logits=logits)


MODELS = {
    "distilbert": WithLossModule,
    "bert": MaskedLM,
    "smoothed": lambda: MaskedLM(label_smoothing=0.1),
    "summed": lambda: MaskedLM(reduction="sum"),
    "t5": lambda: Seq2Seq(torch.zeros(V)),
    "bart": lambda: Seq2Seq(ROW),
    "modernbert": Sparse,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("labels", [LABELS, FEW])
def test_heads_with_their_loss_have_the_same_loss_and_gradients(name, labels):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    wanted = trained(model, labels)
    with swapped(model, KERNEL) as swap:
        torch.testing.assert_close(trained(model, labels), wanted)
        assert model(TOKENS, labels=labels).logits is None
    assert (only_site(swap).num_replaced, only_site(swap).num_fallen_back) == (2, 0)


@pytest.mark.parametrize("name", ["bert", "t5", "modernbert"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_loss_in_16_bits_or_under_autocast_has_the_dtype_that_it_had(name, dtype):
    torch.manual_seed(0)
    model = MODELS[name]().train().to(dtype or torch.float32)
    cast = None if dtype else torch.bfloat16
    wanted = trained(model, cast=cast)
    with swapped(model, KERNEL) as swap:
        found = trained(model, cast=cast)
    assert only_site(swap).num_replaced == 1
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_a_bias_that_widens_logits_under_autocast_keeps_them():
    model = Seq2Seq(ROW).train()
    wanted = trained(model, cast=torch.bfloat16)
    with swapped(model, KERNEL) as swap:
        torch.testing.assert_close(trained(model, cast=torch.bfloat16), wanted)
        model.bias.zero_()
        trained(model, cast=torch.bfloat16)
    assert (only_site(swap).num_replaced, only_site(swap).num_fallen_back) == (1, 1)


class Logits(TorchDispatchMode):
    """Notes the rows of products with a column for each token of the vocabulary."""

    def __init__(self):
        super().__init__()
        self.num_rows, self.num_products = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "mm" in function.__name__ and result.shape[-1] == V:
            self.num_rows.add(result.shape[0])
            self.num_products += 1
        return result


@pytest.mark.parametrize(("labels", "num_rows"), [(LABELS, 10), (FEW, 2)])
def test_rows_whose_labels_do_not_count_have_no_logits(labels, num_rows):
    model = MaskedLM().train()
    with swapped(model, KERNEL), Logits() as logits:
        model(TOKENS, labels=labels)
    assert logits.num_rows == {num_rows}


def test_a_batch_without_labels_has_the_loss_and_gradients_that_it_had():
    model, none = MaskedLM().train(), torch.full_like(LABELS, -100)
    wanted = trained(model, none)
    with swapped(model, KERNEL) as swap:
        torch.testing.assert_close(trained(model, none), wanted, equal_nan=True)
    assert only_site(swap).num_replaced == 1


@pytest.mark.parametrize("is_whole", [True, False])
def test_torchs_loss_may_be_swapped_too(is_whole):
    torch.manual_seed(0)
    model = MaskedLM().train()
    wanted = trained(model)
    with swapped(None if is_whole else model, KERNEL, "cross_entropy=eager") as swap:
        torch.testing.assert_close(trained(model), wanted)
    called = {one.kernel: one.num_replaced for one in swap.sites if one.num_replaced}
    assert called == {"linear_cross_entropy": 1}


def test_classes_with_weights_have_their_logits():
    model = MaskedLM(weight=torch.linspace(0.5, 2, V)).train()
    torch.manual_seed(4)
    wanted = model(TOKENS, labels=LABELS)
    torch.manual_seed(4)
    with swapped(model, KERNEL) as swap:
        found = model(TOKENS, labels=LABELS)
    torch.testing.assert_close(dict(found), dict(wanted))
    assert (only_site(swap).num_replaced, only_site(swap).num_fallen_back) == (0, 1)


@pytest.mark.parametrize("place", ["cls", "cls.predictions", "cls.predictions.decoder"])
def test_hooks_around_a_head_see_its_logits(place):
    model, seen = MaskedLM().train(), []
    model.get_submodule(place).register_forward_hook(lambda *of: seen.append(of[2].shape))
    with swapped(model, KERNEL) as swap:
        assert model(TOKENS, labels=LABELS).logits is not None
    assert (seen, only_site(swap).calls[0].why) == ([(2, 5, V)], HEAD_HOOKS)


def test_hooks_of_a_loss_see_logits():
    model, seen = WithLossModule().train(), []
    model.loss_fct.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    with swapped(model, KERNEL) as swap:
        assert model(TOKENS, labels=LABELS).logits is not None
    assert (seen, only_site(swap).num_replaced) == ([(10, V)], 0)


def test_logits_are_there_without_training_and_without_labels():
    model = MaskedLM()
    with swapped(model, KERNEL) as swap:
        assert model(TOKENS).logits.shape == (2, 5, V)
        model.eval()
        assert model(TOKENS, labels=LABELS).logits.shape == (2, 5, V)
    assert only_site(swap).num_replaced == 0


def test_modules_around_a_head_keep_what_their_code_writes():
    class Counting(Predictions):
        calls = 0

        def forward(self, hidden):
            self.calls = self.calls + 1
            return super().forward(hidden)

    model = MaskedLM().train()
    model.cls.predictions = Counting()
    with swapped(model, KERNEL) as swap:
        trained(model)
    assert (model.cls.predictions.calls, only_site(swap).num_replaced) == (1, 1)


WRITES = [
    lambda logits: logits.mul_(0.5),
    lambda logits: (logits.mul_(0.5), logits)[1],
    lambda logits: logits if logits.ndim == 2 else 0.5 * logits.square(),
    lambda logits: logits.transpose(0, 1),
    lambda logits: logits + torch.linspace(-1, 1, 5).view(5, 1),
    lambda logits: 0.5 * logits + ROW,
]


@pytest.mark.parametrize("shape", WRITES)
def test_a_model_that_does_more_with_its_logits_keeps_its_head(shape):
    with swapped(Shaped(shape), KERNEL) as swap:
        pass
    assert swap.sites[0].skipped is not None


def test_a_bias_before_a_scale_is_that_of_the_head():
    torch.manual_seed(0)
    model = Shaped(lambda logits: 0.5 * (logits + ROW))
    wanted = model(TOKENS, labels=LABELS)
    torch.manual_seed(0)
    model = Shaped(lambda logits: 0.5 * (logits + ROW))
    with swapped(model, KERNEL) as swap:
        torch.testing.assert_close(model(TOKENS, labels=LABELS).loss, wanted.loss)
    assert swap.sites[0].num_replaced == 1


def test_a_classifier_of_tokens_with_few_classes_keeps_its_logits():
    class Tagger(CausalLM):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(WIDTH, WIDTH - 1)

        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            loss = functional.cross_entropy(logits.view(-1, WIDTH - 1), labels.view(-1))
            return Output(loss=loss, logits=logits)

    model = Tagger().train()
    with swapped(model, KERNEL) as swap:
        assert model(TOKENS, labels=LABELS.clamp_max(3)).logits is not None
    assert only_site(swap).skipped is not None


def rows_by_token(logits, labels):
    rows = logits.transpose(0, 1).reshape(-1, V)
    return functional.cross_entropy(rows, labels.reshape(-1))


def test_rows_in_another_order_keep_their_logits():
    class Other(CausalLM):
        def forward(self, input_ids, labels=None):
            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            return Output(loss=rows_by_token(logits, labels), logits=logits)

    with swapped(Other(), KERNEL) as swap:
        pass
    assert swap.sites[0].skipped == CHANGES_LOGITS


def test_another_loss_in_the_place_of_the_models_counts():
    model = MaskedLM().train()
    with swapped(model, KERNEL) as swap:
        model.__dict__["_loss_function"] = lambda logits, labels, vocab_size, **_: logits.sum()
        assert model(TOKENS, labels=LABELS).logits is not None
    assert only_site(swap).calls[0].why == ANOTHER_LOSS


class Free(CausalLM):
    """It makes loss and logits from its hidden states by given code."""

    def __init__(self, code):
        super().__init__()
        self.code = (code,)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, input_ids, labels=None):
        hidden = self.model(input_ids).last_hidden_state
        loss, *others = self.code[0](self, hidden, labels)
        return loss, *others


def lost(logits, labels, **options):
    return functional.cross_entropy(logits.reshape(-1, V), labels.reshape(-1), **options)


def by_chunks(model, hidden, labels):
    loss, weight = 0.0, torch.linspace(0.5, 2, V)
    for some, wanted in zip(hidden.split(3, 1), labels.split(3, 1), strict=True):
        logits = model.lm_head(some)
        loss = loss + lost(logits, wanted, weight=weight)
    return loss, logits


def cast_at_the_head(model, hidden, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.lm_head(hidden)
    return lost(logits.float(), labels), logits


def exact_at_the_head(model, hidden, labels):
    with torch.autocast("cpu", enabled=False):
        logits = model.lm_head(hidden.float())
    return lost(logits, labels), logits


def exact_at_the_loss(model, hidden, labels):
    logits = model.lm_head(hidden)
    with torch.autocast("cpu", enabled=False):
        return lost(logits.float(), labels), logits


def frozen_at_the_head(model, hidden, labels):
    with torch.no_grad():
        logits = model.lm_head(hidden)
    return lost(logits, labels), logits


def frozen_between(model, hidden, labels):
    logits = model.lm_head(hidden)
    with torch.set_grad_enabled(hidden.shape[1] == 3):
        rows = logits.float()
    return lost(rows, labels), logits


def frozen_at_the_loss(model, hidden, labels):
    logits = model.lm_head(hidden)
    with torch.set_grad_enabled(hidden.shape[1] == 3):
        return lost(logits, labels), logits


def detached(model, hidden, labels):
    logits = model.lm_head(hidden)
    return lost(logits.detach() if hidden.shape[1] != 3 else logits, labels), logits


def always_detached(model, hidden, labels):
    logits = model.lm_head(hidden)
    return lost(logits.detach(), labels), logits


def scaled_by_a_parameter(model, hidden, labels):
    logits = model.lm_head(hidden)
    return lost(logits * model.temperature, labels), logits


class Tenth(torch.autograd.Function):
    """The identity, with a tenth of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0.1


def with_gradients_of_its_own(model, hidden, labels):
    logits = Tenth.apply(model.lm_head(hidden))
    return lost(logits, labels), logits


def penalized_where_long(model, hidden, labels):
    logits = model.lm_head(hidden)
    loss = lost(logits, labels, label_smoothing=0.1)
    if hidden.shape[1] > 3:
        loss = loss + 1e-3 * logits.logsumexp(-1).square().mean()
        loss = loss + torch.stack([logits, logits]).mean() + (1 - logits).mean()
    return loss, logits


def with_probabilities_where_long(model, hidden, labels):
    logits = model.lm_head(hidden)
    loss = lost(logits, labels)
    return (loss, logits, logits.softmax(-1)) if hidden.shape[1] > 3 else (loss, logits)


def capped_where_long(model, hidden, labels):
    logits = model.lm_head(hidden)
    if hidden.shape[1] > 3:
        logits = 0.5 * torch.tanh(logits / 0.5)
    return lost(logits, labels), logits


def with_hidden_states(model, hidden, labels):
    logits = model.lm_head(hidden)
    return model.loss_function(logits, labels, V), logits, hidden


def capped_for_its_function(model, hidden, labels):
    logits = model.lm_head(hidden)
    if hidden.shape[1] > 3:
        logits = 0.5 * torch.tanh(logits / 0.5)
    return model.loss_function(logits, labels, V), logits, {"all": [logits.argmax(-1)]}


def read_where_long(model, hidden, labels):
    logits = model.lm_head(hidden)
    penalty = logits.square().mean() if hidden.shape[1] > 3 else 0.0
    return lost(logits, labels) + penalty, logits


CODES = (
    *(by_chunks, cast_at_the_head, exact_at_the_head, exact_at_the_loss, frozen_at_the_head),
    *(frozen_between, frozen_at_the_loss, detached, always_detached, scaled_by_a_parameter),
    *(with_gradients_of_its_own, penalized_where_long, with_probabilities_where_long),
    *(capped_where_long, with_hidden_states, capped_for_its_function, read_where_long),
)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_whatever_is_done_with_logits_is_what_it_was(code, cast):
    torch.manual_seed(0)
    model = Free(code).train()

    def step():
        model.zero_grad()
        torch.manual_seed(4)
        with torch.autocast("cpu", cast, enabled=cast is not None):
            loss, *others = model(TOKENS, LABELS)
        if loss.requires_grad:
            loss.backward()
        grads = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
        return [loss.detach(), loss.requires_grad, *grads], others

    wanted, others = step()
    with swapped(model, KERNEL):
        found, new = step()
    # Rounded by the kernel where the model's own product is in 16 bits.
    most = {"rtol": 2e-2, "atol": 2e-2} if cast else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, wanted, **most)
    assert len(new) == len(others)
    for one, other in zip(new, others, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, **most)


@pytest.mark.parametrize("code", [exact_at_the_loss, cast_at_the_head])
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
def test_a_loss_under_another_autocast_than_its_head_gets_the_logits(code, cast):
    model = Free(code).train()
    with swapped(model, KERNEL) as swap, torch.autocast("cpu", cast, enabled=cast is not None):
        (loss, logits), differs = model(TOKENS, LABELS), (code is exact_at_the_loss) == bool(cast)
    assert only_site(swap).num_fallen_back == differs
    assert (logits is not None) == differs
    if differs:
        torch.testing.assert_close(loss, lost(logits.float(), LABELS), rtol=0, atol=0)


def tenth_where_long(model, hidden, labels):
    logits = model.lm_head(hidden)
    return lost(Tenth.apply(logits) if hidden.shape[1] > 3 else logits, labels), logits


def hooked_where_long(model, hidden, labels):
    logits = model.lm_head(hidden)
    loss = lost(logits, labels)
    if hidden.shape[1] > 3:
        logits.register_hook(lambda gradient: 0.1 * gradient)
    return loss, logits


@pytest.mark.parametrize("code", [tenth_where_long, hooked_where_long])
def test_gradients_that_would_be_lost_are_an_error(code):
    model = Free(code).train()
    with swapped(model, KERNEL) as swap, pytest.raises(TypeError):
        model(TOKENS, LABELS)
    assert only_site(swap).skipped is None


@pytest.mark.parametrize("code", [read_where_long, detached, frozen_between])
def test_logits_that_are_there_are_computed_once(code):
    model = Free(code).train()
    with swapped(model, KERNEL) as swap, Logits() as logits:
        model(TOKENS, LABELS)
    assert (only_site(swap).num_fallen_back, logits.num_products) == (1, 1)


class Tempered(torch.autograd.Function):
    """Its forward touches nothing."""

    @staticmethod
    def forward(ctx, loss, x):
        return loss.clone(), x

    @staticmethod
    def backward(ctx, of_loss, gradient):
        return of_loss, 0.1 * gradient


def tempered(loss, logits):
    return Tempered.apply(loss, logits)


class OwnGradients(CausalLM):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = lost(logits, labels)
        return Output(loss=tempered(loss, logits)[0], logits=logits)


def test_a_model_with_gradients_of_its_own_keeps_its_head():
    with swapped(OwnGradients(), KERNEL) as swap:
        pass
    assert Tempered.__name__ in only_site(swap).skipped


class Pair(NamedTuple):
    logits: torch.Tensor | None
    loss: torch.Tensor


class Named(CausalLM):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return Pair(loss=lost(logits, labels), logits=logits)


def test_a_named_tuple_remains_one():
    torch.manual_seed(0)
    model = Named().train()
    wanted = trained(model)
    with swapped(model, KERNEL) as swap:
        torch.testing.assert_close(trained(model), wanted)
        assert model(TOKENS, LABELS).logits is None
    assert only_site(swap).num_replaced == 2


SIZES = {"vocab_size": 32, "pad_token_id": 0, "max_position_embeddings": 16}
OF_ENCODERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
OF_ENCODERS |= {"num_attention_heads": 2, **SIZES}
OF_BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
OF_BART |= {"decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
OF_T5 = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
OF_T5 |= {"decoder_start_token_id": 0, "vocab_size": 32}
HUGGING_FACE = {
    "Bert:MaskedLM": OF_ENCODERS,
    "Roberta:MaskedLM": OF_ENCODERS,
    "ModernBert:MaskedLM": {**OF_ENCODERS, "sparse_prediction": True},
    "T5:ConditionalGeneration": OF_T5,
    "Bart:ConditionalGeneration": {**OF_BART, **SIZES},
}


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_heads_of_hugging_face_have_the_same_loss_and_gradients(name, cast):
    transformers = pytest.importorskip("transformers")
    family, _, task = name.partition(":")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**HUGGING_FACE[name])
    model = getattr(transformers, f"{family}For{task}")(config).train()
    tokens = torch.arange(24).view(2, 12) % 11 + 3
    labels = tokens.masked_fill(tokens % 7 > 0, -100)

    def found():
        model.zero_grad()
        torch.manual_seed(4)
        with torch.autocast("cpu", cast, enabled=cast is not None):
            loss = model(tokens, labels=labels).loss
        loss.backward()
        grads = [one.grad for one in model.parameters() if one.grad is not None]
        return loss.detach(), torch.cat([one.flatten() for one in grads])

    wanted = found()
    with swapped(model, KERNEL) as swap:
        loss, grads = found()
    assert (only_site(swap).num_replaced, only_site(swap).num_fallen_back) == (1, 0)
    most = 1e-4 if cast is None else 2e-2
    assert loss.dtype == wanted[0].dtype
    torch.testing.assert_close(loss, wanted[0], rtol=most, atol=0)
    assert torch.linalg.vector_norm(grads - wanted[1]) <= most * torch.linalg.vector_norm(wanted[1])
