"""Calls of torch's attention, for tests of the swap."""

import torch
from torch import nn
from torch.nn import functional

NAME = "attention_forward"
KERNEL = f"{NAME}=kprof"


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def call_of(tokens=20, keys=None, query_heads=4, heads=2, dim=64):
    keys = tokens if keys is None else keys
    return (
        drawn(1, query_heads, tokens, dim),
        drawn(1, heads, keys, dim, seed=1),
        drawn(1, heads, keys, dim, seed=2),
    )


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = {"enable_gqa": True, **options}

    def forward(self, q, k, v, **more):
        return functional.scaled_dot_product_attention(q, k, v, **self.options, **more)


def ways_of(swap, kernel="attention_forward"):
    sites = [site for site in swap.sites if site.kernel == kernel]
    return [(one.num_calls, one.provider, one.why) for site in sites for one in site.calls]
