"""Train with one CUDA graph that holds the whole step: forward, backward and optimizer."""

import argparse

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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    torch.manual_seed(0)
    model = build_model(size).to(device, torch.bfloat16)
    tokens = torch.randint(VOCABULARY, (size["batch"], size["tokens"]), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=has_gpu)

    def train():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        optimizer.step()

    step = train
    if has_gpu:
        # Libraries allocate on their first calls, which a capture forbids.
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                train()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train()
        step = graph.replay
    for _ in range(args.steps):
        step()
    if has_gpu:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
