"""Serve a Llama of Hugging Face, with random weights: read prompts, or decode the next tokens.

By default it has the shape of Llama-3.1-8B. A step reads a batch of prompts, or decodes a token for
each sequence of a batch, whose cache holds a prompt; the cache is as it was before the next step.

kprof ab --swap fp8_linear,rmsnorm,add_rmsnorm,swiglu examples/serve_llama.py prefill
kprof ab --swap fp8_linear,decode_attention examples/serve_llama.py decode
kprof ab --patch examples/serve_llama.py:kernels examples/serve_llama.py decode --graphs
"""

import argparse
import contextlib
import sys

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kprof

# Norms and SwiGLU are there as they cast for the layers in FP8 that read them.
KERNELS = ("fp8_linear", "rmsnorm", "add_rmsnorm", "swiglu", "decode_attention")
TINY = {"layers": 2, "width": 256, "vocabulary": 512}
# Which of two captured graphs is replayed; `kernels` changes it.
replayed = "plain"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("prefill", "decode"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--graphs", action="store_true", help="decode by replays of CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    args = parser.parse_args()

    size = {name: getattr(args, name) for name in TINY} | (TINY if args.tiny else {})
    model = built(**size)
    torch.manual_seed(1)
    prompts = torch.randint(size["vocabulary"], (args.batch, args.prompt), device=model.device)
    with torch.no_grad():
        if args.what == "prefill":
            step = reading(model, prompts)
        elif args.graphs:
            step = replaying(model, prompts)
        else:
            step = decoding(model, prompts)
        for _ in range(args.steps):
            tokens = step()
    print(f"the next tokens: {tokens.flatten().tolist()[:8]}")


def built(layers, width, vocabulary):
    """Return the model: heads of 128 columns, four query heads to a head of keys."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 128),
        num_key_value_heads=max(1, width // 512),
        head_dim=128,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        attn_implementation="sdpa",
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def reading(model, prompts):
    """Return what reads the prompts and tells the token behind each."""

    def step():
        cache = DynamicCache(config=model.config)
        logits = model(prompts, past_key_values=cache, logits_to_keep=1).logits
        return logits.argmax(-1)

    return step


def decoding(model, prompts):
    """Return what decodes a token, as `generate` does: with a cache that grows."""
    cache = DynamicCache(config=model.config)
    tokens = model(prompts, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

    def step():
        found = model(tokens, past_key_values=cache).logits.argmax(-1)
        cache.crop(-1)
        return found

    return step


def replaying(model, prompts):
    """Return what replays one of two CUDA graphs: the model as it is, or with kernels in it."""
    length = prompts.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + 64)
    tokens = model(prompts, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

    def decode():
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)
        return model(tokens, past_key_values=cache).logits.argmax(-1)

    steps = {"plain": captured(decode)}
    with kprof.swapped(model, *KERNELS) as swap:
        steps["kernels"] = captured(decode)
    taken = [site for site in swap.sites if site.num_replaced]
    print(f"kernels took over in {len(taken)} of {len(swap.sites)} places")
    for why in {call.why for site in swap.sites for call in site.calls if call.why}:
        print(f"elsewhere: {why}")
    return lambda: steps[replayed]()


def captured(work):
    """Return the replay of a CUDA graph of this work, which returns what the work did."""
    if not torch.cuda.is_available():
        work()
        return work
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=aside):
        result = work()

    def replay():
        graph.replay()
        return result

    return replay


@contextlib.contextmanager
def kernels():
    """Let the running script replay the graph that was captured with kernels swapped in."""
    running = sys.modules["__main__"]
    running.replayed = "kernels"
    try:
        yield
    finally:
        running.replayed = "plain"


if __name__ == "__main__":
    main()
