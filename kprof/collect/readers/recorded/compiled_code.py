"""The code that Inductor generated: the modules of each of its kernels.

A comment before every launch names the nodes of the graph that are in it:

    # Topologically Sorted Source Nodes: [linear, gelu], Original ATen: [aten.addmm, aten.gelu]
    triton_poi_fused_addmm_gelu_0.run(buf0, primals_2, 512, stream=stream0)

The recorder noted the modules around each of these nodes.
"""

from __future__ import annotations

import ast
import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from kprof.collect.readers.kineto.damage import UNREADABLE
from kprof.trace import Caveat, CompiledCode, CompiledLaunch, Trace

# The modules around an operator, outermost first, for each module that the code may serve.
Stacks = tuple[tuple[str, ...], ...]

_NODES = re.compile(r"# Topologically Sorted Source Nodes: \[(.*?)\], Original ATen")
_PARTITION = re.compile(r"self\.partitions\[(\d+)\]\(|\b(partition_\d+)\(")
# The forms of a launch, and the name that it has in a trace.
_LAUNCHES = (
    (re.compile(r"^(\w+)\.run\("), "{}"),
    (re.compile(r"\bextern_kernels\.(\w+)\("), "aten::{}"),
    (re.compile(r"\btorch\.ops\.(\w+)\.(\w+)[.\w]*\("), "{}::{}"),
    (re.compile(r"(?:^|= )aten\.(\w+)[.\w]*\("), "aten::{}"),
    (re.compile(r"(?:^|= )inductor_ops\.(\w+)[.\w]*\("), "inductor::{}"),
    (re.compile(r"^\w+\.(copy_)\("), "aten::{}"),
    (re.compile(r"^(cpp_\w+)\("), "{}"),
)
# Kernels that finish a reduction which the kernel before has begun.
_INPUT = re.compile(r"\bprimals_\d+\b")
_SHAPE = re.compile(r"assert_size_stride\(primals_(\d+), \(([\d, ]*)\)")
_MADE = re.compile(r"\bout=(buf\d+)\)|^(buf\d+) = ")
_RETURNED = re.compile(r"^ +return \((.*)\)$", re.MULTILINE)
_LAST_ROUND = re.compile(r"= workspace\w*\[.*\]\.view\([^)]*\)\.(\w+)\(dim=0\)")
# Functions of Inductor's own around an operator.
_CALLED_FOR = {"aten::bias_addmm": "aten::addmm"}


class Input(msgspec.Struct):
    """An input of the whole graph, with the place of the stack of what alone uses it."""

    stack: int | None = None
    shape: list[int] | None = None


class Code(msgspec.Struct):
    """One piece of generated code and the recorder's notes on it."""

    keys: tuple[str, ...]
    frame: str
    is_backward: bool
    text: str
    notes: dict[str, int | None]
    stacks: list[Stacks | None]
    inputs: list[Input] = []


class Notes(msgspec.Struct):
    """The content of `compiled.json.gz`."""

    codes: list[Code]


@dataclass
class _Function:
    """One function of the code, in order: launches, and calls of partitions."""

    steps: list[CompiledLaunch | str] = field(default_factory=list)

    def launches(self) -> list[CompiledLaunch]:
        """Return its own launches."""
        return [step for step in self.steps if isinstance(step, CompiledLaunch)]


def add_notes(trace: Trace, part: Path) -> Trace:
    """Add what the recorder noted of the compiler of the process that left `part`."""
    path = part / "compiled.json.gz"
    if not path.is_file():
        return trace
    try:
        with gzip.open(path) as file:
            codes = msgspec.json.decode(file.read(), type=Notes).codes
    except (OSError, EOFError, zlib.error, *UNREADABLE) as error:
        lost = Caveat(
            "damaged_compiler_notes",
            f"{path.name} of {part.name} is damaged, so compiled modules are not named: {error}.",
        )
        return replace(trace, meta=replace(trace.meta, caveats=(*trace.meta.caveats, lost)))
    # Code out of a cache may stand for another model's equal graph, with names of its own. Those
    # of a backward graph do not show it: Inductor adds to them.
    foreign = {code.frame for code in codes if not code.is_backward and not _names_fit(code)}
    own = [code for code in codes if code.frame not in foreign]
    compiled = tuple(found for code in own if (found := _read_code(code)) is not None)
    return replace(trace, meta=replace(trace.meta, compiled=compiled))


def _names_fit(code: Code) -> bool:
    named = (set(_names_in(nodes)) for nodes in _NODES.findall(code.text))
    return all(names <= code.notes.keys() for names in named)


def _names_in(nodes: str) -> list[str]:
    return nodes.split(", ") if nodes else []


