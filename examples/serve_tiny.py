"""A tiny inference service: an HTTP server, and the model in an engine process of its own.

Record it while it runs: kprof run --trigger file examples/serve_tiny.py --port 8000
"""

from __future__ import annotations

import argparse
import multiprocessing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from threading import Lock

import torch
from torch import nn


class Model(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 256)
        self.head = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, 8) for x of (batch, 64)."""
        return self.head(self.hidden(x).relu())


@torch.inference_mode()
def run_engine(requests: Connection, other_end: Connection) -> None:
    """Answer requests, each the number of rows of a batch, until the other end is closed."""
    other_end.close()
    torch.manual_seed(0)
    model = Model().eval()
    while True:
        try:
            num_rows = requests.recv()
        except EOFError:
            return
        requests.send(model(torch.ones(num_rows, 64)).argmax(dim=1).tolist())


def serve(port: int, start_method: str) -> None:
    """Serve GET /ROWS until the process is ended; `port` 0 is any that is free."""
    context = multiprocessing.get_context(start_method)
    requests, engine_end = context.Pipe()
    engine = context.Process(target=run_engine, args=(engine_end, requests), daemon=True)
    engine.start()
    engine_end.close()
    one_at_a_time = Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with one_at_a_time:
                requests.send(int(self.path.strip("/") or 1))
                answer = requests.recv()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"{answer}\n".encode())

        def log_message(self, *arguments: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--start-method", default="spawn", choices=("spawn", "fork", "forkserver"))
    arguments = parser.parse_args()
    serve(arguments.port, arguments.start_method)
