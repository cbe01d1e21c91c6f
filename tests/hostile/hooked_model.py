"""Hooks of the script's own on modules, tensors, optimizers and all modules at once."""

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
seen = []
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model[0].register_forward_hook(lambda module, args, out: out * 2)
model[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
model.register_full_backward_hook(lambda module, given, wanted: seen.append(len(given)))
optimizer.register_step_post_hook(lambda *_: seen.append("stepped"))
handle = torch.nn.modules.module.register_module_forward_hook(
    lambda module, args, out: seen.append(type(module).__name__)
)
model[0].weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
for step in range(10):
    if step == 6:
        handle.remove()
    loss = model(torch.ones(2, 4, requires_grad=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item(), seen)
