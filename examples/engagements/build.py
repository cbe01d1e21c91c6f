"""Make an example engagement: measure, predict, change, prove, report.

    python examples/engagements/build.py voice_agent --out voice

runs, one after the other, the commands of kprof that somebody would type, and prints each. The
page is voice/engagement/report.html; `--tiny` makes the workload small enough for a machine
without a GPU, to try the way.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
ENGAGEMENT = "engagement"
# These answer yes with 0, no with 1, and 3 where nobody can tell.
ANSWERING = ("ab", "kernels")
ANSWERS = (0, 1, 3)


class Kprof:
    """Runs commands of kprof in a folder; what the quality gate said may lie in another."""

    def __init__(self, folder, is_gated, checked=None):
        self.folder, self.is_gated, self.checked = folder, is_gated, checked

    def __call__(self, *words, into=None):
        """Run a command; `into` is the file that keeps what it printed."""
        words = [str(word) for word in words]
        print(f"$ kprof {shlex.join(words)}{f' > {into}' if into else ''}", flush=True)
        started = time.perf_counter()
        command = [sys.executable, "-m", "kprof", *words]
        done = subprocess.run(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        if into:
            (self.folder / into).write_text(done.stdout)
        else:
            print(f"  {(done.stdout.splitlines() or [''])[-1].strip()}")
        tell_end(done.returncode, started)
        is_answer = words[0] in ANSWERING and done.returncode in ANSWERS and done.stdout
        if done.returncode and not is_answer:
            raise SystemExit(f"kprof {words[0]} ended with {done.returncode}")

    def read(self, name):
        """Return a file of JSON that a command left."""
        return json.loads((self.folder / name).read_text())

    def engage(self, action, *words):
        """Do something in the engagement."""
        self("engage", action, ENGAGEMENT, *words)

    def check(self, *kernels):
        """Add what the quality gate says of kernels, where that is wanted."""
        if not (kernels and self.is_gated):
            return
        files = self._checked(kernels) if self.checked else self._check(kernels)
        reports = [report for file in files for report in json.loads(file.read_text())]
        if reports:
            (self.folder / "gate.json").write_text(json.dumps(reports, indent=2))
            self.engage("add", "gate.json")

    def _checked(self, kernels):
        """Return the answers that are there already; what has none stays unchecked."""
        files = [self.checked / f"{kernel}.json" for kernel in kernels]
        return [file for file in files if file.is_file()]

    def _check(self, kernels):
        """Let kernels go through the quality gate, all at the same time: nothing is timed there."""
        started = time.perf_counter()
        files = [self.folder / f"gate-{kernel}.json" for kernel in kernels]
        running = []
        for kernel, file in zip(kernels, files, strict=True):
            print(f"$ kprof kernels check {kernel} --json > {file.name}", flush=True)
            command = [sys.executable, "-m", "kprof", "kernels", "check", kernel, "--json"]
            with file.open("w") as answer:
                running.append(subprocess.Popen(command, cwd=self.folder, stdout=answer))
        codes = [one.wait() for one in running]
        tell_end(codes, started)
        if not set(codes) <= set(ANSWERS):
            raise SystemExit(f"kprof kernels check ended with {codes}")
        return files

    def first_predicted(self, *names):
        """Return the first of these predictions that was made, else one that tests none."""
        self("engage", "status", ENGAGEMENT, "--json", into="status.json")
        made = {
            one["name"]: one
            for entry in self.read("status.json")["entries"]
            for one in entry["content"].get("predictions", [])
        }
        return next((made[name] for name in names if name in made), UNTESTED)


UNTESTED = {"name": "nothing", "swap": ""}


def tell_end(code, started):
    """Say how something ended, and after how long."""
    print(f"  {code} after {time.perf_counter() - started:.0f} s", flush=True)


def speedup_in(comparison):
    """Return how much faster B is, as the band that `kprof cost --speedup` takes."""
    interval = comparison["claims"][0]["interval"]
    ends = (interval[name] for name in ("high", "ratio", "low"))
    return ",".join(f"{1 / ratio:.6g}" for ratio in ends)


def llama_training(kprof, is_tiny, _):
    """The kernels that its findings propose, in the training of a Llama of 1.2 billion."""
    sizes = ("--layers", 1, "--width", 64, "--vocabulary", 100, "--batch", 1, "--tokens", 8)
    script = (EXAMPLES / "train_llama.py", *(sizes if is_tiny else ()))
    tokens = 8 if is_tiny else 4 * 1024

    kprof("run", "--steps", 3, "--out", "before.kprof", *script, "--steps", 20)
    kprof.engage("init", "Training a Llama of 1.2 billion parameters")
    kprof.engage("add", "before.kprof")
    tested = kprof.first_predicted("all-swaps", "unfused_norm")
    kernels = tested["swap"] or "rmsnorm,swiglu,rope,cross_entropy"
    money = ("--gpu", "H200", "--tokens-per-step", tokens)
    # Forty pairs settle what four kernels do to a step, or show that they do little.
    compare = ("ab", "--swap", kernels, *money, *few_pairs(is_tiny, 40), "--out", "ab.kprof")
    kprof(*compare, "--json", *script, "--steps", 100_000, into="ab.json")
    kprof.engage("add", "ab.json", "--tests", tested["name"])
    swapped = ("--swap", kernels, "--out", "after.kprof")
    kprof("run", "--steps", 3, *swapped, *script, "--steps", 20)
    kprof.engage("add", "--after", "after.kprof")
    kprof.check(*kernels.split(","))
    return "First let a longer training show that its loss stays where it was."


def voice_agent(kprof, is_tiny, way):
    """64 tokens in 100 ms: from the loop that is written first to graphs of fused kernels."""
    sizes = ("--layers", 1, "--width", 128, "--vocabulary", 100, "--context", 16, "--tokens", 64)
    agent = EXAMPLES / "engagements" / "voice_agent.py"
    script = (agent, *(sizes if is_tiny else ()))
    # A miss takes a few answers. A p99 takes 459 of the longest slow spell, here of 1 s, to prove.
    before, after = ((5, 0), (5, 0)) if is_tiny else ((20, 0), (20, 470))
    endless = ("--requests", 10_000)
    # Eager, an answer takes half a second, and eight pairs prove a difference as large as this.
    pairs = few_pairs(is_tiny, 8, "--fixed", "--skip", 2)

    kprof("run", "--skip", 3, "--steps", 1, "--out", "before.kprof", *script, "--requests", 8)
    kprof.engage("init", "A voice agent: 64 tokens within 100 ms")
    kprof.engage("add", "before.kprof")
    judge(kprof, script, "eager", before, "before")
    # A static cache alone saves nothing; it is what a graph can hold.
    steps = {"static": "nothing", "cuda_graphs": "no_cuda_graph_in_decode", way: "all-findings"}
    for tried, name in steps.items():
        tested = kprof.first_predicted(name)
        patch = ("--patch", f"{agent}:{tried}", *pairs, "--out", f"{tried}.kprof")
        kprof("ab", *patch, "--json", *script, *endless, into=f"{tried}.json")
        kprof.engage("add", f"{tried}.json", "--tests", tested["name"])
    serve = ("--serve", way, "--requests", 12)
    kprof("run", "--skip", 3, "--steps", 4, "--out", "after.kprof", *script, *serve)
    kprof.engage("add", "--after", "after.kprof")
    judge(kprof, script, way, after, "after")
    facts = ("--tokens-per-step", 64, "--gpus", 1, "--gpu", "H200", "--tokens-per-month", "500M")
    gain = ("--utilisation", 0.4, "--speedup", speedup_in(kprof.read(f"{way}.json")))
    seconds = ("--step-s", 0.1) if is_tiny else ()
    kprof("cost", *facts, *gain, *seconds, "--json", "after.kprof", into="cost.json")
    kprof.engage("add", "--after", "cost.json")
    kprof.check(*OUR_KERNELS.get(way, ()))
    return "First hold its answers against the old ones."


# The kernels of kprof that a way of answering calls.
OUR_KERNELS = {
    "graphs_of_swapped_kernels": ("rmsnorm", "add_rmsnorm", "swiglu", "rope", "decode_attention"),
    "tuned_with_our_attention": ("decode_attention",),
}


def judge(kprof, script, way, least, when):
    """Measure how one way of answering keeps the target, and add that.

    `least`: of requests, and of seconds.
    """
    requests, seconds = least
    answer = f"sla-{when}.json"
    load = ("--requests", requests, "--seconds", seconds)
    words = [*script, "--serve", way, *load, "--sla", kprof.folder / answer]
    print(f"$ python {shlex.join(map(str, words))}", flush=True)
    started = time.perf_counter()
    subprocess.run([sys.executable, *map(str, words)], check=True)
    tell_end(0, started)
    kprof.engage("add", *(["--after"] if when == "after" else []), answer)


def slow_loader(kprof, is_tiny, _):
    """A convolutional net that waits for its images."""
    sizes = ("--batch", 4, "--side", 32, "--width", 4)
    full = ("--batch", 64, "--side", 224, "--width", 64)
    script = (EXAMPLES / "train_convnet.py", *(sizes if is_tiny else full))
    workers = 1 if is_tiny else 8

    kprof("run", "--steps", 6, "--out", "before.kprof", *script, "--steps", 24)
    kprof.engage("init", "A convolutional net that waits for its images")
    kprof.engage("add", "before.kprof")
    tested = kprof.first_predicted("data_loading", "host_stalls")
    change = ("--arg", "--workers", "--arg", workers, "--gpu", "H200")
    # Processes take long to start, and six pairs prove a difference as large as this.
    few = ("--fixed", "--pairs", 6, "--skip", 3, "--window", 0.15)
    compare = ("ab", *change, *few, "--out", "ab.kprof", "--json")
    kprof(*compare, *script, "--steps", 2_000, into="ab.json")
    kprof.engage("add", "ab.json", "--tests", tested["name"])
    # The batches that the workers have made ahead are used up by then.
    settled = ("--steps", 6) if is_tiny else ("--skip", 40, "--steps", 20)
    kprof("run", *settled, "--out", "after.kprof", *script, "--steps", 120, "--workers", workers)
    kprof.engage("add", "--after", "after.kprof")
    return "The images and their order stay the same."


def few_pairs(is_tiny, most, *others):
    """Return options of a comparison of so many pairs, and of a short one to try the way."""
    return ("--pairs", 6, "--window", 0.02, "--skip", 1) if is_tiny else ("--pairs", most, *others)


BUILDERS = {one.__name__: one for one in (llama_training, voice_agent, slow_loader)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=BUILDERS)
    parser.add_argument("--out", type=Path, help="a folder that is not there yet [NAME]")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument(
        "--serve", default="graphs_of_swapped_kernels", help="how the voice agent answers at last"
    )
    parser.add_argument("--ungated", action="store_true", help="no kprof kernels check: it is slow")
    parser.add_argument(
        "--checked", type=Path, help="a folder of what it said before, each as KERNEL.json"
    )
    parser.add_argument(
        "--calibration", type=Path, help="what kprof selftest --json said of this GPU"
    )
    args = parser.parse_args()
    if args.tiny and shutil.which("nvidia-smi") is None:
        # Without a GPU kprof's kernels run in Triton's interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    folder = (args.out or Path(args.name)).resolve()
    folder.mkdir(parents=True)
    kprof = Kprof(folder, not args.ungated, args.checked and args.checked.resolve())
    started = time.perf_counter()
    besides = BUILDERS[args.name](kprof, args.tiny, args.serve)
    if args.calibration:
        kprof.engage("add", args.calibration.resolve())
    kprof.engage("decide", decision_on(kprof, besides))
    kprof.engage("status")
    kprof.engage("report")
    tell_end(args.name, started)


def decision_on(kprof, besides):
    """Return the decision that follows from the newest comparison and target, and what to know."""
    paths = sorted(kprof.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    found = [kprof.read(path) for path in paths]
    *_, verdict = [one["claims"][0]["verdict"] for one in found if "claims" in one]
    if verdict != "FASTER":
        return f"Do not adopt the change: it is {verdict}."
    *_, promise = ["", *(one["verdict"] for one in found if "percentiles" in one)]
    if promise == "MISSED":
        return "Do not adopt the change: it is FASTER, but the target is still missed."
    if promise == "NOT PROVEN":
        besides += " That the target is kept is not proven yet: measure more answers."
    return f"Adopt the change: it is FASTER. {besides}"


if __name__ == "__main__":
    main()
