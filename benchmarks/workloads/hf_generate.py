"""Answer prompts of 128 tokens with 32 new ones each, through `generate` of transformers.

The weights are random, so the answers mean nothing, but every call does the work of a real one.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FULL = {"layers": 2, "width": 2048, "heads": 32, "kv_heads": 8, "prompt": 128, "new": 32}
TINY = {"layers": 1, "width": 64, "heads": 4, "kv_heads": 2, "prompt": 8, "new": 4}


def build_model(size, device):
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=size["width"],
        intermediate_size=4 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["kv_heads"],
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()

    size = TINY if args.tiny else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = build_model(size, device)
    for _ in range(args.calls):
        prompt = torch.randint(1, 32_000, (1, size["prompt"]), device=device)
        answer = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=size["new"],
            do_sample=False,
        )
    print(f"{args.calls} calls, the last of {answer.shape[1]} tokens")


if __name__ == "__main__":
    main()
