"""A voice agent: a language model whose caller must hear the first 64 tokens within 100 ms.

It has the shape of Llama-3.2-1B, random weights, and answers one prompt at a time. `--serve` says
how; each way is also a function here, for
`kprof ab --patch voice_agent.py:cuda_graphs voice_agent.py`.
"""

import argparse
import contextlib
import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import kprof
from kprof.analyze.sla.targets import read_targets
from kprof.collect.generation import measure_generation
from kprof.commands.sla import json_of, judge_responses

# Tokens that are handed on at once where the GPU need not wait for the host after each.
CHUNK = 8
HEAD_DIM = 64


def rotate(q, k, cos, sin):
    """Return queries and keys turned by the angles of their places."""
    cos, sin = cos[:, None], sin[:, None]

    def turned(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(q), turned(k)


class Attention(nn.Module):
    """Attention of new tokens over everything that a cache has seen."""

    def __init__(self, width, heads, cached_heads):
        super().__init__()
        self.heads, self.cached_heads = heads, cached_heads
        self.qkv = nn.Linear(width, (heads + 2 * cached_heads) * HEAD_DIM, bias=False)
        self.out = nn.Linear(heads * HEAD_DIM, width, bias=False)

    def forward(self, x, cos, sin, cache):
        batch, length, _ = x.shape
        parts = [self.heads, self.cached_heads, self.cached_heads]
        q, k, v = self.qkv(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2).split(parts, 1)
        q, k = rotate(q, k, cos, sin)
        seen = cache.attend(q, k, v)
        return self.out(seen.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, width, inner):
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, width, heads, cached_heads, inner):
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.attention, self.mlp = Attention(width, heads, cached_heads), MLP(width, inner)

    def forward(self, x, cos, sin, cache):
        x = x + self.attention(self.attention_norm(x), cos, sin, cache)
        return x + self.mlp(self.norm(x))


class GrowingCache:
    """Keys and values of a layer, copied anew for every token."""

    def __init__(self):
        self.k = self.v = None

    def attend(self, q, k, v):
        """Return what new tokens get of all that was seen, themselves included."""
        is_prompt = self.k is None
        self.k = k if is_prompt else torch.cat((self.k, k), dim=2)
        self.v = v if is_prompt else torch.cat((self.v, v), dim=2)
        return F.scaled_dot_product_attention(
            q, self.k, self.v, is_causal=is_prompt, enable_gqa=True
        )


def look_masked(q, cache):
    """Attend to the keys that were written, with torch's attention and a mask."""
    groups = q.shape[1] // cache.k.shape[1]
    k, v = cache.k.repeat_interleave(groups, 1), cache.v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask)


def look_ours(q, cache):
    """Attend to the keys that were written, with kprof's kernel."""
    from kprof.kernels.decode_attention.decode_attention import decode_attention

    return decode_attention(q, cache.k, cache.v, cache.lengths)[0]


class StaticCache:
    """Keys and values of a layer in a place of fixed size, which new ones are written into."""

    def __init__(self, heads, longest, like, look):
        self.k, self.v = (like.new_zeros(1, heads, longest, HEAD_DIM) for _ in range(2))
        self.places = self.lengths = self.mask = None
        self.look = look

    def attend(self, q, k, v):
        """Return what new tokens get of all that was seen, themselves included."""
        self.k.index_copy_(2, self.places, k)
        self.v.index_copy_(2, self.places, v)
        if q.shape[2] > 1:  # The prompt comes first, so nothing is behind it.
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.look(q, self)


class Agent(nn.Module):
    """A language model that answers prompts greedily, in the way that `serve` names."""

    def __init__(self, layers, width, vocabulary, longest):
        super().__init__()
        heads = width // HEAD_DIM
        self.cached_heads = max(1, heads // 4)
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, self.cached_heads, 4 * width) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, 1e-5)
        turns = 500_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(longest), turns).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.longest = longest
        self.serve, self.num_tokens = "eager", 64
        self.made = {}

    def forward(self, tokens, places, caches, layers=None):
        """Return the most likely token after these, of shape (1, 1)."""
        cos, sin = self.cos[None, places], self.sin[None, places]
        x = self.embedding(tokens)
        for layer, cache in zip(layers or self.layers, caches, strict=True):
            x = layer(x, cos, sin, cache)
        logits = F.linear(self.norm(x[:, -1:]), self.embedding.weight)
        return logits.argmax(-1)

    @torch.inference_mode()
    def generate(self, prompt, streamer):
        """Hand the tokens of an answer to `streamer` as they come, after the prompt itself."""
        streamer.put(prompt)
        if self.serve not in self.made:
            self.made[self.serve] = WAYS[self.serve](self, prompt)
        for chunk in self.made[self.serve](prompt):
            streamer.put(chunk)


def growing_answers(agent, _):
    """Return the way that is written first: every token is waited for, and the cache grows."""

    def answer(prompt):
        caches = [GrowingCache() for _ in agent.layers]
        places = torch.arange(agent.longest, device=prompt.device)
        tokens, start = prompt, 0
        for _ in range(agent.num_tokens):
            end = start + tokens.shape[1]
            tokens, start = agent(tokens, places[start:end], caches), end
            yield tokens.tolist()[0]

    return answer


