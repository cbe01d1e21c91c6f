"""torch.profiler of the script's own with a schedule: its traces are complete and its own."""

# recorded: 13 14 15
# seen: 25

import torch
from torch.profiler import ProfilerActivity, profile, schedule

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def ready(mine):
    rows = {row.key: row.count for row in mine.key_averages()}
    print(mine.step_num, len(mine.events()), sorted(rows.items()))


def train(num_steps, at_step=lambda: None):
    for _ in range(num_steps):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        at_step()


train(4)
plan = schedule(wait=1, warmup=1, active=2, repeat=2)
with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready) as mine:
    train(9, mine.step)
train(12)
with torch.autograd.profiler.profile() as old:
    torch.ones(2, 2) @ torch.ones(2, 2)
print([event.name for event in old.function_events])
