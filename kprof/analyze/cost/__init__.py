"""Dollars of tokens, fleets, training: arithmetic alone, no I/O, no clock."""
