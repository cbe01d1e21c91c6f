"""Evidence files: results with what made them, in the form that tests and documents read.

A result is bound to what ran, under `ran`, so that renaming and moving files keep it:

- `compiled/KERNEL/PROVIDER/SHAPE/PASS`: the digest of the compiled code of a configuration, as
  `compiled_code.py` writes it to tests/golden/compiled_code.json;
- `golden/CASE`: the digest of a golden output, as `golden.py` writes it to tests/golden/CASE.json;
- `code/PATH`: the digest of the functions in a file or folder, whatever their order and files,
  without comments, docstrings and imports; for what has no output to compare.
"""

import ast
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GOLDEN = ROOT / "tests" / "golden"
# A result depends on these folders as a whole.
FOLDERS = (
    "kprof/collect/recorder",
    "kprof/kernels/correctness",
    "tests/gate_faults",
    "tests/hostile",
)
# Where a result depends on a source below the first, its golden outputs are those of the second.
# The first match counts; an empty pattern means that another label speaks for the source, None
# that its own code does.
GOLDENS = (
    ("kprof/kernels/correctness/", None),
    ("kprof/kernels/", ""),
    ("kprof/analyze/roofline/bound.py", ""),
    ("kprof/analyze/late_ranks.py", None),
    ("kprof/analyze/findings/rules/stragglers.py", None),
    ("kprof/analyze/verdict/", None),
    ("kprof/analyze/calibration/", None),
    ("kprof/analyze/sla/", "sla_*"),
    ("kprof/analyze/whatif/", "whatif_*"),
    ("kprof/analyze/diff/", "diff"),
    ("kprof/analyze/", "open_*"),
    ("kprof/collect/merge.py", None),
    ("kprof/collect/readers/", "open_*"),
    ("kprof/collect/gpu_ceilings.py", None),
    ("kprof/collect/recorder/", None),
    ("kprof/timing.py", None),
    ("kprof/", ""),
)
PACKAGES = (
    *("kprof", "torch", "triton", "transformers", "torchvision"),
    *("numpy", "scipy", "pandas", "pyarrow", "msgspec", "isal"),
)


def write_evidence(path, what, rows, sources, *, commit=None, versions=None, **more):
    """Write `rows` with command, commit, date, machine, versions and the sources' hashes.

    `versions` are further ones, of peers; what else is worth knowing goes into `more`.
    """
    found = describe_gpu()
    path = named_after(found["gpu"], path)
    result = {
        "schema": 1,
        "what": what,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_arguments()]),
        "commit": commit or current_commit(),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        **found,
        "machine": {"cpu": processor(), "cores": len(os.sched_getaffinity(0))},
        "versions": {**installed_versions(), **(versions or {})},
        "ran": what_ran(sources),
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"result: {path}")


def named_after(gpu, path):
    """Return the path with the name of the GPU that is here, where the script's is another's."""
    model = re.search(r"NVIDIA ([A-Z]+\d+)", gpu or "")
    if model is None:
        return path
    return path.with_name(path.name.replace("_h200", f"_{model[1].lower()}"))


def _arguments():
    """Return the script's arguments; where things lie on this machine is left out."""
    return ["…" if word.startswith("/") else word for word in sys.argv[1:]]


def measured_by(result):
    """Return what an earlier result says of when, where and with what it was measured.

    For one that scores the same recordings again, perhaps elsewhere; nothing without a result.
    """
    if result is None:
        return {}
    told = json.loads(result.read_text())
    kept = ("date", "gpu", "driver", "clocks", "machine", "versions")
    commit = told.get("measured_at_commit", told["commit"])
    return {"measured_at_commit": commit, **{key: told[key] for key in kept}}


def describe_gpu():
    """Return name, driver and clocks of the first GPU, as its driver gives them."""
    fields = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.limit")
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    if shutil.which("nvidia-smi") is None:
        return {"gpu": None, "driver": None, "clocks": None}
    first = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    name, driver, *clocks = first.split(", ")
    labelled = zip(fields[2:], clocks, strict=True)
    return {"gpu": name, "driver": driver, "clocks": ", ".join(f"{f} {c}" for f, c in labelled)}


def processor():
    """Return the model of the host's processor."""
    found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()


