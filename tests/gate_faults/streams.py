"""RMSNorm that is wrong about streams and graphs: these need a CUDA device."""

import torch

from .norms import rmsnorm


def on_the_default_stream():
    """Launch where the caller's inputs may not be ready yet."""

    def fault(x, weight):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return rmsnorm(x, weight)

    return fault


def on_a_stream_of_its_own():
    """Launch beside the caller's stream, which waits for nothing."""
    streams = []

    def fault(x, weight):
        streams[:] = streams or [torch.cuda.Stream()]
        with torch.cuda.stream(streams[0]):
            return rmsnorm(x, weight)

    return fault


def captured_as_a_constant():
    """Hand a graph what was computed before it was captured."""
    last = {}

    def fault(x, weight):
        if torch.cuda.is_current_stream_capturing() and x.shape in last:
            return last[x.shape]
        last[x.shape] = rmsnorm(x, weight)
        return last[x.shape].clone()

    return fault


FAULTS = (on_the_default_stream, on_a_stream_of_its_own, captured_as_a_constant)
