"""Plant random faults in the code, one at a time, and count how many of them the tests catch.

    python benchmarks/mutations.py --seed 7        40 faults; about half an hour on one core

The faults are drawn from code that tests execute in `kprof/analyze`, `kprof/ab` and
`kprof/kernels/correctness`: first the folder, then the operator, then the place. Messages are left
out: texts, what `raise` says, functions that return a `str`; so are assertions: `assert`, and
`strict` of `zip`. Numbers of groups are labels: in which order they are given is no behaviour.
Tests run in a copy of the tree.

One run of the tests says which of them execute which statements. A fault is shown to the tests
that execute its statement, those of its own folder first, then to the files of these: what one test
prepared others share. Both end after a minute of tests; a fault that is alive then survived.
"""

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from queue import Queue

from evidence import RESULTS, ROOT, row, write_evidence

RESULT = RESULTS / "mutations_cpu_2026-11.json"
SOURCES = ("benchmarks/mutations.py",)
# The folders with faults, and how often each is drawn.
AREAS = {"kprof/analyze": 2, "kprof/ab": 1, "kprof/kernels/correctness": 1}
# Tests elsewhere execute this code, too, but mean to test other code.
TESTS = (
    *("tests/ab", "tests/analyze", "tests/commands", "tests/report", "tests/kernels/correctness"),
    *("tests/collect/loadgen", "tests/collect/readers"),
    *("tests/test_device.py", "tests/test_saved.py", "tests/test_timing.py"),
)
MARKED = "not gpu and not hostile and not slow"
PYTEST = ("-m", "pytest", "-q", "-x", "-m", MARKED, "-p", "no:cacheprovider", "-p", "no:xdist")
FAULTS = 40
REACH = 36
# Processor time of the tests that one fault is shown to, and how much longer they may take with it.
SHOWN_S = 60
ENDLESS = 5
# Faults that change no behaviour, judged by hand: what they change and why nothing follows.
ALSO_COUNTED = (
    "the positions that the shortcut leaves out are counted one by one, to the same number"
)
ANOTHER_DRAW = "any other seed draws other values, which is all that is asked for"
EQUIVALENT = {
    **{
        f"kprof/kernels/correctness/{function}: +, -: case.seed + {number} "
        f"-> (case.seed - {number})": ANOTHER_DRAW
        for function, number in (
            ("integrity.py _find_remembered", "1"),
            ("integrity.py _changed_alone", "3"),
            ("integrity.py _find_tired", "2"),
            ("isolation.py _find_shared", "i"),
            ("isolation.py find_kept_memory", "number"),
            ("isolation.py find_order_faults", "i"),
            ("isolation.py _find_thread_faults", "i"),
            ("observe.py _second_gradients", "2"),
            ("observe.py draw_arriving", "1"),
        )
    },
    "kprof/kernels/correctness/inputs.py __init__: +, -: 1_000_003 * subject.seed + case.seed -> "
    "(1000003 * subject.seed - case.seed)": ANOTHER_DRAW,
    "kprof/analyze/whatif/across_ranks.py _at_roofline: constant: 1.0 -> (2.0)": (
        "of a sum of nanoseconds, it is 0 or far above"
    ),
    "kprof/analyze/work/convolution.py touched_extent: and, or: dilation <= num_out or kernel == 1 "
    "-> (dilation <= num_out and kernel == 1)": ALSO_COUNTED,
    "kprof/analyze/work/convolution.py touched_extent: and, or: (stride == 1 and has_no_holes) or "
    "(dilation == 1 and kernel >= stride) -> ((stride == 1 and has_no_holes) and (dilation == 1 "
    "and kernel >= stride))": ALSO_COUNTED,
    "kprof/kernels/correctness/model_levels.py deviations: off by one: abs(surplus) > TINY -> "
    "(abs(surplus) >= TINY)": "of counts, it is 0 or far above",
    "kprof/analyze/whatif/replay.py without_edges: off by one: 1 -> (2)": "any lag beyond will do",
}

OPPOSITES = ((ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot))
COMPARISONS = (
    dict(OPPOSITES) | {b: a for a, b in OPPOSITES} | {ast.In: ast.NotIn, ast.NotIn: ast.In}
)
BOUNDARIES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)

