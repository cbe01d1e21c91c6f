"""The report of a trace of two million events: how large its page is, how soon a browser shows it.

    python benchmarks/page_load.py

The trace is made by repeating a recorded one, as `import_speed.py` does. Headless Chromium opens
the page from its file; the best of several loads counts, so that other processes matter less. The
page answers its reader when the last task of more than 50 ms has ended, figures out of sight among
them.
"""

import argparse
import gzip
import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from evidence import row, write_evidence  # noqa: E402
from import_speed import tile  # noqa: E402

from tests.report.browser import browser  # noqa: E402

RECORDED = ROOT / "tests" / "data" / "h200" / "llama_train.json.gz"
RESULT = ROOT / "benchmarks" / "results" / "page_load_cpu_2026-11.json"
SOURCES = (
    "benchmarks/page_load.py",
    "kprof/report/html.py",
    "kprof/report/sections/*.py",
)
SIZE_REACH_BYTES = 3_000_000
INTERACTIVE_REACH_S = 1.5
WINDOW = (1280, 800)
# Nothing begins so long after a page was loaded but what a reader asks for.
QUIET_S = 3.0
OBSERVE = (
    "window.tasks = []; new PerformanceObserver((list) => window.tasks.push(...list.getEntries()))"
    ".observe({ type: 'longtask', buffered: true })"
)
READ = (
    "const [load] = performance.getEntriesByType('navigation');"
    "const [paint] = performance.getEntriesByName('first-contentful-paint');"
    "const ends = window.tasks.map((task) => task.startTime + task.duration);"
    "return [paint.startTime, load.domInteractive, Math.max(load.domInteractive, ...ends)]"
)


def open_page(num_events, folder):
    """Write the report of so many events; return its path and how many there are."""
    text = gzip.decompress(RECORDED.read_bytes()).decode()
    of_each = len(re.findall(r'"ph":', text))
    trace = folder / "trace.json"
    times = tile(RECORDED, trace, math.ceil(num_events / of_each) * len(text))
    run = folder / "trace.kprof"
    command = [sys.executable, "-m", "kprof", "open", trace, "--out", run]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return run / "report.html", times * of_each


def load_times(session, page):
    """Return when a load showed its first text, had its content, and answered, in s."""
    session.visit(page.as_uri())
    session.run(OBSERVE)
    time.sleep(QUIET_S)
    return [ms / 1e3 for ms in session.run(READ)]


def main():
    """Measure, write the result, and say what was met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=2_000_000)
    parser.add_argument("--loads", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kprof-page-") as place:
        page, num_events = open_page(options.events, Path(place))
        with browser(Path(place) / "profile") as session:
            session.resize(*WINDOW)
            loads = [load_times(session, page) for _ in range(options.loads)]
        paint, content, interactive = (min(times) for times in zip(*loads, strict=True))
        size = page.stat().st_size
    rows = [
        row("size of the page", size, "bytes", "lower", reach=SIZE_REACH_BYTES),
        row("time until the first text", paint, "s", "lower"),
        row("time until the content is there, and tables sort", content, "s", "lower"),
        row(
            *("time until no long task is left", interactive, "s", "lower"),
            reach=INTERACTIVE_REACH_S,
        ),
    ]
    what = "the page of a trace of two million events: size and loading"
    trace = {"tiled": RECORDED.name, "events": num_events, "best_of": options.loads}
    write_evidence(RESULT, what, rows, SOURCES, trace=trace)
    for one in rows:
        verdict = {True: "met", False: "NOT met", None: "context"}[one["met"]]
        print(f"{one['name']}: {one['value']} {one['unit']}, reach {one['reach']}: {verdict}")


if __name__ == "__main__":
    main()
