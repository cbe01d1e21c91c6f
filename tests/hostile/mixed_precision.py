"""Autocast to bfloat16 with a GradScaler that leaves out the steps whose gradients overflow."""

import torch

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=3)
for step in range(12):
    with torch.autocast(device, dtype=torch.bfloat16):
        out = model(torch.ones(2, 8, device=device))
        loss = (out.float() - 1).square().mean() * (float("inf") if step in (2, 6) else 1)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(out.dtype, loss.item(), scaler.get_scale())