# Part of the copy: notes which probes each test passes, also in processes that it starts.
PROBES = """
import atexit, json, os, time
from pathlib import Path
SEEN, TESTS, BEGAN, STATE = set(), {}, [0.0], {"is_test": False}
hit = SEEN.add
FOLDER = Path(os.environ["KPROF_PROBES"])
def pytest_configure():
    STATE["is_test"] = True
def pytest_runtest_logstart(nodeid):
    SEEN.clear()
    BEGAN[0] = time.process_time()
    TESTS[nodeid] = {"probes": [], "seconds": 0.0, "failed": False}
def pytest_runtest_logreport(report):
    TESTS[report.nodeid]["failed"] |= report.failed
def pytest_runtest_logfinish(nodeid):
    for path in FOLDER.glob("child-*"):
        SEEN.update(json.loads(path.read_text() or "[]"))
        path.unlink()
    TESTS[nodeid]["probes"] = sorted(SEEN)
    TESTS[nodeid]["seconds"] = round(time.process_time() - BEGAN[0], 3)
def pytest_unconfigure():
    (FOLDER / "tests.json").write_text(json.dumps(TESTS))
@atexit.register
def leave():
    if not STATE["is_test"]:
        (FOLDER / f"child-{os.getpid()}").write_text(json.dumps(sorted(SEEN)))
"""


