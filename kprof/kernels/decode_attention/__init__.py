"""Attention of a few new tokens over a long cache of keys and values."""
