"""Random models from a grammar of what people write, as source text, for `swap_fuzz.py`.

Each is a module by itself: `Model`, what it is called with, and what is done to it before a swap
(`prepare`), between two (`change`) and within one (`amid`).
"""

import random

HEAD = '''"""Model {seed}."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint
from torch.utils.checkpoint import checkpoint as again

SEEN = []
GAIN = 1.0
HIDDEN, VOCABULARY, SHAPE = {hidden}, 19, {shape}
DTYPE, AUTOCAST, TRAINS = torch.{dtype}, {autocast}, {trains}


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def turned(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def in_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def angles(x, size):
    places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)[:, None]
    steps = 10.0 ** -torch.arange(size // 2, device=x.device, dtype=torch.float32)
    both = torch.cat((places * steps, places * steps), dim=-1)[None]
    return both.cos().to(x.dtype), both.sin().to(x.dtype)


def noted(result):
    SEEN.append(tuple(result.shape))
    return result

'''

# What is said of x by name: the lines of a norm, the last of which assigns y.
NORM_BODIES = {
    "llama": """
        kind, x = x.dtype, x.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        y = self.weight * x.to(kind)""",
    "plain": """
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight""",
    "square": """
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight""",
    "norm": """
        y = x / (x.norm(dim=-1, keepdim=True) * HIDDEN ** -0.5 + self.eps) * self.weight""",
    "gemma": """
        z = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        y = (z * (1.0 + self.weight.float())).type_as(x)""",
    "offset": """
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        y = y * (self._offset + self.weight)""",
    "layer": """
        mean = x.mean(-1, keepdim=True)
        var = (x - mean).pow(2).mean(-1, keepdim=True)
        y = self.weight * (x - mean) / torch.sqrt(var + self.eps) + self.bias""",
    "var": """
        mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        y = self.weight * (x - mean) * torch.rsqrt(var + self.eps) + self.bias""",
    "std": """
        z = x - x.mean(-1, keepdim=True)
        y = self.weight * z / (x.std(-1, keepdim=True) + self.eps)""",
    "functional": """
        y = F.layer_norm(x, (HIDDEN,), self.weight, self.bias, self.eps)""",
    "functional_rms": """
        y = F.rms_norm(x, (HIDDEN,), self.weight, self.eps)""",
    "biased": """
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        y = y * self.weight + self.bias""",
    "tokens": """
        y = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight""",
    "no_root": """
        y = self.weight * x / (x.pow(2).mean(-1, keepdim=True) + self.eps)""",
    "detached": """
        z = x.detach()
        y = x * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight""",
}
WITH_BIAS = {"layer", "var", "functional", "biased"}
USUAL_NORMS = ("llama", "plain", "gemma", "layer", "functional", "functional_rms", "var", "square")

# What may be done to a result y besides: a line of __init__, and one of forward.
EXTRAS = {
    "scale": ("self.scale = nn.Parameter(torch.ones(()))", "y = y * self.scale"),
    "shift": ("self.shift = nn.Parameter(torch.zeros(()))", "y = y + self.shift"),
    "buffer": ('self.register_buffer("factor", torch.ones(()))', "y = y * self.factor"),
    "gain": ("self._gain = 1.0", "y = y * self._gain"),
    "factor": ("self.factor = 1.5", "y = y * self.factor"),
    "seen": ("pass", "SEEN.append(tuple(y.shape))"),
    "noted": ("pass", "y = noted(y)"),
    "counts": ("self.num_calls = 0", "self.num_calls += 1"),
    "keeps": ("self.last = None", "self.last = y.detach().mean()"),
    "dropout": ("self.rate = 0.2", "y = F.dropout(y, self.rate, self.training)"),
    "cut": ("self._limit = 2.0", "y = y.clamp(-self._limit, self._limit)"),
    "cut far": ("self._limit = 1e4", "y = y.clamp(max=self._limit)"),
    "length": ("pass", "y = y * 1.5 if y.shape[1] > 6 else y"),
    "trains": ("pass", "y = y * 1.25 if self.training else y"),
    "global": ("pass", "y = y * GAIN"),
    "list": ("self.factors = [1.0]", "y = y * self.factors[0]"),
    "function": ("pass", "y = Scale.apply(y, 0.5)"),
    "hook": ("pass", "y.requires_grad and y.register_hook(lambda g: 2 * g)"),
    "inference": ("pass", "y = y if torch.is_grad_enabled() else y + 0.5"),
}

