"""Small snapshots of torch's allocator, as `torch.cuda.memory._snapshot` gives them."""

import pickle

SEGMENT = 0x7F00_0000_0000


def frame(name="f", filename="/home/me/train.py", line=1):
    return {"name": name, "filename": filename, "line": line}


def event(action, address=0, size=0, time_us=None, frames=()):
    told = {"action": action, "addr": SEGMENT + address, "size": size, "stream": 0}
    return {**told, "frames": [*frames], **({} if time_us is None else {"time_us": time_us})}


def block(address, size, state="active_allocated", frames=()):
    rounded = -(-size // 512) * 512
    told = {"address": SEGMENT + address, "size": rounded, "requested_size": size}
    return {**told, "state": state, "frames": [*frames]}


def snapshot(events=(), blocks=(), reserved=1 << 21, device=0):
    segment = {
        "device": device,
        "address": SEGMENT,
        "total_size": reserved,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "allocated_size": sum(one["size"] for one in blocks),
        "active_size": sum(one["size"] for one in blocks),
        "requested_size": sum(one["requested_size"] for one in blocks),
        "blocks": [*blocks],
    }
    traces = [[] for _ in range(device)] + [[*events]]
    return {"segments": [segment], "device_traces": traces, "allocator_settings": {}}


def write(path, content):
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path
