"""Screenshots: the pictures of reports in docs/images, made of recordings in the repository.

python benchmarks/screenshots.py

Needs Chromium and chromedriver (`make chromium`). Writes docs/images/report.png and
report_420.png: the first screen of the report of tests/data/h200/llama_train.json.gz in a wide and
in a narrow window, and difference.png: of that run against the compiled one.
"""

import base64
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kprof.commands.diff import diff_runs  # noqa: E402
from kprof.opened import open_trace  # noqa: E402
from kprof.report.difference import sections_of_difference  # noqa: E402
from kprof.report.html import write_html  # noqa: E402
from kprof.report.section import sections_of  # noqa: E402
from tests.report.browser import browser  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RECORDINGS = ROOT / "tests" / "data" / "h200"
# Name, page, width and height of the window in pixels, colour scheme.
PICTURES = (
    ("report", "report", 1280, 800, "light"),
    ("report_420", "report", 420, 900, "dark"),
    ("difference", "difference", 1280, 800, "light"),
)


def write_pages(folder):
    """Write the pages of which there are pictures."""
    recordings = [RECORDINGS / f"{name}.json.gz" for name in ("llama_train", "compiled")]
    trace = open_trace(recordings[0])
    write_html(trace.meta.source, sections_of(trace), folder / "report.html")
    compared = diff_runs(*recordings)
    # The tables, which the summary of both runs precedes.
    sections = sections_of_difference(compared)[1:]
    write_html(compared.title, sections, folder / "difference.html")


def take(session, page, path, size, scheme):
    """Take a picture of the first screen of a page."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    session.command("Emulation.setEmulatedMedia", media="", features=features)
    session.resize(*size)
    session.visit(page.as_uri())
    taken = session.command("Page.captureScreenshot", format="png", optimizeForSpeed=False)
    path.write_bytes(base64.b64decode(taken["data"]))


def main():
    """Take all pictures."""
    with tempfile.TemporaryDirectory() as place, browser(Path(place) / "profile") as session:
        write_pages(Path(place))
        for name, page, width, height, scheme in PICTURES:
            path = IMAGES / f"{name}.png"
            take(session, Path(place) / f"{page}.html", path, (width, height), scheme)


if __name__ == "__main__":
    main()
