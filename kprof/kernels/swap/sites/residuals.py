"""Residual adds in front of a norm: layers that compute x = x + part(...), then norm(x).

The forward of the layer is patched: its source is parsed, and where a sum is normed, and the code
between and after them does no more than copy and add, the sum and the norm become one call. So do
they where the sum is the norm's argument, as in BERT: norm(part(x) + x). All other statements stay,
and every value that the forward sees is a tensor.
"""

from __future__ import annotations

import ast
import copy
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import Module

from kprof.kernels.swap.dispatch import PLAIN, Dispatcher, changes_of, key_of
from kprof.kernels.swap.patches import (
    calls_in,
    innermost,
    is_passed_over,
    rewritten,
    tree_of,
    why_foreign,
)
from kprof.kernels.swap.probes import are_alike, kind_of, place_of, probing
from kprof.kernels.swap.reads import CHANGED, Reads
from kprof.kernels.swap.site import Request, Site, Skip, Switch, bound
from kprof.kernels.swap.sites import Family
from kprof.kernels.swap.sites.biases import Pairings
from kprof.kernels.swap.sites.norms import (
    FORMS,
    LAYERNORM,
    MOVED_SINCE,
    PERMUTED,
    RMSNORM,
    Names,
    Recognised,
    compared,
    have_moved,
    is_default,
    is_permuted,
    norm_of,
    reads_of,
    rounding,
)
from kprof.kernels.swap.sites.readers import patch_of, producers_in, read_by_linears
from kprof.kernels.swap.translate import translations_of
from kprof.kernels.swap.uses import (
    METADATA,
    READS_LOCALS,
    Effects,
    Narrowing,
    Place,
    Uses,
    blocks_of,
    children_of,
    expressions_of,
    is_name,
    place_of_node,
)

KERNELS = {RMSNORM: "add_rmsnorm", LAYERNORM: "add_layernorm"}
NO_SOURCE = "the source of its forward is missing, or is not the code that runs"
ELSEWHERE = "it calls its norms outside of its forward"
IN_PLACE = "it adds in place"
BETWEEN = "its code does something between the sum and the norm (line {line})"
BESIDE = "its code does more with the sum than norm it and add to it (line {line})"
LOCALS = "its forward reads its local variables as a whole"
WATCHED = "its norm has hooks, or another forward"
ANOTHER = "its norm is another one now"
FUNCTION = "its forward calls {name}, which is replaced instead"
NO_TENSORS = "it adds something else than two plain tensors"


@dataclass(frozen=True)
class Joint:
    """A sum and its norm in the source of a forward."""

    norm: str
    """Name of the norm."""
    call: Place
    """Of its call."""
    sum: Place | None
    """Of the statement that adds; None: the sum is the norm's argument."""
    guards: tuple[ast.expr, ...]
    """Tests of branches in between: if one is true, the norm may have another input."""


@dataclass(frozen=True)
class Obstacle:
    """A sum and its norm that cannot be fused, and why."""

    norm: str
    why: str


@dataclass
class Found:
    """The joints and obstacles of a forward."""

    tree: ast.FunctionDef | None
    joints: list[Joint] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)


def find(root: object, request: Request) -> Iterator[Site | Skip]:
    """Yield the layers below a module with a norm of a sum."""
    if not isinstance(root, Module):
        return
    for name, module in root.named_modules():
        norms = {child: norm_of(one, request) for child, one in module.named_children()}
        known = {
            child: one
            for child, one in norms.items()
            if isinstance(one, Recognised) and KERNELS[one.kernel] in request.kernels
        }
        if not known:
            continue
        forward = type(module).forward
        key = ("joints", type(module), forward, frozenset(known), frozenset(children_of(module)))
        found = request.once(key, joints_of, module, frozenset(known))
        label, what = name or type(module).__name__, type(module).__name__
        if isinstance(found, Obstacle):
            yield Skip(label, KERNELS[known[found.norm].kernel], what, found.why)
            continue
        yield from _sites(label, module, found, known, request)


def _sites(
    name: str, module: Module, found: Found, known: dict[str, Recognised], request: Request
) -> Iterator[Site | Skip]:
    """Yield the site of a layer's joints, and the places that are skipped."""
    places: list[Joint | Obstacle] = [*found.joints, *found.obstacles]
    what, joints = type(module).__name__, list[Joint]()
    foreign = why_foreign(module) or _why_others(module, found, request)
    for one in places:
        why = foreign or (one.why if isinstance(one, Obstacle) else None)
        why = why or _why_not(module, known[one.norm], one.norm, request)
        if why is None and isinstance(one, Joint):
            joints.append(one)
        elif why is not None:
            titled = f"{what}: {one.norm}" if len(places) > 1 else what
            yield Skip(name, KERNELS[known[one.norm].kernel], titled, why)
    if joints and found.tree is not None:
        yield _site(name, module, found.tree, joints, known, request)


