"""Dollars of tokens, fleets and training: arithmetic alone, no I/O but the assumptions."""
