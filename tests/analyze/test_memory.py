"""The peak of memory: found in the allocator's history, with one holder for every byte."""

from hypothesis import given
from hypothesis import strategies as some

from kprof.analyze.memory import Block, DeviceHistory, Event, Frame, Note, Range, find_peak

OPTIMIZER = Frame("/lib/site-packages/torch/optim/adamw.py", 9, "_init_group")
UPDATE = Frame("/lib/site-packages/torch/optim/adamw.py", 99, "_multi_tensor_adamw")
LINEAR = Frame("/lib/site-packages/torch/nn/modules/linear.py", 9, "forward")
MODEL = Frame("/home/me/model.py", 30, "forward")
MADE = Frame("/lib/site-packages/torch/nn/modules/linear.py", 1, "__init__")
BUILD = Frame("/home/me/model.py", 5, "build")
BACKWARD = Frame("/lib/site-packages/torch/_tensor.py", 600, "backward")


def alloc(address, size, time_ns=None, *frames):
    return Event("alloc", address, size, time_ns, frames)


def freed(address, size, time_ns=None):
    return Event("free_requested", address, size, time_ns)


def history(*events, blocks=(), reserved=1 << 20):
    return DeviceHistory(0, events, tuple(blocks), reserved)


def holders(peak):
    return {(one.category, one.place): one.num_bytes for one in peak.holders}


def test_the_peak_is_where_most_bytes_were_asked_for():
    peak = find_peak(
        history(
            alloc(1, 100),
            alloc(2, 30),
            freed(1, 100),
            alloc(3, 60),
            blocks=[Block(2, 30), Block(3, 60)],
        )
    )
    assert (peak.requested_bytes, sum(one.num_allocations for one in peak.holders)) == (130, 2)


def test_memory_from_before_the_history_counts():
    peak = find_peak(history(freed(1, 500), alloc(2, 30), blocks=[Block(2, 30)]))
    assert (peak.requested_bytes, holders(peak)) == (
        500,
        {("allocated before the recording", ""): 500},
    )


def test_what_is_reserved_is_that_of_the_peak():
    events = (
        Event("segment_alloc", 0, 4096),
        alloc(1, 100),
        freed(1, 100),
        Event("segment_free", 0, 4096),
    )
    assert find_peak(history(*events, reserved=512)).reserved_bytes == 512 + 4096


def test_rounding_is_to_blocks_of_512_bytes():
    peak = find_peak(history(blocks=[Block(1, 1), Block(2, 512), Block(3, 513)]))
    assert (peak.requested_bytes, peak.rounded_bytes) == (1026, 512 + 512 + 1024)


def test_a_noted_address_tells_the_owner_of_what_lives_there_at_that_time():
    events = (alloc(7, 10, 100), freed(7, 10, 200), alloc(7, 20, 300), alloc(8, 5, 300))
    notes = [Note(350, {"parameters": [7]}), Note(150, {"gradients": [7, 8]})]
    peak = find_peak(history(*events, blocks=[Block(7, 20), Block(8, 5)]), notes)
    assert holders(peak)["parameters", ""] == 20
    assert ("gradients", "") not in holders(peak)


def test_the_surest_owner_counts_where_two_were_noted():
    notes = [Note(5, {"gradients": [1], "parameters": [1]})]
    assert holders(find_peak(history(blocks=[Block(1, 8)]), notes)) == {("parameters", ""): 8}


def test_an_allocation_within_a_module_is_an_activation_of_the_innermost():
    ranges = [
        Range("phase", "forward", 0, 100),
        Range("module", "Llama", 10, 90),
        Range("module", "layers.0", 20, 40),
    ]
    events = (alloc(1, 1, 30), alloc(2, 2, 50), alloc(3, 4, 95), alloc(4, 8, 150))
    blocks = [Block(i, 1 << (i - 1)) for i in (1, 2, 3, 4)]
    assert holders(find_peak(history(*events, blocks=blocks), ranges=ranges)) == {
        ("activations", "layers.0"): 1,
        ("activations", "Llama"): 2,
        ("activations", ""): 4,
        ("allocated outside of every phase", ""): 8,
    }


def test_an_allocation_within_backward_is_a_temporary_unless_a_module_runs_again():
    ranges = [Range("phase", "backward", 0, 100), Range("module", "layers.0", 20, 40)]
    events = (alloc(1, 1, 10), alloc(2, 2, 30))
    peak = find_peak(history(*events, blocks=[Block(1, 1), Block(2, 2)]), ranges=ranges)
    assert holders(peak) == {
        ("temporaries of backward", ""): 1,
        ("activations", "layers.0"): 2,
    }


