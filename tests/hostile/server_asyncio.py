"""A server of asyncio infers and trains in an executor's threads, and starts a subprocess."""

# recorded: 3 of them

import asyncio

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_default_device(device)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
small = torch.nn.Linear(4, 4).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def infer(number):
    with torch.inference_mode():
        return small(torch.full((2, 4), float(number), device=device)).sum().item()


def train(num_steps):
    for _ in range(num_steps):
        loss = model(torch.ones(2, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


async def answer(reader, writer):
    number = int(await reader.readline())
    found = await asyncio.to_thread(infer, number)
    writer.write(b"%r\n" % found)
    await writer.drain()
    writer.close()


async def request(port, number):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"%d\n" % number)
    found = await reader.readline()
    writer.close()
    return float(found)


async def main():
    loop = asyncio.get_running_loop()
    training = loop.run_in_executor(None, train, 12)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    print(await asyncio.gather(*(request(port, number) for number in range(8))))
    print(await training, type(loop).__module__)
    child = await asyncio.create_subprocess_exec("echo", "7", stdout=asyncio.subprocess.PIPE)
    print(await child.communicate(), child.returncode)
    server.close()
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())
    print("closed")