def _why_others(module: Module, found: Found, request: Request) -> str | None:
    """Return that a function takes the forward, of which one site alone can be; None: none does.

    A sum that is a variable goes before, as a norm reads it and the next layer, too.
    """
    if not found.joints or any(one.sum is not None for one in found.joints):
        return None
    for path, value in calls_in(type(module).forward):
        if translations_of(value, request.kernels):
            return FUNCTION.format(name=".".join(path))
    return None


def _why_not(module: Module, found: Recognised, child: str, request: Request) -> str | None:
    """Return why the norm of a layer cannot be fused."""
    norm, kernel = module._modules[child], KERNELS[found.kernel]
    assert norm is not None
    if type(norm).__call__ is not Module.__call__:
        return "its norm is called by code of its own"
    why: str | None = request.once((*kind_of(norm), kernel), _check, norm, kernel, found, request)
    return why


def _check(norm: Module, name: str, found: Recognised, request: Request) -> str | None:
    """Run the kernel on random rows; return why it does not agree."""
    kernel, device = request.kernels[name], place_of(norm)
    weight = next(one for one in norm._parameters.values() if one is not None)
    with probing(device) as generator:
        rows = [torch.randn(9, *weight.shape, generator=generator) for _ in range(3)]
        x, residual, weights = (one.to(device, weight.dtype) for one in rows)
        default = is_default(found)
        arguments = _arguments_of(found, x, residual, weights[0], weights[1], found.eps)
        function, provider, _ = request.providers.choose(
            kernel, x, x.shape, is_default=default, arguments=arguments
        )
        if function is None:
            # Calls may come from another device; each is decided later.
            return None
        if not are_alike(function(*arguments), kernel.reference(*arguments)):
            return f"the kernel of {provider} does not agree with it on random rows"
    return None


def _arguments_of(
    found: Recognised, x: Any, residual: Any, weight: Any, bias: Any, eps: float
) -> tuple[Any, ...]:
    """Return the arguments of the fused kernel."""
    if found.kernel == LAYERNORM:
        return x, residual, weight, bias, eps
    return x, residual, weight, eps, *(() if is_default(found) else (found.form,))


def joints_of(module: Module, norms: frozenset[str]) -> Found | Obstacle:
    """Return the joints and obstacles of a layer's forward.

    An obstacle instead means that the forward cannot be analysed.
    """
    forward, names = type(module).forward, norms & children_of(module)
    inner = innermost(forward)
    tree = None if inner is None else tree_of(forward)
    if inner is None or tree is None:
        others = {*_names_of(inner.__code__)} if inner is not None else set()
        # Code that names none of its norms, such as a container's, has no joints.
        if inner is None or names & others:
            return Obstacle(min(norms), NO_SOURCE)
        return Found(None)
    owner = tree.args.posonlyargs + tree.args.args
    if not owner:
        return Found(tree)
    found = Found(tree)
    _look(tree.body, Effects(owner[0].arg, names, children_of(module)), found)
    if READS_LOCALS & {*_names_of(inner.__code__)} and found.joints:
        return Obstacle(found.joints[0].norm, LOCALS)
    shared = set(inner.__code__.co_cellvars)
    if owner[0].arg in shared or _is_assigned(owner[0].arg, tree):
        return Found(tree)
    _leave_out_used(found, tree, shared, set(inner.__code__.co_varnames) - shared)
    if not found.joints and not found.obstacles:
        elsewhere = _norms_elsewhere(module, inner, names)
        if elsewhere:
            return Obstacle(min(elsewhere), ELSEWHERE)
    return found


