"""Train a Llama of about 1 billion parameters (8 layers of 2048) on random tokens, in bf16."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FULL = {"layers": 8, "width": 2048, "heads": 32, "kv_heads": 8, "tokens": 1024, "batch": 4}
TINY = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "tokens": 32, "batch": 2}


def build_model(size, device):
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=size["width"],
        intermediate_size=4 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(device, torch.bfloat16)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()

    size = TINY if args.tiny else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build_model(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(args.steps):
        tokens = torch.randint(32_000, (size["batch"], size["tokens"]), device=device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