ACTIVATIONS = {
    "F.silu(g)": None,
    "self.act(g)": "nn.SiLU()",
    "self.act(g) ": "nn.GELU()",
    "self.act(g)  ": 'nn.GELU(approximate="tanh")',
    "F.gelu(g)": None,
    'F.gelu(g, approximate="tanh")': None,
    "g * torch.sigmoid(g)": None,
    "g * torch.sigmoid(self._beta * g)": 1.0,
    "g * torch.sigmoid(1.702 * g)": None,
    "g * torch.sigmoid(self.beta * g)": "nn.Parameter(torch.ones(1))",
    "self.act(g)   ": "Swish()",
    "F.relu(g)": None,
    "torch.sigmoid(g)": None,
    "F.silu(g.float()).type_as(g)": None,
    "F.silu(g.clamp(max=self._limit))": 3.0,
}
SWISH = """class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


"""
# Layers: the lines of forward, with parts `self.attn`, `self.mlp` and norms `self.first`, ...
LAYERS = {
    "llama": """
        residual = x
        x = self.first(x)
        x = self.attn(x)
        x = residual + x
        residual = x
        x = self.second(x)
        x = self.mlp(x)
        return residual + x""",
    "short": """
        x = x + self.attn(self.first(x))
        return x + self.mlp(self.second(x))""",
    "swapped": """
        x = self.attn(self.first(x)) + x
        return self.mlp(self.second(x)) + x""",
    "scaled": """
        x = x + 0.5 * self.attn(self.first(x))
        x = x + self.mlp(self.second(x)) * 0.5
        return x""",
    "sandwich": """
        x = x + self.second(self.attn(self.first(x)))
        residual = x
        x = self.third(x)
        return residual + self.mlp(x)""",
    "post": """
        x = self.first(x + self.attn(x))
        return self.second(x + self.mlp(x))""",
    "post in two": """
        x = x + self.attn(x)
        x = self.first(x)
        x = x + self.mlp(x)
        return self.second(x)""",
    "parallel": """
        return x + self.attn(self.first(x)) + self.mlp(self.second(x))""",
    "branch": """
        x = x + self.attn(self.first(x))
        if memory is not None:
            x = x + memory
        return x + self.mlp(self.second(x))""",
    "in place": """
        x = x + self.attn(self.first(x))
        h = self.mlp(self.second(x))
        h += x
        return h""",
    "adds in place": """
        x = x.clone()
        x += self.attn(self.first(x))
        return x + self.mlp(self.second(x))""",
    "function": """
        x = x + Scale.apply(self.attn(self.first(x)), 0.5)
        return x + Scale.apply(self.mlp(self.second(x)), 2.0)""",
    "function on sum": """
        x = x + self.attn(self.first(x))
        x = Scale.apply(x, 0.5)
        return x + self.mlp(self.second(x))""",
    "seen": """
        x = x + self.attn(self.first(x))
        SEEN.append(tuple(x.shape))
        return x + self.mlp(self.second(x))""",
    "kept": """
        x = x + self.attn(self.first(x))
        y = self.mlp(self.second(x))
        SEEN.append(type(x).__name__)
        return x + y""",
    "hooked": """
        x = x + self.attn(self.first(x))
        y = self.mlp(self.second(x))
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x + y""",
    "asks": """
        x = x + self.attn(self.first(x))
        if not torch.is_tensor(x):
            raise TypeError
        return x + self.mlp(self.second(x))""",
    "no grad": """
        x = x + self.attn(self.first(x))
        with torch.no_grad():
            h = self.second(x)
        return x + self.mlp(h)""",
    "checkpoint": """
        x = x + self.attn(self.first(x))
        return x + checkpoint(self.rest, x, use_reentrant=False)""",
    "checkpoint alias": """
        x = x + self.attn(self.first(x))
        return x + again(self.rest, x, use_reentrant=True)""",
    "checkpoint mlp": """
        x = x + again(self.attn, self.first(x), use_reentrant=False)
        return x + again(self.mlp, self.second(x), use_reentrant=True)""",
    "list": """
        for part, norm in ((self.attn, self.first), (self.mlp, self.second)):
            x = x + part(norm(x))
        return x""",
    "loop": """
        for _ in range(2):
            x = x + self.attn(self.first(x))
            x = x + self.mlp(self.second(x))
        return x""",
    "list of sums": """
        x = [x + self.attn(self.first(x))]
        return x[0] + self.mlp(self.second(x[0]))""",
    "writes": """
        x = x + self.attn(self.first(x))
        h = self.mlp(self.second(x))
        y = x + h
        with torch.no_grad():
            x[..., 0] = 0
        return y""",
    "view": """
        x = x + self.attn(self.first(x))
        flat = x.view(-1, HIDDEN)
        return (flat + self.mlp(self.second(x)).reshape(-1, HIDDEN)).view(x.shape)""",
    "tuple": """
        x, h = x + self.attn(self.first(x)), None
        return x + self.mlp(self.second(x))""",
    "closure": """
        x = x + self.attn(self.first(x))
        return (lambda: x + self.mlp(self.second(x)))()""",
    "dropout": """
        x = x + F.dropout(self.attn(self.first(x)), 0.1, self.training)
        return x + F.dropout(self.mlp(self.second(x)), 0.1, self.training)""",
    "lone": """
        x = x + self.attn(self.first(x))
        h = self.second(x)
        return h + self.mlp(h)""",
    "twice": """
        x = x + self.attn(self.first(x))
        h = self.second(x)
        return x + self.mlp(h) + 0.1 * self.second(x)""",
    "gate": """
        x = x + self.attn(self.first(x))
        x = x + torch.sigmoid(x) * self.mlp(self.second(x))
        return x""",
    "autocast": """
        x = x + self.attn(self.first(x))
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            h = self.second(x)
            h = self.mlp(h)
        return x + h.to(x.dtype)""",
    "private": """
        x = x + self.__factor * self.attn(self.first(x))
        return x + self.mlp(self.second(x))""",
    "globally": """
        x = x + GAIN * self.attn(self.first(x))
        return x + self.mlp(self.second(x))""",
}
WRITING = ("in place", "adds in place", "writes")
USUAL_LAYERS = ("llama", "short", "swapped", "scaled", "sandwich", "branch", "in place", "dropout")