def _norms_elsewhere(module: Module, inner: types.FunctionType, norms: frozenset[str]) -> set[str]:
    """Return norms that are named in methods that a forward calls, but not in the forward."""
    cls, seen, new = type(module), {inner.__code__}, [inner.__code__]
    while new:
        code = new.pop()
        names = {*_names_of(code)}
        methods = [innermost(getattr(cls, name, None)) for name in names]
        if "super" in names:
            methods += [innermost(vars(base).get("forward")) for base in cls.__mro__[1:]]
        for method in methods:
            is_new = method is not None and method.__code__ not in seen
            if method is not None and is_new and not method.__module__.startswith("torch."):
                seen.add(method.__code__)
                new.append(method.__code__)
    seen.discard(inner.__code__)
    own = {*_names_of(inner.__code__)}
    return {name for code in seen for name in _names_of(code) if name in norms - own}


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _is_assigned(name: str, tree: ast.AST) -> bool:
    return any(
        isinstance(one, ast.Name) and one.id == name and not isinstance(one.ctx, ast.Load)
        for one in ast.walk(tree)
    )


def _look(block: Sequence[ast.stmt], read: Effects, found: Found) -> None:
    """Find sums of a block, and of inner blocks, whose norm is in the same block."""
    for place, statement in enumerate(block):
        for inside in blocks_of(statement):
            _look(inside, read, found)
        for part in expressions_of(statement):
            found.joints += [
                Joint(norm, place_of_node(node), None, ())
                for node in ast.walk(part)
                if (norm := read.norm_of(node, _is_plain_sum))
            ]
        if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            if isinstance(statement.target, ast.Name):
                called = _called_later(block[place + 1 :], {statement.target.id}, read)
                if called:
                    found.obstacles.append(Obstacle(called, IN_PLACE))
        elif _is_sum(statement):
            _follow(statement, block[place + 1 :], read, found)


def _is_sum(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and all(isinstance(one, ast.Name) for one in statement.targets)
        and _is_plain_sum(statement.value)
    )


def _is_plain_sum(node: ast.AST) -> bool:
    """Return whether an expression is a sum that assigns nothing."""
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    return is_sum and not any(isinstance(one, ast.NamedExpr) for one in ast.walk(node))


def _follow(adds: Any, rest: Sequence[ast.stmt], read: Effects, found: Found) -> None:
    """Follow a sum to its norm."""
    names = {one.id for one in adds.targets}
    stored, guards = set(names), list[ast.expr]()
    for place, statement in enumerate(rest):
        effect = read.first_effect_of(statement)
        called = None if effect is None else read.norm_called(effect)
        if effect is not None and called is not None and called[1] in names:
            joint = Joint(called[0], place_of_node(effect), place_of_node(adds), tuple(guards))
            found.joints.append(joint)
            return
        if isinstance(statement, ast.If) and _is_guard(statement, stored):
            guards.append(statement.test)
        elif effect is None:
            names, stored = _copied(statement, names, stored)
        else:
            norm = _called_later(rest[place:], names, read)
            if norm:
                found.obstacles.append(Obstacle(norm, BETWEEN.format(line=statement.lineno)))
            return


