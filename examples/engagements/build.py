"""Make an example engagement: measure, predict, change, prove, report.

    python examples/engagements/build.py voice_agent --out voice

runs, one after the other, the commands of kprof that somebody would type, and prints each. The
page is voice/engagement/report.html; `--tiny` makes the workload small enough for a machine
without a GPU, to try the way.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent
ENGAGEMENT = "engagement"
# These answer yes with 0, no with 1, and 3 where nobody can tell.
ANSWERING = ("ab", "kernels")


class Kprof:
    """Runs commands of kprof in a folder."""

    def __init__(self, folder, is_gated):
        self.folder, self.is_gated = folder, is_gated

    def __call__(self, *words, into=None):
        """Run a command; `into` is the file that keeps what it printed."""
        words = [str(word) for word in words]
        print(f"$ kprof {shlex.join(words)}{f' > {into}' if into else ''}", flush=True)
        started = time.perf_counter()
        command = [sys.executable, "-m", "kprof", *words]
        done = subprocess.run(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        if into:
            (self.folder / into).write_text(done.stdout)
        last = (done.stdout.splitlines() or [""])[-1]
        print(
            f"  {last}\n  {done.returncode} after {time.perf_counter() - started:.0f} s", flush=True
        )
        is_answer = words[0] in ANSWERING and done.returncode in (1, 3) and done.stdout
        if done.returncode and not is_answer:
            raise SystemExit(f"kprof {words[0]} ended with {done.returncode}")

    def read(self, name):
        """Return a file of JSON that a command left."""
        return json.loads((self.folder / name).read_text())

    def engage(self, action, *words):
        """Do something in the engagement."""
        self("engage", action, ENGAGEMENT, *words)

    def check(self, *kernels):
        """Let kernels go through the quality gate, where that is wanted."""
        if self.is_gated:
            self("kernels", "check", *kernels, "--json", into="gate.json")
            self.engage("add", "gate.json")

    def first_predicted(self, *names):
        """Return the first of these predictions that was made, else what tests none."""
        self("engage", "status", ENGAGEMENT, "--json", into="status.json")
        made = {
            one["name"]
            for entry in self.read("status.json")["entries"]
            for one in predictions(entry)
        }
        return next((name for name in names if name in made), "nothing")


def predictions(entry):
    """Return what an entry predicts."""
    return entry["content"].get("predictions", [])


def speedup_in(comparison):
    """Return how much faster B is, as the band that `kprof cost --speedup` takes."""
    interval = comparison["claims"][0]["interval"]
    ends = (interval[name] for name in ("high", "ratio", "low"))
    return ",".join(f"{1 / ratio:.6g}" for ratio in ends)


def llama_training(kprof, is_tiny, _):
    """Four kernels of kprof in the training of a Llama of 1.2 billion parameters."""
    sizes = ("--layers", 1, "--width", 64, "--vocabulary", 100, "--batch", 1, "--tokens", 8)
    script = (EXAMPLES / "train_llama.py", *(sizes if is_tiny else ()))
    kernels = ("rmsnorm", "swiglu", "rope", "cross_entropy")
    tokens = 8 if is_tiny else 4 * 1024

    kprof("run", "--steps", 6, "--out", "before.kprof", *script, "--steps", 40)
    kprof.engage("init", "Training a Llama of 1.2 billion parameters")
    kprof.engage("add", "before.kprof")
    tests = kprof.first_predicted("all-swaps", "unfused_norm")
    money = ("--gpu", "H200", "--tokens-per-step", tokens)
    compare = ("ab", "--swap", ",".join(kernels), *money, *few_pairs(is_tiny), "--out", "ab.kprof")
    kprof(*compare, "--json", *script, "--steps", 100_000, into="ab.json")
    kprof.engage("add", "ab.json", "--tests", tests)
    swapped = ("--swap", ",".join(kernels), "--out", "after.kprof")
    kprof("run", "--steps", 6, *swapped, *script, "--steps", 40)
    kprof.engage("add", "--after", "after.kprof")
    kprof.check(*kernels)


def voice_agent(kprof, is_tiny, way):
    """64 tokens in 100 ms: from the loop that is written first to graphs of fused kernels."""
    sizes = ("--layers", 1, "--width", 128, "--vocabulary", 100, "--context", 16, "--tokens", 64)
    agent = EXAMPLES / "engagements" / "voice_agent.py"
    script = (agent, *(sizes if is_tiny else ()))
    fewest = (5, 5) if is_tiny else (20, 470)  # 459 is what it takes to prove a p99.
    endless = ("--requests", 10_000)

    kprof("run", "--skip", 3, "--steps", 1, "--out", "before.kprof", *script, "--requests", 12)
    kprof.engage("init", "A voice agent: 64 tokens within 100 ms")
    kprof.engage("add", "before.kprof")
    judge(kprof, script, "eager", fewest[0], "before")
    for tried, name in {"graphs": "no_cuda_graph_in_decode", way: "all-findings"}.items():
        tests = kprof.first_predicted(name)
        patch = ("--patch", f"{agent}:{tried}", *few_pairs(is_tiny), "--out", f"{tried}.kprof")
        kprof("ab", *patch, "--json", *script, *endless, into=f"{tried}.json")
        kprof.engage("add", f"{tried}.json", "--tests", tests)
    serve = ("--serve", way)
    kprof("run", "--skip", 3, "--steps", 4, "--out", "after.kprof", *script, *serve)
    kprof.engage("add", "--after", "after.kprof")
    judge(kprof, script, way, fewest[1], "after")
    facts = ("--tokens-per-step", 64, "--gpus", 1, "--gpu", "H200", "--tokens-per-month", "500M")
    gain = ("--utilisation", 0.4, "--speedup", speedup_in(kprof.read(f"{way}.json")))
    seconds = ("--step-s", 0.1) if is_tiny else ()
    kprof("cost", *facts, *gain, *seconds, "--json", "after.kprof", into="cost.json")
    kprof.engage("add", "--after", "cost.json")


def judge(kprof, script, way, requests, when):
    """Measure how one way of answering keeps the target, and add that."""
    answer = f"sla-{when}.json"
    words = [*script, "--serve", way, "--requests", requests, "--sla", kprof.folder / answer]
    print(f"$ python {shlex.join(map(str, words))}", flush=True)
    subprocess.run([sys.executable, *map(str, words)], check=True)
    kprof.engage("add", *(["--after"] if when == "after" else []), answer)


def slow_loader(kprof, is_tiny, _):
    """A convolutional net that waits for its images."""
    sizes = ("--batch", 4, "--side", 32, "--width", 4)
    full = ("--batch", 64, "--side", 224, "--width", 64)
    script = (EXAMPLES / "train_convnet.py", *(sizes if is_tiny else full))
    workers = 1 if is_tiny else 8

    kprof("run", "--steps", 6, "--out", "before.kprof", *script, "--steps", 30)
    kprof.engage("init", "A convolutional net that waits for its images")
    kprof.engage("add", "before.kprof")
    tests = kprof.first_predicted("data_loading", "host_stalls")
    change = ("--arg", "--workers", "--arg", workers, "--gpu", "H200")
    # Processes take long to start, and six pairs prove a difference as large as this.
    compare = ("ab", *change, "--fixed", "--pairs", 6, "--out", "ab.kprof", "--json")
    kprof(*compare, *script, "--steps", 2_000, into="ab.json")
    kprof.engage("add", "ab.json", "--tests", tests)
    longer = ("--steps", 6 if is_tiny else 20)
    kprof("run", *longer, "--out", "after.kprof", *script, "--steps", 80, "--workers", workers)
    kprof.engage("add", "--after", "after.kprof")


def few_pairs(is_tiny):
    """Return options that make a comparison short where only the way is tried."""
    return ("--pairs", 6, "--window", 0.02, "--skip", 1) if is_tiny else ()


BUILDERS = {one.__name__: one for one in (llama_training, voice_agent, slow_loader)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", choices=BUILDERS)
    parser.add_argument("--out", type=Path, help="a folder that is not there yet [NAME]")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--serve", default="compiled", help="how the voice agent answers at last")
    parser.add_argument("--ungated", action="store_true", help="no kprof kernels check: it is slow")
    args = parser.parse_args()
    folder = (args.out or Path(args.name)).resolve()
    folder.mkdir(parents=True)
    kprof = Kprof(folder, is_gated=not args.ungated)
    BUILDERS[args.name](kprof, args.tiny, args.serve)
    kprof.engage("decide", decision_on(kprof))
    kprof.engage("status")
    kprof.engage("report")


def decision_on(kprof):
    """Return the decision that follows from the newest comparison and target."""
    names = sorted(kprof.folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    verdicts = [kprof.read(path)["claims"][0]["verdict"] for path in names if is_comparison(path)]
    adopted = verdicts[-1] == "FASTER"
    return f"{'Adopt' if adopted else 'Do not adopt'} the change: it is {verdicts[-1]}."


def is_comparison(path):
    """Tell whether a file is what `kprof ab --json` printed."""
    content = json.loads(path.read_text())
    return isinstance(content, dict) and "claims" in content


if __name__ == "__main__":
    main()
