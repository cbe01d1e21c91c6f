"""A forked child runs torch's profiler itself, in whatever stage its parent is."""

import os

import torch
from torch.profiler import ProfilerActivity, profile

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    if step in (0, 3, 6, 11):
        told, tell = os.pipe()
        pid = os.fork()
        # Python 3.12 warns the parent of its threads; the child's own warnings come after that.
        os.close(tell)
        if pid == 0:
            os.read(told, 1)
            with profile(activities=[ProfilerActivity.CPU]) as mine:
                for _ in range(3):
                    torch.ones(2, 2) @ torch.ones(2, 2)
            rows = {row.key: row.count for row in mine.key_averages()}
            print(step, sorted(rows.items()), flush=True)
            os._exit(len(mine.events()))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