ROTATIONS = {
    "half": "x * cos + turned(x) * sin",
    "pairs": "x * cos + in_pairs(x) * sin",
    "scaled": "1.5 * (x * cos + turned(x) * sin)",
    "long": "x * cos + turned(x) * (sin if x.shape[-2] < 7 else 2 * sin)",
    "double": "(x.double() * cos + turned(x.double()) * sin).type_as(x)",
}

LOSSES = {
    "plain": "F.cross_entropy(logits, labels)",
    "ignoring": "F.cross_entropy(logits, labels, ignore_index=3)",
    "smooth": "F.cross_entropy(logits, labels, label_smoothing=0.1)",
    "sum": 'F.cross_entropy(logits, labels, reduction="sum") / 7',
    "none": 'F.cross_entropy(logits, labels, reduction="none").mean()',
    "weighted": "F.cross_entropy(logits, labels, weight=self.class_weight.to(logits.dtype))",
    "float": "F.cross_entropy(logits.float(), labels)",
    "z": "F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).pow(2).mean()",
    "module": "self.criterion(logits, labels)",
    "logits": "logits",
    "nll": "F.nll_loss(F.log_softmax(logits, dim=-1), labels)",
    "capped": "F.cross_entropy(5 * torch.tanh(logits / 5), labels)",
}

