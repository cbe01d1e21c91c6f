"""Train an 8-layer transformer whose forward and backward pass are one replayed CUDA graph.

Only the optimizer is launched kernel by kernel. Without a GPU the same pass runs as it is.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

FULL = {"layers": 8, "width": 1024, "heads": 16, "tokens": 256, "batch": 8}
TINY = {"layers": 2, "width": 64, "heads": 4, "tokens": 16, "batch": 2}
VOCABULARY = 8_192


def build_model(size):
    layer = nn.TransformerEncoderLayer(
        size["width"],
        size["heads"],
        dim_feedforward=4 * size["width"],
        dropout=0.0,
        batch_first=True,
        norm_first=True,
    )
    return nn.Sequential(
        nn.Embedding(VOCABULARY, size["width"]),
        nn.TransformerEncoder(layer, size["layers"], enable_nested_tensor=False),
        nn.Linear(size["width"], VOCABULARY),
    )


def forward_backward(model, tokens):
    """Leave fresh gradients in the parameters and return the loss."""
    model.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    return loss.detach()


def capture(model, tokens):
    """Return the pass as a function that replays its graph over the same buffers."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # libraries allocate on their first calls, which a capture forbids
            forward_backward(model, tokens)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = forward_backward(model, tokens)

    def replay():
        graph.replay()
        return loss

    return replay


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()

    size = TINY if args.tiny else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build_model(size).to(device, torch.bfloat16)
    tokens = torch.zeros(size["batch"], size["tokens"], dtype=torch.long, device=device)
    one_pass = (
        capture(model, tokens) if device == "cuda" else partial(forward_backward, model, tokens)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(args.steps):
        tokens.copy_(torch.randint(VOCABULARY, tokens.shape, device=device))
        loss = one_pass()
        optimizer.step()
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
