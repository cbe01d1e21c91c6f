"""Generate tokens greedily with a key-value cache: one call of the model for each new token.

Profile it:  kprof run examples/generate.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    """A transformer layer that keeps the keys and values of what it has seen."""

    def __init__(self, width, num_heads, batch, longest):
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        cache = torch.zeros(2, batch, num_heads, longest, width // num_heads)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x, start):
        batch, length, width = x.shape
        num_heads = self.cache.shape[2]
        heads = self.qkv(self.norm(x)).view(batch, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = start + length
        self.cache[:, :, :, start:seen] = heads[1:]
        k, v = self.cache[:, :, :, :seen]
        # A single new token may look at everything before it, so only the prompt needs the mask.
        mixed = F.scaled_dot_product_attention(heads[0], k, v, is_causal=length > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.feed_norm(x))


class Decoder(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, width, num_layers, batch, longest, vocabulary=2048):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, 4, batch, longest) for _ in range(num_layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, start):
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x, start)
        return self.head(x[:, -1])


@torch.inference_mode()
def generate(model, prompt, num_new):
    """Return the prompt followed by the most likely `num_new` tokens."""
    tokens, start = prompt, 0
    for _ in range(num_new):
        following = model(tokens[:, start:], start).argmax(-1, keepdim=True)
        start = tokens.shape[1]
        tokens = torch.cat((tokens, following), dim=1)
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens to generate")
    parser.add_argument("--prompt", type=int, default=64, help="tokens in the prompt")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    longest = args.prompt + args.tokens
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Decoder(args.width, args.layers, args.batch, longest).to(device, dtype).eval()
    prompt = torch.randint(2048, (args.batch, args.prompt), device=device)
    tokens = generate(model, prompt, args.tokens)
    print("last tokens:", tokens[0, -8:].tolist())


if __name__ == "__main__":
    main()
