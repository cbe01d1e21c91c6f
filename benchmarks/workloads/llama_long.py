"""Train a Llama shaped as 8B's on one long sequence of random tokens, in bfloat16.

With fewer layers it has as much smaller a vocabulary, so that every part of a step takes the share
of it that it takes of the whole model's.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import serve_llama

LAYERS, VOCABULARY = 32, 128_256


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()

    size = {"layers": args.layers, "width": 4_096, "vocabulary": VOCABULARY * args.layers // LAYERS}
    size = serve_llama.TINY if args.tiny else size
    model = serve_llama.built(**size).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(size["vocabulary"], (1, args.tokens), device=model.device)
    for _ in range(args.steps):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
