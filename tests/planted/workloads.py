"""Workloads, each with one fault or without: `run(machine, faulty)`; what differs is the fault.

Without its fault each keeps the GPU busy: the host is far ahead, so that all idle time is what the
GPU needs between two kernels.
"""

from dataclasses import dataclass

from tests.planted.machine import US

STEPS = 4
KERNELS = 30
LONG, SHORT = 60 * US, 3 * US


@dataclass(frozen=True)
class Planted:
    """A workload, the cause that its fault has, and whether Python's stacks are recorded."""

    run: object
    cause: str
    stacks: bool = False


def forward(machine, number=KERNELS, ns=LONG):
    with machine.phase("forward"), machine.module("model"):
        for _ in range(number):
            machine.kernel("aten::mm", ns)


def backward(machine, number=KERNELS, ns=LONG, *, between=None):
    """Run a backward pass on autograd's thread, while the calling one waits in it."""
    with machine.phase("backward"):
        machine.run(20 * US)
        with machine.on_thread(101):
            for i in range(number):
                machine.kernel("aten::mm", ns)
                if between and i == number // 2:
                    between()
        machine.run(10 * US)


def train(machine, *, before=None, amid=None, in_backward=None, after=None, warm=True):
    """Train a few steps; the arguments are what happens at these places of each step."""
    if warm:
        forward(machine)
    for number in range(STEPS):
        with machine.step(number):
            for part in (before, forward, amid, forward):
                if part:
                    part(machine)
            backward(machine, between=in_backward)
            with machine.phase("optimizer"):
                machine.kernel("aten::_foreach_add_", LONG)
            if after:
                after(machine)
            machine.run(20 * US)


def item_every_step(machine, faulty):
    train(machine, after=type(machine).item if faulty else None)


def item_amid_the_forward(machine, faulty):
    train(machine, amid=type(machine).item if faulty else None)


def item_before_many_short_kernels(machine, faulty):
    def update(machine):
        with machine.phase("optimizer"):
            for _ in range(100):
                machine.kernel("aten::add_", SHORT)
        if faulty:
            machine.item()

    train(machine, after=update)


def mask_in_every_layer(machine, faulty):
    def nonzero(machine):
        with machine.op("aten::nonzero"):
            machine.run(2 * US)
            machine.launch("count_nonzero", 2 * US)
            if faulty:
                machine.copy("Memcpy DtoH (Device -> Pageable)", 1 * US, waits=True)
                machine.wait_for_gpu()

    train(machine, before=nonzero, amid=nonzero)


def explicit_synchronize(machine, faulty):
    train(machine, after=lambda m: m.wait_for_gpu("cudaDeviceSynchronize") if faulty else None)


def result_to_the_host(machine, faulty):
    def fetch(machine):
        with machine.op("aten::to"), machine.op("aten::copy_"):
            machine.copy("Memcpy DtoH (Device -> Pageable)", 100 * US, waits=faulty)
            if faulty:
                machine.wait_for_gpu()

    train(machine, after=fetch)


def item_in_a_gradients_hook(machine, faulty):
    train(machine, in_backward=machine.item if faulty else None)


def item_after_every_graph(machine, faulty):
    machine.graph(100, 20 * US)
    for number in range(2 * STEPS):
        with machine.step(number), machine.phase("forward"):
            machine.run(15 * US)
            machine.graph(100, 20 * US)
            if faulty:
                machine.item()


def slow_loader(machine, faulty):
    def load(machine):
        with machine.phase("data"):
            machine.run(20_000 * US if faulty else 40 * US)

    train(machine, before=load)


def slow_loader_of_a_foreign_trace(machine, faulty):
    forward(machine)
    for number in range(STEPS):
        with machine.span("user_annotation", f"ProfilerStep#{number}"):
            with machine.span("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__"):
                machine.run(20_000 * US if faulty else 40 * US)
            for _ in range(3 * KERNELS):
                machine.kernel("aten::mm", LONG)


def loader_that_waits_for_its_workers(machine, faulty):
    def load(machine):
        loader = "torch/utils/data/dataloader.py(720): __next__"
        poll = "<built-in method poll of select.poll object at 0x7f>"
        with machine.python("train.py(10): main"), machine.python(loader), machine.python(poll):
            machine.run(20_000 * US if faulty else 30 * US)

    train(machine, before=load)


def pageable_batches(machine, faulty):
    train(machine, before=lambda m: m.upload(400 * US, pinned=not faulty))


def pageable_copies_of_masks(machine, faulty):
    train(machine, amid=lambda m: m.upload(5 * US, pinned=not faulty))


def allocates_every_step(machine, faulty):
    def allocate(machine):
        with machine.op("aten::empty"):
            machine.run(2 * US)
            if faulty:
                machine.call("cudaMalloc", 9_000 * US)

    train(machine, amid=allocate)


def frees_and_allocates_again(machine, faulty):
    def retry(machine):
        with machine.op("aten::empty"):
            machine.run(2 * US)
            for _ in range(5 if faulty else 0):
                machine.wait_for_gpu("cudaFree", longer_ns=150 * US)
            if faulty:
                machine.call("cudaMalloc", 300 * US)

    train(machine, amid=retry)