# To a model before it is swapped.
PREPARATIONS = {
    "lora": """
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear and name in ("up", "q", "down"):
                setattr(part, name, Lora(child))""",
    "hook": """
    norm = next(one for one in model.modules() if "Norm" in type(one).__name__)
    norm.register_forward_hook(lambda module, given, result: 1.5 * result)""",
    "seeing hook": """
    for one in model.modules():
        one.register_forward_hook(lambda m, given, result: SEEN.append(type(result).__name__))""",
    "pre-hook": """
    layer = model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))""",
    "gradient hook": """
    for weight in model.parameters():
        weight.register_hook(lambda gradient: gradient * 0.5)""",
    "backward hook": """
    model.layers[0].second.register_full_backward_hook(lambda m, given, gave: (2 * given[0],))""",
    "parametrize": """
    parametrize.register_parametrization(model.layers[0].second, "weight", Triple())""",
    "prune": """
    prune.l1_unstructured(model.layers[-1].second, "weight", 0.3)""",
    "tie": """
    model.layers[-1].second.weight = model.layers[0].first.weight""",
    "share": """
    model.layers[-1].mlp = model.layers[0].mlp""",
    "frozen": """
    for weight in list(model.parameters())[::2]:
        weight.requires_grad_(False)""",
    "patched": """
    part, forward = model.layers[0].mlp, model.layers[0].mlp.forward
    part.forward = lambda *args, **kwargs: 2 * forward(*args, **kwargs)""",
    "wide norms": """
    for one in model.modules():
        if "Norm" in type(one).__name__:
            one.float()""",
    "wrapped": """
    model.layers[0].second = Wrapper(model.layers[0].second)""",
    "transposed": """
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data = weight.data.t().contiguous().t()""",
}
CHANGES = {
    "eps": """
    for one in model.modules():
        if isinstance(getattr(one, "eps", None), float):
            one.eps = 0.1""",
    "attributes": """
    for one in model.modules():
        for name in ("_offset", "_gain", "factor", "_beta", "_limit"):
            if isinstance(one.__dict__.get(name), float):
                setattr(one, name, 0.7)
        if "factors" in one.__dict__:
            one.factors[0] = 0.7""",
    "values": """
    for weight in model.parameters():
        weight.data.mul_(1.3)""",
    "buffers": """
    for buffer in model.buffers():
        buffer.mul_(1.3)""",
    "evaluates": """
    model.train(not model.training)""",
    "global": """
    global GAIN
    GAIN = 1.7 if GAIN == 1.0 else 1.0""",
    "new parameter": """
    norm = model.layers[0].second
    if isinstance(norm._parameters.get("weight"), nn.Parameter):
        norm.weight = nn.Parameter(2 * norm.weight.detach())""",
    "plain attribute": """
    norm = model.layers[0].second
    if isinstance(norm._parameters.get("weight"), nn.Parameter):
        weight = norm.weight.detach()
        del norm.weight
        norm.weight = 2 * weight""",
    "parametrize": """
    norm = model.layers[0].first
    if isinstance(norm._parameters.get("weight"), nn.Parameter):
        parametrize.register_parametrization(norm, "weight", Triple())""",
    "prune": """
    norm = model.layers[0].first
    if isinstance(norm._parameters.get("weight"), nn.Parameter):
        prune.random_unstructured(norm, "weight", 0.3)""",
    "hook": """
    model.layers[0].first.register_forward_hook(lambda module, given, result: 1.5 * result)""",
    "another child": """
    model.layers[0].second = nn.Identity()""",
    "another activation": """
    part = model.layers[0].mlp
    if hasattr(part, "act"):
        part.act = nn.Tanh()""",
    "patched": """
    part = model.layers[0].second
    forward = part.forward
    part.forward = lambda x: 2 * forward(x)""",
    "dtype": """
    model.to(torch.float32)""",
    "nothing": """
    pass""",
}
TAIL = """
class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.rank = base, 2
        self.in_features, self.out_features = base.in_features, base.out_features
        like = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1, **like))
        self.b = nn.Parameter(torch.full((base.out_features, 2), 0.1, **like))

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Triple(nn.Module):
    def forward(self, weight):
        return 3 * weight


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)
"""


def written(seed):
    """Return the source of a model."""
    return _Writer(seed).source()


