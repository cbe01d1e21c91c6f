"""Compare attention written out with the fused one, naming both, in a script you can edit.

`kprof.profile` records what runs inside it; `kprof.range` gives a part of it a name, and a range
called "step" is a step.

Run it:  python examples/api_profile.py && kprof open api_profile.kprof
"""

import argparse

import torch
import torch.nn.functional as F

import kprof


def attend_by_hand(q, k, v):
    """Return attention as the textbook has it: every score is written to memory."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    return scores.softmax(dim=-1) @ v


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--out", default="api_profile.kprof", help="folder for the recording")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8, args.tokens, 64, device=device, dtype=dtype)
    attend_by_hand(q, k, v)  # the first call chooses kernels, which is not what we ask about
    with kprof.profile(args.out):
        for _ in range(args.steps):
            with kprof.range("step"):
                with kprof.range("by hand"):
                    expected = attend_by_hand(q, k, v)
                with kprof.range("fused"):
                    mixed = F.scaled_dot_product_attention(q, k, v)
    print(f"largest difference: {(mixed - expected).abs().max().item():.2g}")


if __name__ == "__main__":
    main()
