"""A GAN steps two optimizers in an iteration; its discriminator is called twice in each."""

# recorded: 7 8 9
# seen: 9

import torch
from torch.nn.functional import softplus

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
generator = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
critic = torch.nn.Linear(4, 1)
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
for _ in range(10):
    of_critic.zero_grad()
    made = generator(torch.randn(8, 4))
    (softplus(critic(made.detach())) + softplus(-critic(torch.randn(8, 4)))).mean().backward()
    of_critic.step()
    of_generator.zero_grad()
    loss = softplus(-critic(made)).mean()
    loss.backward()
    of_generator.step()
print(loss.item(), [p.sum().item() for p in generator.parameters()])