def _copied(statement: Any, names: set[str], stored: set[str]) -> tuple[set[str], set[str]]:
    """Return the variables with the sum after a statement, and all that were assigned."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
        return names, stored
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    new = {one.id for one in targets if is_name(one)}
    is_copy = is_name(statement.value) and statement.value.id in names
    return (names | new if is_copy else names - new), stored | new


def _is_guard(statement: ast.If, stored: set[str]) -> bool:
    """Return whether a branch's test reads only variables, and can run before the sum."""

    def is_free(node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            return all(map(is_free, node.values))
        if not isinstance(node, ast.Compare):
            return False
        operands = (node.left, *node.comparators)
        return all(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops) and all(
            isinstance(one, ast.Constant) or (is_name(one) and one.id not in stored)
            for one in operands
        )

    return not statement.orelse and is_free(statement.test)


def _called_later(block: Sequence[ast.stmt], names: set[str], read: Effects) -> str:
    """Return the norm of one of these variables; empty: none.

    A variable that is assigned again no longer counts.
    """
    for statement in block:
        for node in ast.walk(statement):
            called = read.norm_called(node)
            if called and called[1] in names:
                return called[0]
        for name in list(names):
            if _is_assigned(name, statement):
                names = names - {name}
    return ""


def _leave_out_used(found: Found, tree: ast.FunctionDef, shared: set[str], own: set[str]) -> None:
    """Make obstacles of joints whose sum is used by more than the norm and other sums.

    The fused operation returns the sum and its norm, so the gradient of its sum lacks the part of
    the norm. A hook on the sum would see the difference; an operation in place would change a
    tensor that is saved for gradients.
    """
    kept = []
    for joint in found.joints:
        if joint.sum is None:
            kept.append(joint)
            continue
        line = _UsesOfSum(joint, shared).line_of_other(tree)
        asked = {node.id for one in joint.guards for node in ast.walk(one) if is_name(node)}
        if line is None and asked <= own:
            kept.append(joint)
        elif line is None:
            found.obstacles.append(Obstacle(joint.norm, BETWEEN.format(line=joint.call[0])))
        else:
            found.obstacles.append(Obstacle(joint.norm, BESIDE.format(line=line)))
    found.joints[:] = kept


class _UsesOfSum(Uses):
    """Looks for uses of a joint's sum other than the norm's call and sums."""

    def __init__(self, joint: Joint, shared: set[str]) -> None:
        super().__init__(shared)
        self._joint = joint

    def makes(self, statement: ast.stmt) -> bool:
        return place_of_node(statement) == self._joint.sum

    def passes(self, statement: ast.stmt) -> bool:
        # In that branch, the sum is not fused.
        return isinstance(statement, ast.If) and statement.test in self._joint.guards

    def is_harmless(self, node: ast.AST, names: set[str], is_operand: bool) -> bool:
        is_call = isinstance(node, ast.Call) and place_of_node(node) == self._joint.call
        return is_call or (is_operand and self.is_held(node, names))

    def are_operands(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in METADATA
        if isinstance(node, ast.Compare):
            return all(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops)
        return isinstance(node, ast.BinOp)


class _Fuse(ast.NodeTransformer):
    """Rewrites joints.

    Those of a statement: an empty list, the fused call that fills it, and the norm that reads it.
    Others: the norm's call becomes the fused one.
    """

    def __init__(self, owner: str, joints: Sequence[Joint]) -> None:
        self._owner = owner
        numbered = [*enumerate(joints)]
        self._sums = {joint.sum: (number, joint) for number, joint in numbered}
        self._calls = {joint.call: (number, joint.sum is None) for number, joint in numbered}

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Replace the sum of a joint by the fused call."""
        self.generic_visit(node)
        if place_of_node(node) not in self._sums:
            return node
        number, joint = self._sums[place_of_node(node)]
        assert isinstance(node.value, ast.BinOp)
        guards: list[ast.expr] = [copy.deepcopy(one) for one in joint.guards]
        arguments: list[ast.expr] = [
            *(_load(self._owner), node.value.left, node.value.right, _load(_normed(number))),
            *([ast.BoolOp(ast.Or(), guards)] if len(guards) > 1 else guards),
        ]
        node.value = ast.Call(_load(_adder(number)), arguments, [])
        empty = ast.Assign([ast.Name(_normed(number), ast.Store())], ast.List([], ast.Load()))
        return [_at(empty, node), _at(node, node)]

    def visit_Call(self, node: ast.Call) -> Any:
        """Replace the norm by the fused result, if there is one."""
        self.generic_visit(node)
        number, is_argument = self._calls.get(place_of_node(node), (None, False))
        if number is None:
            return node
        if is_argument:
            (total,) = node.args
            assert isinstance(total, ast.BinOp)
            terms: list[ast.expr] = [_load(self._owner), total.left, total.right]
            return _at(ast.Call(_load(_adder(number)), terms, []), node)
        pop = ast.Attribute(_load(_normed(number)), "pop", ast.Load())
        choice = ast.IfExp(_load(_normed(number)), ast.Call(pop, [], []), node)
        return _at(choice, node)


def _at(new: Any, old: ast.AST) -> Any:
    return ast.fix_missing_locations(ast.copy_location(new, old))


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _normed(number: int) -> str:
    return f"kprof_normed_{number}"


def _adder(number: int) -> str:
    return f"kprof_add_{number}"


def _site(
    name: str,
    module: Module,
    tree: ast.FunctionDef,
    joints: Sequence[Joint],
    known: dict[str, Recognised],
    request: Request,
) -> Site:
    original, switch = type(module).forward, Switch()
    parts, adders, reads_by_norm = {}, {}, {}
    what = type(module).__name__
    for number, joint in enumerate(joints):
        found, maker = known[joint.norm], request.new_maker()
        kernel = request.kernels[KERNELS[found.kernel]]
        default = is_default(found)
        dispatcher = Dispatcher(
            kernel, request.providers, found.settings, is_default=default, maker=maker
        )
        parts[f"{what}: {joint.norm}" if len(joints) > 1 else what] = dispatcher
        norm = module._modules[joint.norm]
        assert norm is not None
        read = reads_of(norm)
        # A norm whose reads are unknown is not recognised.
        assert isinstance(read, Reads)
        reads_by_norm[joint.norm] = reads = compared(norm, found, read)
        readers = read_by_linears(module, tree, [joint.norm], request).get(joint.call)
        add = _adding(module, joint, found, reads, dispatcher, readers)
        adders[_adder(number)] = _norming(add, joint.norm) if joint.sum is None else add
    normed = {joint.call for joint in joints}
    # Only one site can patch a forward.
    pairings = Pairings(module, tree, request)
    parts |= pairings.parts
    patch = patch_of(module, tree, producers_in(module, request), request, normed, pairings.calls)
    owner = (tree.args.posonlyargs + tree.args.args)[0].arg
    fused = _Fuse(owner, joints).visit(patch.tree)
    patched = rewritten(original, fused, {**adders, **patch.functions})
    notes = [dispatcher.noting() for dispatcher in parts.values()]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if switch.owner is not self:
            return original(self, *args, **kwargs)
        if is_compiling():
            for note in notes:
                note(False)
            return original(self, *args, **kwargs)
        return patched(self, *args, **kwargs)

    def why_changed(owner: Any) -> str | None:
        if type(owner).forward is not original:
            return "its forward is another one now"
        changed = (
            reads.why_changed(owner._modules.get(child)) for child, reads in reads_by_norm.items()
        )
        why = next((why for why in changed if why is not None), None)
        return why or pairings.why_changed(owner)

    put = bound(forward, original, switch)
    return Site(name, module, put, parts, switch=switch, why_changed=why_changed)


def _adding(
    module: Module,
    joint: Joint,
    found: Recognised,
    reads: Reads,
    dispatcher: Dispatcher,
    readers: Narrowing | None,
) -> Callable[..., Any]:
    """Return the fused call of a layer: it returns the sum, and appends its norm to a list.

    The list stays empty if the original norm has to run. `readers` of the norm: linear layers.
    """
    child, known, decide = joint.norm, dispatcher.known, dispatcher.decide
    expected = module._modules[child]
    assert expected is not None
    norm_found, names = weakref.ref(expected), found.names
    constant, eps_name, is_changed = found.eps, found.eps_name, changes_of(reads)
    # Between the arguments of a call and the dtype of its norm.
    defaults = FORMS[:1] if found.kernel == RMSNORM and is_default(found) else ()

    def add(owner: Any, a: Any, b: Any, normed: list[Any], is_another_branch: bool = False) -> Any:
        if is_another_branch:
            return a + b
        norm = owner._modules.get(child)
        why = _why_original(norm, norm_found(), names, (a, b))
        if why is None and is_changed is not None and is_changed(norm):
            why = CHANGED
        if why is not None:
            dispatcher.leave_out(why)
            return a + b
        own = norm._parameters
        weight, bias = own.get(names.weight), own.get(names.bias)
        eps = constant if eps_name is None else getattr(norm, eps_name)
        # The kernel takes the term with the dtype of the sum first.
        first, second = (a, b) if torch.promote_types(a.dtype, b.dtype) != b.dtype else (b, a)
        arguments = _arguments_of(found, first, second, weight, bias, eps)
        key = key_of(first, weight, bias), second.shape, second.dtype, second.get_device()
        decision = known.get(key) or decide(key, arguments)
        decision.num_calls += 1
        if decision.function is None:
            return a + b
        options = rounding(readers, decision, first, defaults)
        y, total = decision.function(*arguments, *options)
        normed.append(y)
        return total

    return add


def _norming(add: Callable[..., Any], norm: str) -> Callable[..., Any]:
    """Return the fused call of a sum that nothing but the norm sees: it returns the norm."""

    def add_and_norm(owner: Any, a: Any, b: Any) -> Any:
        normed = list[Any]()
        total = add(owner, a, b, normed)
        return normed.pop() if normed else getattr(owner, norm)(total)

    return add_and_norm


def _why_original(
    norm: Any, expected: Module | None, names: Names, terms: tuple[Any, Any]
) -> str | None:
    """Return why a call runs the original sum and norm; None: the kernel may run."""
    if norm is None or norm is not expected:
        return ANOTHER
    if not is_passed_over(norm):
        return WATCHED
    if type(terms[0]) not in PLAIN or type(terms[1]) not in PLAIN:
        return NO_TENSORS
    if have_moved(norm, names):
        return MOVED_SINCE
    is_other = any(not one.is_contiguous() and is_permuted(one) for one in terms)
    return PERMUTED if is_other else None


FAMILY = Family(kernels=tuple(KERNELS.values()), find=find)
