"""A DataLoader has workers, however they are started, that live on between epochs, and pins."""

# command: {python} {script} fork
# command: {python} {script} forkserver
# seen: 12

import sys

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Numbers(Dataset):
    def __init__(self):
        self.prepare = torch.nn.Linear(4, 4)
        torch.nn.init.eye_(self.prepare.weight)
        torch.nn.init.zeros_(self.prepare.bias)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        with torch.no_grad():
            return self.prepare(torch.full((4,), float(index))), get_worker_info().id


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(
        Numbers(),
        batch_size=2,
        num_workers=2,
        persistent_workers=True,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context=sys.argv[1],
    )
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for batch, workers in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item(), workers.tolist())