class _Writer:
    """Writes one model."""

    def __init__(self, seed):
        self._seed, self._random, self._parts = seed, random.Random(seed), []
        self._form = ""

    def _one(self, of):
        return self._random.choice(list(of))

    def _is(self, chance):
        return self._random.random() < chance

    def _one_of(self, usual, everything, chance=0.6):
        return self._one(usual if self._is(chance) else everything)

    def source(self):
        """Return its source."""
        norms = [self._norm() for _ in range(3 if self._is(0.3) else 1)]
        mlp = self._mlp()
        attention = self._attention()
        layer = self._layer(norms, mlp, attention)
        self._parts.append(self._model(layer, norms))
        dtype = self._one(("float32",) * 4 + ("bfloat16", "float16"))
        is_cast = self._is(0.15) and dtype == "float32"
        head = HEAD.format(
            seed=self._seed,
            hidden=self._one((8, 16, 32, 24)),
            shape=self._one(((2, 5), (1, 8), (3, 4), (2, 9))),
            dtype=dtype,
            autocast="torch.bfloat16" if is_cast else None,
            trains=self._is(0.7),
        )
        named = {"prepare": PREPARATIONS, "change": CHANGES, "amid": CHANGES}
        chances = {"prepare": 0.4, "change": 0.6, "amid": 0.4}
        bodies = {
            name: options[self._one(options)] if self._is(chances[name]) else BARE
            for name, options in named.items()
        }
        ends = [f"\n\n\ndef {name}(model):{body}" for name, body in bodies.items()]
        return "".join((head, *self._parts, TAIL, *ends, "\n"))

    def _class(self, name, init, arguments, body, base="nn.Module", more=""):
        lines = "".join(f"\n        {one}" for one in init if one != "pass")
        self._parts.append(
            f"class {name}({base}):\n    def __init__(self, n=HIDDEN):\n"
            f"        super().__init__({'n' if base != 'nn.Module' else ''}){lines}\n"
            f"{more}\n    def forward(self, {arguments}):{body}\n\n\n"
        )
        return name

    def _extras(self, chance):
        chosen = [self._one(EXTRAS)] if self._is(chance) else []
        return [EXTRAS[one][0] for one in chosen], "".join(
            f"\n        {EXTRAS[one][1]}" for one in chosen
        )

    def _norm(self):
        number = len(self._parts)
        if self._is(0.25):
            torchs = self._one(("nn.LayerNorm", "nn.RMSNorm"))
            init, more = self._extras(0.3)
            if not more:
                return torchs
            body = "\n        y = super().forward(x)" + more + "\n        return y"
            return self._class(f"Norm{number}", init, "x", body, base=torchs)
        form = self._one_of(USUAL_NORMS, NORM_BODIES)
        init, more = self._extras(0.3)
        start = "zeros" if form == "gemma" else "ones"
        own = [f"self.weight = nn.Parameter(torch.{start}(n))", f"self.eps = {self._one(EPSILONS)}"]
        if form == "offset":
            own.append(f"self._offset = {self._one((0.0, 1.0, 0.5))}")
        if form in WITH_BIAS:
            own.append("self.bias = nn.Parameter(torch.zeros(n))")
        title = f"{self._one(('Norm', 'RMSNorm', 'LayerNorm'))}{number}"
        body = NORM_BODIES[form] + more + "\n        return y"
        return self._class(title, own + init, "x", body)

    def _mlp(self):
        number, chosen = len(self._parts), self._one(ACTIVATIONS)
        if self._is(0.6):
            chosen = self._one(list(ACTIVATIONS)[:6])
        value, init = ACTIVATIONS[chosen], []
        for name in ("self.act", "self._beta", "self.beta", "self._limit"):
            if value is not None and name in chosen:
                init.append(f"{name} = {value}")
        if value == "Swish()":
            self._parts.append(SWISH)
        bias = self._is(0.3)
        more_init, more = self._extras(0.25)
        form = self._one(("two", "two", "two", "one", "turned", "plain"))
        up = f"nn.Linear(n, 2 * n, bias={bias})"
        down = f"self.down = nn.Linear(2 * n, n, bias={bias})"
        if form == "plain":
            layers = [f"self.up = {up}", down]
            body = f"\n        g = self.up(x)\n        y = {chosen.strip()}"
        elif form == "one":
            layers = [f"self.both = nn.Linear(n, 4 * n, bias={bias})", down]
            body = (
                f"\n        g, u = self.both(x).chunk(2, dim=-1)\n        y = {chosen.strip()} * u"
            )
        else:
            layers = [f"self.gate = {up}", f"self.up = {up}", down]
            pair = "{0} * self.up(x)" if form == "two" else "self.up(x) * ({0})"
            body = f"\n        g = self.gate(x)\n        y = {pair.format(chosen.strip())}"
        body += more + "\n        return self.down(y)"
        return self._class(f"Mlp{number}", [*layers, *init, *more_init], "x", body)

    def _attention(self):
        number = len(self._parts)
        form = self._one(("linear", "rope", "rope", "attention"))
        if form == "linear":
            body = "\n        y = torch.tanh(self.q(x))\n        return self.down(y)"
            layers = ["self.q = nn.Linear(n, n)", "self.down = nn.Linear(n, n)"]
            return self._class(f"Part{number}", layers, "x", body)
        rotation = ROTATIONS[self._one_of(("half",), ROTATIONS)]
        self._parts.append(
            "def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):\n"
            "    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)\n"
            f"    return tuple({rotation} for x in (q, k))\n\n\n"
            if rotation != ROTATIONS["half"]
            else "def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):\n"
            "    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)\n"
            "    return q * cos + turned(q) * sin, k * cos + turned(k) * sin\n\n\n"
        )
        extra = self._one(("", "", ", 1", ", unsqueeze_dim=1"))
        causal = self._one(("True", "False"))
        body = f"""
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.q(x).chunk(3, -1))
        cos, sin = angles(x, q.shape[-1])
        q, k = apply_rotary_pos_emb(q, k, cos, sin{extra})
        y = F.scaled_dot_product_attention(q, k, v, is_causal={causal})
        return self.down(y.transpose(1, 2).flatten(-2))"""
        layers = ["self.q = nn.Linear(n, 3 * n)", "self.down = nn.Linear(n, n)"]
        return self._class(f"Attention{number}", layers, "x", body)

    def _layer(self, norms, mlp, attention):
        form = self._one_of(USUAL_LAYERS, LAYERS, 0.5)
        self._form = form
        first, second = self._one(norms), self._one(norms)
        init = [
            f"self.first, self.second, self.third = {first}(n), {second}(n), {first}(n)",
            f"self.attn, self.mlp = {attention}(n), {mlp}(n)",
        ]
        if form == "private":
            init.append("self.__factor = 0.5")
        rest = "\n    def rest(self, x):\n        return self.mlp(self.second(x))\n"
        arguments = "x, memory=None"
        return self._class(
            f"Layer{len(self._parts)}",
            init,
            arguments,
            LAYERS[form],
            more=rest if "self.rest" in LAYERS[form] else "",
        )

    def _model(self, layer, norms):
        loss = LOSSES[self._one_of(("plain", "logits"), LOSSES, 0.5)]
        run = self._one(("layer(x)",) * 4 + ("checkpoint(layer, x, use_reentrant=False)",))
        if self._is(0.1):
            run = "again(layer, x, use_reentrant=True)"
        if self._form in WRITING:
            # Torch does not see there that saved tensors were written to, and gradients are wrong.
            run = "layer(x)"
        return f"""class Model(nn.Module):
    def __init__(self, n=HIDDEN):
        super().__init__()
        self.layers = nn.ModuleList({layer}(n) for _ in range({self._one((1, 2))}))
        self.norm = {self._one(norms)}(n)
        self.head = nn.Linear(n, VOCABULARY, bias={self._is(0.3)})
        self.criterion = nn.CrossEntropyLoss()
        self.register_buffer("class_weight", torch.linspace(0.5, 1.5, VOCABULARY))

    def forward(self, x, labels):
        for layer in self.layers:
            x = {run}
        logits = self.head(self.norm(x)).flatten(0, 1)
        labels = labels.flatten()
        return {loss}


"""


BARE = "\n    pass"
EPSILONS = (1e-6, 1e-5, 1e-3)
