"""Golden outputs: the canonical JSON that today's commands make of stored inputs.

python benchmarks/golden.py [CASE ...] [--check]

Writes tests/golden/CASE.json for the inputs of the repository. For recordings outside of it
(../shared/traces) it writes their digests, to tests/golden/shared.json. With --check it writes
nothing and names each case that differs. A refactoring leaves every file as it is; a change of
results shows in the diff of these files.
"""

import argparse
import contextlib
import hashlib
import html
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
DATA = ROOT / "tests" / "data"
SHARED = ROOT.parent / "shared" / "traces"
RECORDINGS = ("llama_train", "hf_generate", "convnet_dataloader", "compiled", "cudagraph")
# Enough to see any change of a result; the last digits of a float depend on the processor.
SIGNIFICANT_DIGITS = 9
# They tell when, where and with which versions a command ran.
VOLATILE = {"date", "created", "version", "kprof_version", "folder", "path", "report"}
# Which rules lack data of a recording: a new rule would change the output of each such recording.
OF_RULES = {"not_applicable"}


class Outputs:
    """Runs commands of kprof in this process; opened runs stay in one temporary folder."""

    def __init__(self, folder):
        self._folder = Path(folder)

    def of(self, case):
        """Return the canonical output of a case: its exit code, and its JSON or text."""
        return CASES[case](self)

    def open(self, trace):
        """Return the output of `kprof open --json`, keeping the run."""
        return self.run("open", trace, "--out", self._run_of(trace), "--force", "--json")

    def opened(self, name):
        """Return the folder of the opened recording of this name."""
        trace = DATA / "h200" / f"{name}.json.gz"
        if not self._run_of(trace).exists():
            self.open(trace)
        return self._run_of(trace)

    def saved(self, name, *arguments):
        """Return a file with the JSON that a command prints."""
        path = self._folder / f"{name}.json"
        path.write_text(self._printed(arguments)[1])
        return path

    def page(self, *arguments):
        """Return the text of the page that a command writes."""
        path = self._folder / "page.html"
        code, _ = self._printed((*arguments, "--out", path, "--force"))
        return {"exit_code": code, "text": text_of(path.read_text()) if path.exists() else None}

    def run(self, *arguments):
        """Return exit code and JSON of a command."""
        code, printed = self._printed(arguments)
        return {"exit_code": code, "json": json.loads(printed) if printed else None}

    def _run_of(self, trace):
        return self._folder / f"{trace.name.removesuffix('.json.gz')}.kprof"

    def _printed(self, arguments):
        from kprof.__main__ import main

        told, code = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), 0
        words = ["kprof", *map(str, arguments)]
        streams = contextlib.redirect_stdout(told), contextlib.redirect_stderr(io.StringIO())
        with patch.object(sys, "argv", words), streams[0], streams[1]:
            try:
                main()
            except SystemExit as ended:
                code = ended.code or 0
        told.flush()
        return code, told.buffer.getvalue().decode()


def _cases():
    """Return what makes each case's output."""
    cases = {}
    for name in RECORDINGS:
        cases[f"open_{name}"] = lambda to, name=name: to.open(DATA / "h200" / f"{name}.json.gz")
    cases["open_whole_step"] = lambda to: to.open(DATA / "h200" / "whole_step")
    cases["diff"] = lambda to: to.run(
        "diff", to.opened("llama_train"), to.opened("compiled"), "--json"
    )
    for name in RECORDINGS:
        changes = ("kind:gemm=2", "kind:elementwise=removed", "graphs")
        cases[f"whatif_{name}"] = lambda to, name=name, changes=changes: to.run(
            "whatif", to.opened(name), *changes, "--json"
        )
    responses = DATA / "responses"
    targets = ("--target", "ttft_p50<=10s", "--target", "ttft_p99<=1ms", "--json")
    cases["sla_aiperf"] = lambda to: to.run("sla", responses / "aiperf", *targets)
    cases["sla_guidellm"] = lambda to: to.run("sla", f"{responses}/guidellm.json#1", *targets)
    day = ("--as-of", "2026-11-26")
    cost = ("cost", "--gpu", "H100", "--price", "2.5", "--tokens-per-s", "2000,2500,3000", *day)
    cases["cost_tokens"] = lambda to: to.run(*cost, "--utilisation", "0.4", "--json")
    cases["cost_run"] = lambda to: to.run(
        "cost", to.opened("llama_train"), "--gpu", "H200", "--price", "3", *day, "--json"
    )
    cases["report_runs"] = lambda to: to.page(
        "report", to.opened("llama_train"), to.opened("compiled")
    )
    cases["report_cost"] = lambda to: to.page(
        "report", to.opened("llama_train"), to.saved("cost", *cost, "--json")
    )
    return cases


CASES = _cases()


def text_of(page):
    """Return the words of a page of HTML, a line each block, without scripts and styles."""
    body = re.sub(r"(?s)<(script|style)\b.*?</\1>", " ", page)
    words = html.unescape(re.sub(r"<[^>]+>", "\n", body))
    words = re.sub(r"\b\d{4}-\d{2}-\d{2}\b", "DATE", words)
    # Of saved files, which hold when they were made.
    words = re.sub(r"\b[0-9a-f]{64}\b", "SHA-256", words)
    return [line.strip() for line in words.splitlines() if line.strip()]


def canonical(value):
    """Return a result as text that depends on nothing but its content: keys sorted, one a line."""
    return json.dumps(_plain(value), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key not in VOLATILE | OF_RULES}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    return value


def digest(text):
    """Return the SHA-256 of a canonical text, shortened to 16 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def shared_recordings():
    """Return the recordings outside of the repository by their names, none where they are not."""
    known = ("*.json.gz", "*.sqlite.gz", "*.csv.gz", "*.json")
    found = sorted({path for pattern in known for path in SHARED.rglob(pattern)})
    return {path.relative_to(SHARED).as_posix(): path for path in found}


def main():
    """Write the golden outputs named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--check", action="store_true", help="write nothing, name what differs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outputs = Outputs(folder)
        made = {f"{case}.json": canonical(outputs.of(case)) for case in args.cases or CASES}
        if not args.cases and shared_recordings():
            digests = {
                name: digest(canonical(outputs.open(path)))
                for name, path in shared_recordings().items()
            }
            made["shared.json"] = canonical(digests)
    differing = [name for name, text in made.items() if not _is_stored(name, text)]
    for name in differing:
        print(f"{'differs' if args.check else 'written'}: tests/golden/{name}")
        if not args.check:
            (GOLDEN / name).write_text(made[name])
    sys.exit(int(args.check and bool(differing)))


def _is_stored(name, text):
    path = GOLDEN / name
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    main()