def installed_versions():
    """Return the version of Python and of every package that is there."""
    versions = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def what_ran(patterns):
    """Return the digests of all that a result depends on, by label.

    Patterns are from the root. `code/PATH` is a label itself; `kprof/kernels/KERNEL.py` stands for
    the compiled code of this kernel, whichever file holds it.
    """
    labels = {pattern for pattern in patterns if pattern.startswith("code/")}
    labels |= {one for one in compiled() if f"kprof/kernels/{one.split('/')[1]}.py" in patterns}
    paths = {path.resolve() for pattern in patterns for path in ROOT.glob(pattern)}
    sources = (path.relative_to(ROOT).as_posix() for path in paths)
    return digests(sorted(labels.union(labels_of(sources))))


def labels_of(sources):
    """Return the labels of what source files decide."""
    labels = set()
    for source in sources:
        if re.fullmatch(r"kprof/kernels/(?:\w+/)?[a-z]\w*\.py", source):
            kernels = re.findall(r'(?m)^    name="(\w+)",$', (ROOT / source).read_text())
            labels |= {name for name in compiled() if name.split("/")[1] in kernels}
        cases = next((cases for prefix, cases in GOLDENS if source.startswith(prefix)), None)
        if cases:
            labels |= {f"golden/{path.stem}" for path in GOLDEN.glob(f"{cases}.json")}
        elif cases is None:
            folder = next((one for one in FOLDERS if source.startswith(f"{one}/")), source)
            labels.add(f"code/{folder}")
    return sorted(labels)


def digests(labels):
    """Return today's digest of each label; None where what it names is gone."""
    return {label: digest_today(label) for label in labels}


@cache
def digest_today(label):
    """Return the digest of what a label names, as it is now; None where it is gone."""
    kind, _, name = label.partition("/")
    if kind == "compiled":
        return compiled().get(label)
    path = GOLDEN / f"{name}.json" if kind == "golden" else ROOT / name
    if not path.exists():
        return None
    if kind == "golden":
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return digest_of_code(file.read_text() for file in files)


def stale(result):
    """Return the labels of what is no longer as it was when a result was made."""
    return [label for label, one in result["ran"].items() if digest_today(label) != one]


@cache
def compiled():
    """Return the digest of each compiled configuration by its label."""
    stored = json.loads((GOLDEN / "compiled_code.json").read_text())
    return {f"compiled/{name}": one for name, one in stored["configurations"].items()}


def digest_of_code(texts):
    """Return one digest of the statements of Python files, in whatever order and file they are."""
    found = []
    for text in texts:
        for statement in _without_docstrings(ast.parse(text)).body:
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                found.append(dumped(statement))
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:16]


def dumped(node):
    """Return a syntax tree as text that is the same under every version of Python.

    Empty fields are left out: newer versions have more of them.
    """
    if isinstance(node, list):
        return f"[{', '.join(map(dumped, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    named = ", ".join(f"{name}={dumped(value)}" for name, value in fields)
    return f"{type(node).__name__}({named})"


def _without_docstrings(tree):
    """Return a tree without docstrings, and without strings below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_text(one)]
    return tree


def _is_text(statement):
    value = getattr(statement, "value", None)
    return isinstance(statement, ast.Expr) and isinstance(getattr(value, "value", None), str)


def current_commit():
    """Return the commit of the working tree, None outside a repository."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def row(name, value, unit, better, reach=None, **more):
    """Return one row; `met` follows from `value`, `reach` and which way is better.

    With a `peer` and its `peer_value` comes their ratio: above 1 is in our favour.
    """
    peer_value, ratio, met = more.pop("peer_value", None), None, None
    if peer_value is not None and value:
        ratio = peer_value / value if better == "lower" else value / peer_value
    if reach is not None and value is not None:
        met = value <= reach if better == "lower" else value >= reach
    return {
        "name": name,
        "value": rounded(value),
        "unit": unit,
        "better": better,
        "peer": more.pop("peer", None),
        "peer_value": rounded(peer_value),
        "ratio": rounded(ratio),
        "reach": rounded(reach),
        "met": met,
        **more,
    }


def rounded(value):
    """Return four significant digits, None where there is none."""
    return None if value is None else float(f"{value:.4g}")
