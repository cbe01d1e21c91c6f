"""A server of trio infers and trains in threads of its own, and starts a subprocess."""

# recorded: 3 of them
# needs: trio

import functools
import subprocess

import torch
import trio

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
torch.set_default_device(device)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
small = torch.nn.Linear(4, 4).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
answers = {}


def infer(number):
    with torch.inference_mode():
        return small(torch.full((2, 4), float(number), device=device)).sum().item()


def train(num_steps):
    for _ in range(num_steps):
        loss = model(torch.ones(2, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trio.from_thread.run_sync(functools.partial(answers.update, training=loss.item()))


async def answer(stream):
    found = await trio.to_thread.run_sync(infer, (await stream.receive_some())[0])
    await stream.send_all(b"%r" % found)


async def request(port, number):
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(bytes([number]))
        answers[number] = await stream.receive_some()


async def main():
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, answer, 0)
        port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as clients:
            clients.start_soon(trio.to_thread.run_sync, train, 12)
            for number in range(8):
                clients.start_soon(request, port, number)
        nursery.cancel_scope.cancel()
    print(sorted(answers.items(), key=str))
    done = await trio.run_process(("echo", "7"), capture_stdout=True, stderr=subprocess.DEVNULL)
    print(done.stdout, done.returncode)


trio.run(main)
print("closed")
