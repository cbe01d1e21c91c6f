"""A TransformerEncoder takes torch's fused fast path, which hooks on its modules would end."""

# seen: 9

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
fused, num_fused = torch._transformer_encoder_layer_fwd, 0


def counting(*args):
    global num_fused
    num_fused += 1
    return fused(*args)


torch._transformer_encoder_layer_fwd = counting
layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2).eval()
with torch.inference_mode():
    for _ in range(9):
        out = model(torch.ones(1, 3, 8))
print(num_fused, out.sum(-1).tolist())
