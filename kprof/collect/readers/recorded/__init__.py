"""Recordings of `kprof run`: what it left in a run folder's `raw/`."""