class StaticAnswers:
    """Answers through caches of fixed size; the two passes that it takes may be CUDA graphs."""

    def __init__(self, agent, prompt, look=look_masked, layers=None, is_captured=False):
        self.agent, self.layers, self.length = agent, layers, prompt.shape[1]
        like = agent.embedding.weight
        self.caches = [
            StaticCache(agent.cached_heads, agent.longest, like, look) for _ in agent.layers
        ]
        self.places = torch.arange(agent.longest, device=prompt.device)
        self.prompt, self.token = prompt.clone(), prompt[:, :1].clone()
        self.place = self.places[self.length : self.length + 1].clone()
        self.said = prompt.new_zeros(agent.longest)
        passes = self._read_prompt, self._say_next
        self.first, self.next = map(captured, passes) if is_captured else passes

    def __call__(self, prompt):
        """Yield the tokens of an answer, some at a time."""
        self.prompt.copy_(prompt)
        self.first()
        start, number = self.length - 1, self.agent.num_tokens
        for done in range(0, number, CHUNK):
            size = min(CHUNK, number - done)
            # The prompt's pass says the first token.
            for _ in range(size if done else size - 1):
                self.next()
            yield self.said[start + done : start + done + size].tolist()

    def _read_prompt(self):
        self._go_on(self.prompt, self.places[: self.length])
        self.place.fill_(self.length)

    def _say_next(self):
        self._go_on(self.token, self.place)
        self.place.add_(1)

    def _go_on(self, tokens, places):
        """Compute the token after these, and keep it where it was said."""
        lengths, mask = places[-1:].int() + 1, (self.places <= places[-1])[None, None, None]
        for cache in self.caches:
            cache.places, cache.lengths, cache.mask = places, lengths, mask
        self.token.copy_(self.agent(tokens, places, self.caches, self.layers))
        self.said.index_copy_(0, places[-1:], self.token[0])


def captured(work):
    """Return what replays the work as one CUDA graph; without a GPU, the work itself."""
    if not torch.cuda.is_available():
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def swapped_answers(agent, prompt):
    """Return a way whose graphs hold kernels of kprof's library."""
    with kprof.swapped(agent, "rmsnorm", "add_rmsnorm", "swiglu", "rope") as swap:
        answer = StaticAnswers(agent, prompt, look_ours, is_captured=True)
    print(f"{len(swap.replaced)} sites swapped", file=sys.stderr)
    for site in swap.skipped:
        print(f"{site.name}: no {site.kernel}, {site.skipped}", file=sys.stderr)
    return answer


def compiled_answers(agent, prompt, look=look_masked, options=None):
    """Return a way whose graphs hold layers that torch.compile has rewritten."""
    layers = [torch.compile(layer, dynamic=False, options=options) for layer in agent.layers]
    return StaticAnswers(agent, prompt, look, layers, is_captured=True)


TUNED = {"coordinate_descent_tuning": True}
WAYS = {
    "eager": growing_answers,
    "static": StaticAnswers,
    "cuda_graphs": partial(StaticAnswers, is_captured=True),
    "graphs_of_swapped_kernels": swapped_answers,
    "graphs_of_compiled_layers": compiled_answers,
    "tuned": partial(compiled_answers, options=TUNED),
    "tuned_with_our_attention": partial(compiled_answers, look=look_ours, options=TUNED),
}


@contextlib.contextmanager
def served(way):
    """Let the agent of the script answer in another way."""
    agent = sys.modules["__main__"].agent
    before, agent.serve = agent.serve, way
    yield
    agent.serve = before


def __getattr__(way):
    """Return the context manager of a way."""
    if way not in WAYS:
        raise AttributeError(way)
    return partial(served, way)


class Listener:
    """Keeps the tokens that it is handed, without the prompt."""

    def __init__(self):
        self.tokens = None

    def put(self, chunk):
        """Take tokens."""
        if self.tokens is None:
            self.tokens = []
        else:
            self.tokens += chunk


def build(args):
    """Return the agent on its device, and prompts for it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    longest = 8 * math.ceil((args.context + args.tokens) / 8)
    with torch.device(device):
        agent = Agent(args.layers, args.width, args.vocabulary, longest).to(torch.bfloat16).eval()
        for parameter in agent.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        prompts = torch.randint(args.vocabulary, (args.requests, 1, args.context))
    agent.serve, agent.num_tokens = args.serve, args.tokens
    return agent, list(prompts)


def parse():
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=WAYS, default="eager", help="how to answer")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--target", default="ttf64_p99<=100ms", help="for --sla")
    parser.add_argument("--sla", type=Path, metavar="FILE", help="judge the target, write JSON")
    # A p99 takes 459 of the longest slow spell: see "Slow spells" in docs/sla.md.
    parser.add_argument("--spell", type=float, default=1.0, help="longest slow spell, s, for --sla")
    parser.add_argument("--seconds", type=float, default=0.0, help="repeat the requests so long")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    agent, prompts = build(args)
    if args.sla:
        warm_up = max(3, args.requests // 20)
        least = {"num_warm_up": warm_up, "least_s": args.seconds}
        run = measure_generation(agent.generate, prompts, **least)
        targets = read_targets([args.target])
        judged = judge_responses([run], targets, num_gpus=1, spell_s=args.spell)
        args.sla.write_bytes(json_of(judged))
        (found,) = judged.assessment.judgements
        print(f"{found.verdict}: {found.why}")
        if found.load_s_needed and found.load_s_needed > args.seconds:
            print(f"it takes --seconds {found.load_s_needed:.0f}, or a shorter --spell")
    else:
        for prompt in prompts:
            listener = Listener()
            agent.generate(prompt, listener)
        print("last tokens:", listener.tokens[-8:])
