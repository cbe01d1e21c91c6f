"""Generate with a static cache, for which transformers compiles the model into CUDA graphs.

The weights are random, so the answers mean nothing, but every call does the work of a real one.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FULL = {"layers": 4, "width": 2048, "heads": 16, "prompt": 128, "new": 32}
TINY = {"layers": 1, "width": 64, "heads": 4, "prompt": 8, "new": 4}
VOCABULARY = 32_000


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()
    size = TINY if args.tiny else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size["width"],
        intermediate_size=4 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"],
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    for _ in range(args.calls):
        prompt = torch.randint(1, VOCABULARY, (1, size["prompt"]), device=device)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=size["new"],
            do_sample=False,
            cache_implementation="static",
        )


if __name__ == "__main__":
    main()
