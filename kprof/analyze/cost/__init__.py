"""Dollars of tokens, fleets and training: exact arithmetic on fractions, no I/O, no clock."""