def pins_memory_every_step(machine, faulty):
    def pin(machine):
        with machine.phase("data"):
            if faulty:
                machine.call("cudaHostAlloc", 15_000 * US)
            machine.run(20 * US)

    train(machine, before=pin)


def kernels_too_short(machine, faulty):
    ns = SHORT if faulty else LONG
    if not faulty:
        forward(machine)
    for number in range(STEPS):
        with machine.step(number):
            forward(machine, 2 * KERNELS, ns)
            backward(machine, 2 * KERNELS, ns)


def python_between_launches(machine, faulty):
    def think(machine):
        with machine.phase("forward"), machine.module("model"):
            machine.run(9_000 * US if faulty else 20 * US)

    train(machine, amid=think)


def python_amid_stacks(machine, faulty):
    def think(machine):
        with machine.python("train.py(44): augment"):
            machine.run(9_000 * US if faulty else 20 * US)

    train(machine, amid=think)


def slow_operators_of_the_host(machine, faulty):
    def sort(machine):
        with machine.op("aten::sort"):
            machine.run(9_000 * US if faulty else 20 * US)

    train(machine, amid=sort)


def waits_for_an_event_of_elsewhere(machine, faulty):
    def other_stream(machine):
        if faulty:
            machine.hold(20, machine.free[7] + 2_000 * US)
        end = machine.kernel("aten::mm", LONG, stream=20)
        machine.hold(7, end)

    train(machine, amid=other_stream)


def waits_for_a_collective_of_another_stream(machine, faulty):
    def reduce(machine):
        with machine.op("c10d::allreduce_"):
            machine.hold(30, machine.free[7])
            end = machine.launch("ncclDevKernel_AllReduce_Sum_bf16", 300 * US, stream=30)
        machine.hold(7, end + (150 * US if faulty else 0))

    train(machine, amid=reduce)


def barrier_in_every_step(machine, faulty):
    def barrier(machine):
        with machine.op("c10d::barrier"):
            machine.run(5 * US)
            machine.wait_for_gpu(longer_ns=3_000 * US)

    train(machine, after=barrier if faulty else None)


def profiler_wants_a_buffer(machine, faulty):
    def more(machine):
        with (
            machine.op("aten::mm"),
            machine.span("cuda_runtime", "cudaLaunchKernel", correlation=0),
        ):
            if faulty:
                machine.overhead("Activity Buffer Request", 12_000 * US)
            machine.run(4 * US)

    train(machine, amid=more)


def serve(machine, wait):
    for number in range(2 * STEPS):
        with machine.step(number):
            forward(machine)
        wait(machine)


def waits_for_requests(machine, faulty):
    serve(machine, lambda m: m.run(8_000 * US if faulty else 30 * US))


def waits_for_requests_with_stacks(machine, faulty):
    def wait(machine):
        acquire = "<built-in method acquire of _thread.lock object at 0x7f>"
        with machine.python("serve.py(30): next_request"), machine.python(acquire):
            machine.run(8_000 * US if faulty else 30 * US)

    serve(machine, wait)


def sleeps_in_a_step(machine, faulty):
    def sleep(machine):
        sleep = machine.python("<built-in function sleep>")
        with machine.python("train.py(51): throttle"), sleep:
            machine.run(9_000 * US if faulty else 20 * US)

    train(machine, amid=sleep)


PLANTED = {
    run.__name__: Planted(run, cause, stacks)
    for cause, stacks, run in (
        ("synchronization", False, item_every_step),
        ("synchronization", False, item_amid_the_forward),
        ("synchronization", False, item_before_many_short_kernels),
        ("synchronization", False, mask_in_every_layer),
        ("synchronization", False, explicit_synchronize),
        ("synchronization", False, result_to_the_host),
        ("synchronization", False, item_in_a_gradients_hook),
        ("synchronization", False, item_after_every_graph),
        ("data loading", False, slow_loader),
        ("data loading", False, slow_loader_of_a_foreign_trace),
        ("data loading", True, loader_that_waits_for_its_workers),
        ("pageable copy", False, pageable_batches),
        ("pageable copy", False, pageable_copies_of_masks),
        ("allocator", False, allocates_every_step),
        ("allocator", False, frees_and_allocates_again),
        ("allocator", False, pins_memory_every_step),
        ("launch-bound", False, kernels_too_short),
        ("launch-bound", False, python_between_launches),
        ("launch-bound", True, python_amid_stacks),
        ("launch-bound", False, slow_operators_of_the_host),
        ("dependency wait", False, waits_for_an_event_of_elsewhere),
        ("collective wait", False, waits_for_a_collective_of_another_stream),
        ("collective wait", False, barrier_in_every_step),
        ("profiler", False, profiler_wants_a_buffer),
        ("no work", False, waits_for_requests),
        ("no work", True, waits_for_requests_with_stacks),
        ("no work", True, sleeps_in_a_step),
    )
}
