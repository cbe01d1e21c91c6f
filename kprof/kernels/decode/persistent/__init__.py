"""Greedy decoding of a whole model in one launch: its schedule, its kernel and its launches."""