# Runs a command with a limit on its processor time.
LIMITED = """
import ast, os, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ast.literal_eval(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Fault:
    """One change of a file."""

    path: str
    function: str
    operator: str
    line: int
    start: int
    """Where what is replaced begins and ends, in bytes of the file."""
    end: int
    before: str
    after: str
    probe: int

    @property
    def name(self):
        """Name the fault for a reader."""
        where = f"{self.path}:{self.line} {self.function}".strip()
        return f"{where}: {self.operator}: {self.before} -> {self.after}"

    @property
    def change(self):
        """Name the fault wherever its function stands in the file."""
        where = f"{self.path} {self.function}".strip()
        return f"{where}: {self.operator}: {self.before} -> {self.after}"


class Search(ast.NodeVisitor):
    """Finds the faults that one file can have; `probes` are those of its statements."""

    def __init__(self, path, source, probes):
        self.path, self.probes, self.found = path, probes, []
        self.source = source.encode()
        self.lines = [0]
        for line in self.source.split(b"\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)
        self.functions, self.probe = [], None

    def visit(self, node):
        """Look at a node, unless it says something to a reader, or asserts something."""
        skipped = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.arguments)
        if isinstance(node, skipped) or is_logged(node):
            return
        former = self.probe
        if isinstance(node, ast.stmt):
            self.probe = self.probes.get(id(node), self.probe)
        if self.functions and self.probe is not None:
            for operator, replaced, new in faults_at(node):
                self.note(operator, replaced, new)
        super().visit(node)
        self.probe = former

    def visit_FunctionDef(self, node):
        """Look into a function, unless it returns words."""
        if node.returns is not None and ast.unparse(node.returns) == "str":
            return
        self.functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.functions.pop()

    def visit_ClassDef(self, node):
        """Look into methods."""
        for statement in node.body:
            if isinstance(statement, FUNCTIONS):
                self.visit(statement)

    def visit_keyword(self, node):
        """Leave the claim out that sequences are equally long: it is an assertion."""
        if node.arg != "strict":
            self.visit(node.value)

    def visit_Attribute(self, node):
        """Leave the order out in which groups are numbered."""
        if node.attr == "ngroup" and isinstance(node.value, ast.Call):
            for part in (node.value.func, *node.value.args):
                self.visit(part)
        else:
            self.generic_visit(node)

    def visit_AnnAssign(self, node):
        """Leave types out."""
        if node.value is not None:
            self.visit(node.value)

    def note(self, operator, node, new):
        """Keep a fault that puts `new` in a node's place."""
        start = self.lines[node.lineno - 1] + node.col_offset
        end = self.lines[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(self.source[start:end].decode().split())
        function = ".".join(self.functions)
        place = (node.lineno, start, end)
        self.found.append(Fault(self.path, function, operator, *place, before, new, self.probe))


def is_logged(node):
    """Tell whether a statement only tells somebody something; a probe is one, too."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = ast.unparse(node.value.func).lower()
    return any(word in called for word in ("log", "warn", "print", "progress", "_hit"))


def changed(node, **fields):
    """Return the text of a copy of a node with other fields, in brackets."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return f"({ast.unparse(new)})"


def faults_at(node):
    """Yield operator, replaced node and new text of the faults at one node."""
    find = KINDS.get(type(node))
    if find is not None:
        yield from find(node)


def of_comparison(node):
    """Yield the opposite of a comparison, and another side for its boundary."""
    kind = type(node.ops[0])
    if len(node.ops) == 1:
        yield "comparison", node, changed(node, ops=[COMPARISONS[kind]()])
        if kind in BOUNDARIES:
            yield "off by one", node, changed(node, ops=[BOUNDARIES[kind]()])


def of_condition(node):
    """Yield `and` for `or`, and the other way round."""
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "and, or", node, changed(node, op=other)


def of_sum(node):
    """Yield a difference for a sum of numbers, a quotient for a product, and so on."""
    if type(node.op) in ARITHMETIC and not is_text(node):
        yield "+, -", node, changed(node, op=ARITHMETIC[type(node.op)]())


def of_constant(node):
    """Yield another number, or the opposite truth value."""
    if isinstance(node.value, bool):
        yield "constant", node, repr(not node.value)
    elif isinstance(node.value, int):
        yield "off by one", node, f"({node.value + 1})"
    elif isinstance(node.value, float):
        yield "constant", node, f"({2 * node.value or 1.0})"


def of_name(node):
    """Yield the largest for the smallest, called by name or as a method."""
    if isinstance(node, ast.Name) and node.id in EXTREMES:
        yield "min, max", node, EXTREMES[node.id]
    elif isinstance(node, ast.Attribute) and node.attr in EXTREMES:
        yield "min, max", node, changed(node, attr=EXTREMES[node.attr])


def of_return(node):
    """Yield the opposite of a truth value, nothing in the place of anything else."""
    if node.value is not None:
        yield "returned value", node.value, other_than(node.value)


def of_statement(node):
    """Yield nothing for a call whose result nobody wants, and for an addition in place."""
    if isinstance(node, ast.AugAssign) or isinstance(node.value, ast.Call):
        yield "removed statement", node, "pass"


KINDS = {
    ast.Compare: of_comparison,
    ast.BoolOp: of_condition,
    ast.BinOp: of_sum,
    ast.Constant: of_constant,
    ast.Name: of_name,
    ast.Attribute: of_name,
    ast.Return: of_return,
    ast.Expr: of_statement,
    ast.AugAssign: of_statement,
}


def is_text(node):
    """Tell whether a sum is one of texts or lists."""
    texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
    sides = (node.left, node.right)
    return any(isinstance(one, texts) or isinstance(getattr(one, "value", 0), str) for one in sides)


def other_than(value):
    """Return another value: the opposite of a truth value, nothing for anything else."""
    if isinstance(value, ast.Compare | ast.BoolOp):
        return f"(not ({ast.unparse(value)}))"
    if isinstance(value, ast.Constant) and isinstance(value.value, bool):
        return repr(not value.value)
    return "0" if isinstance(value, ast.Constant) and value.value is None else "None"


def is_told(statement):
    """Tell whether a statement is a text that stands alone."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def blocks_of(function):
    """Yield the lists of statements in a function, without those of functions in it."""
    for node in ast.walk(function):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if (
                isinstance(block, list)
                and block
                and not isinstance(node, ast.Module | ast.ClassDef)
            ):
                yield block


def probe_blocks(tree, next_probe):
    """Put a probe where statements begin to run together; return each statement's probe."""
    probes, done = {}, set()
    for function in [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]:
        for block in list(blocks_of(function)):
            if id(block) in done:
                continue
            done.add(id(block))
            new, is_due = [], True
            for statement in block:
                if is_due and not is_told(statement):
                    next_probe += 1
                    new.append(ast.parse(f"_hit({next_probe})").body[0])
                    is_due = False
                probes[id(statement)] = next_probe
                new.append(statement)
                is_due = is_due or isinstance(statement, BLOCKS)
            block[:] = new
    return probes, next_probe


def with_probes(tree):
    """Return the source of a file whose blocks note that they ran."""
    is_first = (
        not is_told(one) and getattr(one, "module", "") != "__future__" for one in tree.body
    )
    tree.body.insert(
        [*is_first, True].index(True), ast.parse("from kprof._probes import hit as _hit").body[0]
    )
    return ast.unparse(ast.fix_missing_locations(tree))


class Copy:
    """A copy of the tracked files in which tests run."""

    def __init__(self, folder):
        self.folder, self.clock = folder, time.time() - 1_000_000
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self.environment = {**os.environ, "PYTHONPATH": str(folder)}
        self.environment["KPROF_PROBES"] = str(folder)

    def write(self, path, text):
        """Write a file, at a time of its own: Python compiles again what changed its time."""
        self.clock += 10
        data = text if isinstance(text, bytes) else text.encode()
        (self.folder / path).write_bytes(data)
        os.utime(self.folder / path, (self.clock, self.clock))

    def run(self, words, cpu_s=None):
        """Run pytest; return its exit status, below 0 where it took more than `cpu_s`."""
        limit = (resource.RLIM_INFINITY,) * 2 if cpu_s is None else (cpu_s, cpu_s + 5)
        return subprocess.run(
            [sys.executable, "-c", LIMITED, repr(limit), sys.executable, *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode


def sources():
    """Return the files that may get a fault, by their names from the top."""
    return [path for area in AREAS for path in sorted((ROOT / area).rglob("*.py"))]


def search(tree_of=ast.parse):
    """Return all faults that can be planted, and the probed text of each file."""
    faults, probed, last = [], {}, 0
    for path in sources():
        name, source = path.relative_to(ROOT).as_posix(), path.read_text()
        tree = tree_of(source)
        probes, last = probe_blocks(tree, last)
        looked = Search(name, source, probes)
        for statement in tree.body:
            looked.visit(statement)
        faults += [one for one in looked.found if one.before != one.after]
        probed[name] = with_probes(tree)
    return faults, probed


def map_tests(tree, probed, known):
    """Return each test's probes, time and whether it fails without a fault.

    `known` is an earlier answer, of which files of tests that did not change are taken over.
    """
    listed = sorted(path for name in TESTS for path in test_files(ROOT / name))
    digests = {path.relative_to(ROOT).as_posix(): digest_of(path) for path in listed}
    code = hashlib.sha256(repr(sorted(probed.items())).encode()).hexdigest()
    if known.get("code") != code:
        known = {"code": code, "files": {}}
    kept = {n: one for n, one in known["files"].items() if digests.get(n) == one["digest"]}
    changed = [name for name in digests if name not in kept]
    if changed:
        for name, one in run_probed(tree, probed, changed).items():
            kept.setdefault(name, {"digest": digests[name], "tests": {}})["tests"].update(one)
    return {"code": code, "files": kept}


def test_files(path):
    """Return the files of tests in a folder, or the one that `path` is."""
    return path.rglob("test_*.py") if path.is_dir() else [path]


def digest_of(path):
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_probed(tree, probed, files):
    """Run tests with probes in the code, and return what they noted, by file and test."""
    originals = {name: (tree.folder / name).read_bytes() for name in probed}
    tree.write("kprof/_probes.py", PROBES)
    for name, text in probed.items():
        tree.write(name, text)
    tree.run([*(word for word in PYTEST if word != "-x"), "-p", "kprof._probes", *files])
    for name, data in originals.items():
        tree.write(name, data)
    found = defaultdict(dict)
    for test, noted in json.loads((tree.folder / "tests.json").read_text()).items():
        found[test.partition("::")[0]][test] = noted
    return {name: found[name] for name in files}


def draw(faults, seed):
    """Yield faults in random order: the area first, then the operator, then the place."""
    generator = random.Random(seed)
    groups = defaultdict(lambda: defaultdict(list))
    for fault in faults:
        area = next(one for one in AREAS if fault.path.startswith(f"{one}/"))
        groups[area][fault.operator].append(fault)
    while any(groups.values()):
        areas = [area for area in AREAS if groups[area]]
        area = generator.choices(areas, [AREAS[one] for one in areas])[0]
        operator = generator.choice(sorted(groups[area]))
        left = groups[area][operator]
        yield left.pop(generator.randrange(len(left)))
        if not left:
            del groups[area][operator]


def try_fault(tree, fault, tests):
    """Return how the tests answer a fault: "caught", "endless" or "survived"."""
    original = (tree.folder / fault.path).read_bytes()
    mutated = original[: fault.start] + fault.after.encode() + original[fault.end :]
    tree.write(fault.path, mutated)
    try:
        for part in shown_to(fault, tests):
            (tree.folder / "shown.txt").write_text("\n".join(part))
            limit_s = 60 + ENDLESS * int(sum(tests[test]["seconds"] for test in part))
            code = tree.run([*PYTEST, "@shown.txt"], limit_s)
            if code:
                return "endless" if code < 0 else "caught"
    finally:
        tree.write(fault.path, original)
    return "survived"


def shown_to(fault, tests):
    """Return the tests that execute a fault's statement, and those of the same files."""
    executing = [test for test, one in tests.items() if fault.probe in one["probes"]]
    folder = ("tests" + fault.path.removeprefix("kprof")).split("/")[:-1]

    def distance(test):
        same = takewhile(
            lambda pair: pair[0] == pair[1], zip(test.split("/"), folder, strict=False)
        )
        return -len(list(same)), tests[test]["seconds"]

    executing.sort(key=distance)
    files = {test.partition("::")[0] for test in executing}
    others = [test for test in tests if test.partition("::")[0] in files and test not in executing]
    others.sort(key=distance)
    return [one for one in (within(executing, tests), within(others, tests)) if one]


def within(chosen, tests):
    """Return the first of the tests that take so long together that no more are shown."""
    shown, left_s = [], SHOWN_S
    for test in chosen:
        left_s -= tests[test]["seconds"]
        if left_s >= 0 and not tests[test]["failed"]:
            shown.append(test)
    return shown


def rows_of(tried):
    """Return one row for all faults, and one for each."""
    counted = [(fault, answer) for fault, answer, _ in tried if fault.change not in EQUIVALENT]
    caught = sum(answer != "survived" for _, answer in counted)
    total = row("caught", caught, "faults", "higher", REACH, of=len(counted))
    return [total] + [
        row(
            fault.name,
            float(answer != "survived"),
            "caught",
            "higher",
            answer=answer,
            executed_by=num_tests,
            equivalent=EQUIVALENT.get(fault.change),
        )
        for fault, answer, num_tests in tried
    ]


def try_faults(trees, faults, tests, args):
    """Plant as many faults as are to count; return each with its answer."""
    counts = Counter(probe for one in tests.values() for probe in one["probes"])
    chosen, left = [], args.faults
    for fault in draw([one for one in faults if counts[one.probe]], args.seed):
        chosen.append(fault)
        left -= fault.change not in EQUIVALENT
        if not left:
            break
    free = Queue()
    for tree in trees:
        free.put(tree)

    def tried(fault):
        tree = free.get()
        answer = try_fault(tree, fault, tests)
        free.put(tree)
        print(f"{answer:8} {counts[fault.probe]:5} {fault.name}", flush=True)
        return fault, answer, counts[fault.probe]

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(tried, chosen))


def main():
    """Plant the faults, print what became of each, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, required=True, help="of the faults that are drawn")
    parser.add_argument("--faults", type=int, default=FAULTS)
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree in use at once")
    parser.add_argument("--map", type=Path, help="keep here which test executes what, or read it")
    parser.add_argument("--result", type=Path, default=None)
    args = parser.parse_args()
    faults, probed = search()
    with tempfile.TemporaryDirectory() as folder:
        trees = [Copy(Path(folder) / str(number)) for number in range(args.jobs)]
        known = json.loads(args.map.read_text()) if args.map and args.map.exists() else {}
        found = map_tests(trees[0], probed, known)
        if args.map:
            args.map.write_text(json.dumps(found))
        tests = {
            name: one for file in found["files"].values() for name, one in file["tests"].items()
        }
        tried = try_faults(trees, faults, tests, args)
    rows = rows_of(tried)
    print(f"caught: {rows[0]['value']} of {rows[0]['of']}")
    if args.result:
        write_evidence(args.result, "faults that the tests catch", rows, SOURCES, seed=args.seed)


if __name__ == "__main__":
    main()
