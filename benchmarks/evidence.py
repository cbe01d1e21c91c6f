"""Evidence files: results with what made them, in the form that tests and documents read."""

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
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
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
        "sources": hash_sources(sources),
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


def hash_sources(patterns):
    """Return the SHA-256 of every file that the figures depend on; patterns are from the root."""
    paths = {path.resolve() for pattern in patterns for path in ROOT.glob(pattern)}
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
    }


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
