"""Chains of element-wise operators, reductions and GEMMs that Inductor compiles."""

import math

import torch
from torch.nn import functional as F

ONE = (
    *(torch.exp, torch.tanh, torch.sigmoid, torch.sqrt, torch.abs, torch.erf, torch.sin),
    *(torch.log1p, torch.neg, torch.square, torch.rsqrt, F.gelu, F.silu, F.relu, F.softplus),
)
TWO = (torch.add, torch.mul, torch.sub, torch.div, torch.maximum, torch.pow, torch.atan2)
ALONG = (torch.sum, torch.mean, torch.amax, torch.var, torch.logsumexp)
WHOLE = (torch.softmax, torch.cumsum, torch.log_softmax)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def compiled_chain(chosen, size):
    """Return a name, a compiled call of a list of inputs, their shapes and their type."""
    dtype = chosen.choice(DTYPES)
    wanted = math.exp(chosen.uniform(*map(math.log, size)))
    number = chosen.choice((1, 2, 3))
    width = 1 << chosen.randrange(4, 14)
    rows = max(1, round(wanted / number / dtype.itemsize / width))
    steps = [chosen.choice(ONE + TWO) for _ in range(chosen.randrange(1, 8))]
    end = chosen.choice((None, None, *ALONG, *WHOLE))
    dim = chosen.choice((0, 1)) if end in ALONG else 1
    turned = chosen.random() < 0.2

    def chain(*inputs):
        x, rest = inputs[0], list(inputs)
        for place, step in enumerate(steps):
            y = rest[(place + 1) % len(rest)]
            x = step(x, y) if step in TWO else step(x)
        x = x.t().contiguous() if turned else x
        return x if end is None else end(x, dim=dim)

    compiled = torch.compile(chain, dynamic=False)
    words = [*(step.__name__ for step in steps), *([end.__name__] if end else [])]
    name = f"{'-'.join(words)} {str(dtype)[6:]} {rows}x{width}"

    @torch.no_grad()
    def call(inputs):
        return compiled(*inputs)

    return name, call, [(rows, width)] * number, dtype
