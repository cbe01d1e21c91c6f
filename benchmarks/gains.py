"""Measure what `kprof ab --swap auto` gains on training scripts of public repositories, unmodified.

    python benchmarks/gains.py FOLDER [ROW ...] --result gains_<gpu>_<yyyy-mm>.json

FOLDER holds clones of the repositories that `ROWS` names: karpathy/nanoGPT, karpathy/llama2.c and
karpathy/llm.c. Their data is generated: random tokens. A row of eager code is one call of
`kprof ab --swap auto`, which knows nothing of the script; the row of a compiled script compares it
with itself with the kernels that the eager row chose. Ratios are of step times, original over
swapped; the interval is the comparison's own.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from evidence import RESULTS, row, write_evidence

ROOT = Path(__file__).resolve().parent.parent
TOKENS = 4_000_000
SEED = 7
# Modules that scripts import for text, which is generated here; for where they are missing.
STUBS = {
    "sentencepiece": "class SentencePieceProcessor:\n    pass\n",
    "tiktoken": "class get_encoding:\n    def __init__(self, name):\n        pass\n",
    "requests": "",
    "tqdm": "def tqdm(*args, **named):\n    pass\n",
}


def nano_gpt(folder):
    """Write random tokens as nanoGPT reads them."""
    data = folder / "data" / "generated"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        tokens(50_257).tofile(data / f"{name}.bin")


def llama2_c(folder):
    """Write random tokens as llama2.c reads them."""
    data = folder / "data" / "TinyStories_all_data"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("data00", "data01"):
        tokens(32_000).tofile(data / f"{name}.bin")


def llm_c(folder):
    """Write random tokens as llm.c reads them."""
    header = np.zeros(256, np.int32)
    header[:3] = 20_240_520, 1, TOKENS
    with (folder / "generated.bin").open("wb") as file:
        header.tofile(file)
        tokens(50_257).tofile(file)


def tokens(vocabulary):
    """Return random tokens."""
    return np.random.default_rng(SEED).integers(0, vocabulary, TOKENS).astype(np.uint16)


@dataclass(frozen=True)
class Row:
    """A script, and how it is called."""

    folder: str
    prepare: object
    script: tuple[str, ...]
    """Script and arguments."""
    reach: float | None = None
    like: str = ""
    """The row whose kernels are compared here; empty: they are chosen."""


NANO = (
    *("train.py", "--dataset=generated", "--eval_iters=1", "--eval_interval=1000000"),
    *("--gradient_accumulation_steps=1", "--max_iters=1000000", "--log_interval=100000"),
)
LLAMA = (
    *("train.py", "--batch_size=16", "--max_seq_len=1024", "--dim=768", "--n_layers=12"),
    *("--n_heads=12", "--n_kv_heads=12", "--gradient_accumulation_steps=1", "--eval_iters=1"),
    *("--eval_interval=1000000", "--max_iters=1000000", "--log_interval=100000"),
)
LLM_C = (
    *("train_gpt2.py", "--input_bin=generated.bin", "--model=d12", "--batch_size=12"),
    *("--sequence_length=1024", "--total_batch_size=12288", "--num_iterations=1000000"),
    *("--dtype=bfloat16", "--tensorcores=1", "--flash=1", "--write_tensors=0"),
    *("--overfit_single_batch=0", "--inference_only=0"),
)
ROWS = {
    "nanogpt": Row("nanoGPT", nano_gpt, (*NANO, "--compile=False"), 1.3),
    "nanogpt_compiled": Row("nanoGPT", nano_gpt, (*NANO, "--compile=True"), 1.05, "nanogpt"),
    "llama2c": Row("llama2.c", llama2_c, (*LLAMA, "--compile=False")),
    "llmc": Row("llm.c", llm_c, (*LLM_C, "--compile=0")),
}


def main():
    """Measure the rows named, or all; write the result after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--pairs", type=int, default=60, help="at most, of each comparison")
    parser.add_argument("--commit", help="of this code, where it is no clone")
    parser.add_argument("--result", type=Path, default=RESULTS / "gains_h100_2026-11.json")
    args = parser.parse_args()
    found, rows = {}, []
    for name in args.rows or ROWS:
        one, began_s = ROWS[name], time.monotonic()
        if one.like and not found.get(one.like):
            print(f"{name}: no kernels were chosen for {one.like}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as out:
            told = compared(args, one, found.get(one.like), Path(out) / "ab")
        found[name] = told.pop("chosen", None)
        took_s = round(time.monotonic() - began_s, 1)
        value = told.pop("speedup")
        rows.append(row(name, value, "x", "higher", one.reach, seconds=took_s, **told))
        print(json.dumps(rows[-1], indent=1), flush=True)
        sources = ("benchmarks/gains.py", "kprof/kernels/**/*.py", "kprof/ab/choose.py")
        what = "Step time of public training scripts over that with the kernels of --swap auto."
        write_evidence(args.result, what, rows, sources, commit=args.commit)


def compared(args, one, kernels, out):
    """Return what `kprof ab` says of a row."""
    folder = args.folder.resolve() / one.folder
    one.prepare(folder)
    for name, text in STUBS.items():
        if importlib.util.find_spec(name) is None:
            (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "kprof", "ab", "--json", "--out", str(out)]
    command += ["--swap", kernels or "auto", "--pairs", str(args.pairs), *one.script]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    print(ran.stderr[-2500:], flush=True)
    if not ran.stdout:
        return {"speedup": None, "problem": ran.stderr[-600:]}
    told = json.loads(ran.stdout)
    claim = told["claims"][0]
    interval = claim.get("interval") or {}
    choice = out / "choice.json"
    tried = json.loads(choice.read_text())["tried"] if choice.exists() else []
    return {
        "speedup": 1 / interval["ratio"] if interval else None,
        "low": 1 / interval["high"] if interval else None,
        "high": 1 / interval["low"] if interval else None,
        "verdict": claim["verdict"],
        "num_pairs": claim["num_pairs"],
        "script": " ".join(one.script),
        "b": told["b"],
        "chosen": told["b"].removeprefix("--swap ").partition(", chosen")[0],
        "tried": [{key: try_[key] for key in ("name", "ratio", "low", "high")} for try_ in tried],
    }


if __name__ == "__main__":
    main()
