"""The quantities in a text: numbers with their units, without the words between them."""

import re

UNITS = "%|ns|µs|us|ms|s|h|MHz|W|J|°C|B|KiB|MiB|GiB|TiB|bytes|[KMGT]B(?:/s)?|[GT]FLOP/s|tokens"
QUANTITY = re.compile(rf"(?<![\w.])[-+]?\$?\d[\d,]*(?:\.\d+)?(?: (?:{UNITS})(?![\w/]))?(?!\w)")


def quantities_in(text):
    """Return every number of a text as it is written there, with its unit, in their order."""
    return [found.rstrip(",") for found in QUANTITY.findall(text)]
