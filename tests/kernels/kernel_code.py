"""What kernels are in the GPU's own language: their loops, and what they do while they wait."""

import re
from collections import Counter

from kprof.kernels.bench.ahead import disassemble


def instructions_of(binary):
    """Return the instructions of a binary, and of each label which comes next."""
    found, labels = [], {}
    for line in disassemble(binary).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            found.append(instruction[1])
    return found, labels


def product_loops_of(binary):
    """Return how often each kind of instruction is in the innermost loops that multiply."""
    found, labels = instructions_of(binary)
    loops = []
    for end, instruction in enumerate(found):
        jump = re.search(r"BRA.*?(\.L_x_\d+)", instruction)
        start = labels.get(jump[1], end) if jump else end
        if start < end and any("GMMA" in one for one in found[start:end]):
            loops.append(range(start, end + 1))
    inner = [
        one for one in loops if not any(other != one and set(other) < set(one) for other in loops)
    ]
    return [Counter(_kind_of(found[at]) for at in one) for one in inner]


def _kind_of(instruction):
    return re.sub(r"^@!?U?P\w+ ", "", instruction).split()[0].split(".")[0]


def powers_beside_values(binary):
    """Return the powers that each loop computes after it began to add values, before it waits."""
    counts, count = [], None
    for instruction in instructions_of(binary)[0]:
        if "DEPBAR.LE gsb0, 0x1" in instruction:
            count = 0
        elif "DEPBAR.LE gsb0, 0x0" in instruction and count is not None:
            counts.append(count)
            count = None
        elif "MUFU.EX2" in instruction and count is not None:
            count += 1
    return counts