def _read_code(code: Code) -> CompiledCode | None:
    """Return the launches of a piece of code; None where its form is not known."""
    try:
        tree = ast.parse(code.text)
    except SyntaxError:
        return None
    lines = code.text.splitlines()
    functions = {
        function.name: _read_function(lines[function.lineno : function.end_lineno], code)
        for function in _functions_in(tree)
    }
    if "call" not in functions:
        return None
    ordered = list(_in_order("call", functions))
    num_launches = sum(len(function.launches()) for function in functions.values())
    is_in_order = len(ordered) == num_launches
    if not is_in_order:
        ordered = [launch for function in functions.values() for launch in function.launches()]
    return CompiledCode(code.keys, tuple(ordered), is_in_order)


def _read_function(lines: list[str], code: Code) -> _Function:
    function = _Function()
    places = _places_of_inputs(code) if code.inputs else {}
    nodes: list[str] = []
    for line in map(str.strip, lines):
        if line.startswith("#"):
            comment = _NODES.match(line)
            nodes = _names_in(comment[1]) if comment else nodes
        elif partition := _PARTITION.search(line):
            function.steps.append(partition[2] or f"partition_{partition[1]}")
        elif last_round := _LAST_ROUND.search(line):
            stacks = function.launches()[-1].stacks if function.launches() else ()
            names = [last_round[1], *(["to"] if ".to(" in line else [])]
            function.steps += [CompiledLaunch(f"aten::{name}", stacks) for name in names]
        elif name := _launched_by(line):
            stacks = _stacks_of(name, nodes, code)
            if "::" in name and not stacks:
                stacks = _stacks_by_inputs(line, places, code)
            function.steps.append(CompiledLaunch(name, stacks))
            nodes = []
    return function


def _places_of_inputs(code: Code) -> dict[str, int | None]:
    """Return the places of the stacks of what alone uses an input, or makes its gradient, by name.

    A backward graph counts the inputs of the whole graph, and returns the gradients in their order.
    """
    if not _shapes_fit(code):
        return {}
    places = {f"primals_{i + 1}": each.stack for i, each in enumerate(code.inputs)}
    gradients = _returned_by(code.text)
    if len(gradients) == len(code.inputs):
        for gradient, each in zip(gradients, code.inputs, strict=True):
            places |= dict.fromkeys(re.findall(r"\bbuf\d+\b", gradient), each.stack)
    return places


def _shapes_fit(code: Code) -> bool:
    """Tell whether the code counts the inputs as the graph does: their shapes are the same."""
    for number, sizes in _SHAPE.findall(code.text):
        place = int(number) - 1
        shape = code.inputs[place].shape if place < len(code.inputs) else []
        if shape is not None and shape != [int(size) for size in re.findall(r"\d+", sizes)]:
            return False
    return True


def _returned_by(text: str) -> list[str]:
    """Return what the code's last function that returns several things returns, in order."""
    returned = _RETURNED.findall(text)
    body = ast.parse(f"({returned[-1]})", mode="eval").body if returned else None
    return [ast.unparse(each) for each in body.elts] if isinstance(body, ast.Tuple) else []


def _launched_by(line: str) -> str | None:
    for form, name in _LAUNCHES:
        if found := form.search(line):
            launched = name.format(*found.groups())
            return _CALLED_FOR.get(launched, launched)
    return None


def _stacks_of(launched: str, nodes: list[str], code: Code) -> tuple[Stacks, ...]:
    """Return the modules around each of the nodes; none unless those of all are known.

    An operator's own node is the last; those that made its inputs are named before it.
    """
    own = nodes[-1:] if "::" in launched else nodes
    if not all(name in code.notes for name in own):
        return ()
    places = {place for name in own if (place := code.notes[name]) is not None}
    known = [stacks for place in sorted(places) if (stacks := code.stacks[place]) is not None]
    return tuple(known) if len(known) == len(places) else ()


def _stacks_by_inputs(line: str, places: dict[str, int | None], code: Code) -> tuple[Stacks, ...]:
    """Return the modules around an operator that takes such inputs, or makes such a gradient."""
    made = _MADE.search(line)
    names = _INPUT.findall(line) or (list(filter(None, made.groups())) if made else [])
    of_names = {places.get(name) for name in names}
    place = of_names.pop() if len(of_names) == 1 else None
    stacks = code.stacks[place] if place is not None else None
    return (stacks,) if stacks is not None else ()


def _functions_in(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (part for part in node.body if isinstance(part, ast.FunctionDef))


def _in_order(name: str, functions: dict[str, _Function]) -> Iterator[CompiledLaunch]:
    for step in functions[name].steps:
        if isinstance(step, CompiledLaunch):
            yield step
        elif step in functions:
            yield from _in_order(step, functions)
