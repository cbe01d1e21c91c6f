"""vmap, grad, jvp and functional_call run a model with tensors that are not what they seem."""

# recorded: 3 of them

import torch
from torch.func import functional_call, grad, jacrev, jvp, vmap

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
parameters = dict(model.named_parameters())


def loss_of(parameters, x):
    return functional_call(model, parameters, (x,)).square().sum()


x = torch.randn(3, 4)
for _ in range(20):
    gradients = vmap(grad(loss_of), (None, 0))(parameters, x)
    out, tangent = jvp(model, (x,), (torch.ones(3, 4),))
    parameters = {name: p - 0.1 * gradients[name].mean(0) for name, p in parameters.items()}
print(jacrev(model)(x[0]).tolist(), tangent.tolist(), out.sum().item())
print([p.sum().item() for p in parameters.values()])
