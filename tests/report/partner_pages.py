"""Partner reports of given evidence, as pages and as the words on them."""

from __future__ import annotations

import re
from html import unescape

from kprof.report.partner import render_report
from kprof.report.partner.parts import read_template


def page_of(evidence, level="partner", template="partner"):
    return render_report(evidence, read_template(template), level)


def text_of(page):
    """Return what a page says, without its markup."""
    body = page[page.index("<body>") :]
    body = re.sub(r"<(script|style)>.*?</\1>", "", body, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)).replace("\xa0", " "))


def said(evidence, **more):
    return text_of(page_of(evidence, **more))
