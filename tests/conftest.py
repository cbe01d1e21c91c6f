"""How the property tests run: the same examples each time, or new ones where FUZZ is set."""

import os

from hypothesis import settings

# Speed belongs in benchmarks: a slow machine is no failure. New examples are for those who look.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("fuzz", deadline=None, max_examples=1000)
settings.load_profile("fuzz" if os.environ.get("FUZZ") else "repeatable")
