"""Numbers in a text: a test of a sentence is about them, and not about its words."""

import re

UNITS = "%|[mµn]?s|J|W|MHz|[kMGT]?B|[KMG]iB"


def amounts(text):
    """Return the numbers of a text with their units, in order: '20.0 %', '$0.10', '32 ms'."""
    number = rf"-?\$?\d+(?:,\d{{3}})*(?:\.\d+)?(?: (?:{UNITS})(?!\w))?"
    return re.findall(rf"(?<![\w.-]){number}(?!\w|[.,]\w)", text)
