"""Coroutines and generators leave the model in the middle of its calls, and come back later."""

import asyncio

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
model = torch.nn.Linear(4, 4).eval()


class Streaming(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.inner(x)
            yield x

    async def generate(self, x):
        await asyncio.sleep(0)
        return self.inner(x)


streaming = Streaming().eval()


@torch.inference_mode()
async def serve(number):
    x = torch.full((1, 4), float(number))
    await asyncio.sleep(0)
    x = model(await streaming.generate(x))
    for y in streaming(x):
        await asyncio.sleep(0)
        x = x + y
    return x.sum().item()


async def main():
    print(await asyncio.gather(*(serve(number) for number in range(12))))


asyncio.run(main())
unfinished = streaming(torch.ones(1, 4))
print(next(unfinished).tolist())