def test_without_notes_and_ranges_the_python_stack_tells():
    blocks = [
        Block(1, 1, (OPTIMIZER, BUILD)),
        Block(2, 2, (UPDATE, BUILD)),
        Block(3, 4, (LINEAR, MODEL)),
        Block(4, 8, (MADE, BUILD)),
        Block(5, 16, (BACKWARD, BUILD)),
        Block(6, 32, (BUILD,)),
        Block(7, 64),
    ]
    assert holders(find_peak(history(blocks=blocks))) == {
        ("optimizer state", ""): 1,
        ("temporaries of the optimizer", ""): 2,
        ("activations", "model.py:30 forward"): 4,
        ("parameters", "model.py:5 build"): 8,
        ("temporaries of backward", "model.py:5 build"): 16,
        ("other", "model.py:5 build"): 32,
        ("allocated before the recording", ""): 64,
    }


def in_cpp(name):
    return Frame("??", 0, name)


def test_functions_of_torch_in_a_stack_tell_what_python_does_not():
    engine = in_cpp("torch::autograd::Engine::evaluate_function(...)")
    blocks = [
        Block(1, 1, (in_cpp("at::cuda::(anonymous)::getNewWorkspace()"), LINEAR, MODEL)),
        Block(2, 2, (in_cpp("torch::autograd::AccumulateGrad::apply(...)"), engine)),
        Block(3, 4, (in_cpp("at::native::empty_cuda(...)"), engine)),
        Block(4, 8, (in_cpp("at::native::empty_cuda(...)"),)),
    ]
    assert holders(find_peak(history(blocks=blocks))) == {
        ("workspaces", ""): 1,
        ("gradients", ""): 2,
        ("temporaries of backward", ""): 4,
        ("other", ""): 8,
    }


def test_the_innermost_of_forward_and_backward_decides():
    # A checkpoint runs the forward pass again within backward.
    again, in_forward = (MODEL, BACKWARD), (BACKWARD, MODEL)
    blocks = [Block(1, 1, again), Block(2, 2, in_forward)]
    assert holders(find_peak(history(blocks=blocks))) == {
        ("activations", "model.py:30 forward"): 1,
        ("temporaries of backward", "model.py:30 forward"): 2,
    }


def test_a_workspace_of_cublas_is_known_by_its_size_alone_where_nothing_else_tells():
    peak = find_peak(history(blocks=[Block(1, 8_519_680), Block(2, 8_519_680, (BUILD,))]))
    assert holders(peak) == {
        ("workspaces", ""): 8_519_680,
        ("other", "model.py:5 build"): 8_519_680,
    }


ACTIONS = some.lists(some.tuples(some.integers(0, 5), some.integers(1, 9)), max_size=30)


@given(ACTIONS, some.integers(0, 30))
def test_holders_add_up_to_the_highest_sum_wherever_the_history_begins(actions, begin):
    live, events, sums = {}, [], [0]
    for address, size in actions:
        if address in live:
            events.append(freed(address, live.pop(address)))
        else:
            live[address] = size
            events.append(alloc(address, size))
        sums.append(sum(live.values()))
    blocks = [Block(address, size) for address, size in live.items()]
    begin = min(begin, len(events))
    peak = find_peak(history(*events[begin:], blocks=blocks))
    assert peak.requested_bytes == max(sums[begin:])
    assert sum(one.num_bytes for one in peak.holders) == peak.requested_bytes


def test_memory_that_outlives_the_optimizer_is_its_state_and_of_backward_a_gradient():
    made = (
        *(alloc(1, 100, None, BACKWARD), alloc(2, 7, None, BACKWARD), freed(2, 7)),
        *(alloc(3, 200, None, UPDATE), alloc(4, 30, None, UPDATE)),
    )
    later = (freed(4, 30), alloc(5, 1, None, MODEL), freed(5, 1))
    blocks = [Block(1, 100), Block(3, 200)]
    assert holders(find_peak(history(*made, *later, blocks=blocks))) == {
        ("gradients", ""): 100,
        ("optimizer state", ""): 200,
        ("temporaries of the optimizer", ""): 30,
    }


def test_the_middle_of_a_phase_that_failed_tells_no_life():
    events = (alloc(1, 100, None, BACKWARD), Event("oom", 0, 500))
    found = holders(find_peak(history(*events, blocks=[Block(1, 100)])))
    assert found == {("temporaries of backward", ""): 100}


def test_a_holder_that_two_signs_tell_is_one_row():
    by_size, by_stack = 4096 * 8 * 1024, Frame("", 0, "at::cuda::getNewWorkspace()")
    events = (alloc(1, by_size), alloc(2, 512, None, by_stack))
    peak = find_peak(history(*events, blocks=[Block(1, by_size), Block(2, 512)]))
    assert [(one.category, one.num_bytes) for one in peak.holders] == [
        ("workspaces", by_size + 512)
    ]
