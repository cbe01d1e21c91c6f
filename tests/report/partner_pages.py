"""Partner reports of given evidence, as pages and as the words on them."""

from __future__ import annotations

import re
from html import unescape

from kprof.report.partner import render_report
from kprof.report.partner.parts import read_template
from tests.quantities import quantities_in


def page_of(evidence, level="partner", template="partner"):
    return render_report(evidence, read_template(template), level)


def text_of(page):
    """Return what a page says, without its markup."""
    body = page[page.index("<body>") :]
    body = re.sub(r"<(script|style)>.*?</\1>", "", body, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)).replace("\xa0", " "))


def said(evidence, **more):
    return text_of(page_of(evidence, **more))


def plain(markup):
    return re.sub(
        r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", markup)).replace("\xa0", " ")
    ).strip()


def cells_in(page):
    """Return every row of every table of a page, as tuples of cells."""
    rows = re.findall(r"<tr(?: [^>]*)?>(<td.*?)</tr>", page)
    cell = r'<td (?!class="bars")[^>]*>(.*?)</td>'
    return [tuple(map(plain, re.findall(cell, row))) for row in rows]


def rows_of(evidence, *starts, **more):
    """Return the rows of the page that begin with these cells, without them."""
    rows = cells_in(page_of(evidence, **more))
    return [row[len(starts) :] for row in rows if row[: len(starts)] == starts]


def facts_of(evidence, label, **more):
    """Return the values of a headline figure, or of a fact of every finding."""
    values = re.findall(
        rf"<dt>{label}</dt>(<dd.*?)</div>", page_of(evidence, **more), flags=re.DOTALL
    )
    return [plain(value) for value in values]


def steps_of(evidence, **more):
    """Return the next steps that the page lists."""
    steps = re.findall(r'<ol class="steps">(.*?)</ol>', page_of(evidence, **more))
    return [plain(one) for found in steps for one in re.findall(r"<li>(.*?)</li>", found)]


def verdict_of(evidence, **more):
    """Return the tone of the verdict, its word, and the amounts in its sentence."""
    found = re.search(
        r'class="verdict (\w+)"><p class="word"><span[^>]*>.</span>(.*?)</p>'
        r'<p class="sentence">(.*?)</p>',
        page_of(evidence, **more),
    )
    return found[1], plain(found[2]), quantities_in(plain(found[3]))


def paragraphs_of(evidence, tone, **more):
    """Return the paragraphs of one tone: plain, good, warning or muted."""
    found = re.findall(rf'<p class="{tone}">(.*?)</p>', page_of(evidence, **more), flags=re.DOTALL)
    return [plain(one) for one in found]


def headings_of(evidence, **more):
    return [plain(one) for one in re.findall(r"<h3[^>]*>(.*?)</h3>", page_of(evidence, **more))]
