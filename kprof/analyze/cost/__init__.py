"""Dollars of tokens, fleets and training: arithmetic alone, no I/O, no clock."""
