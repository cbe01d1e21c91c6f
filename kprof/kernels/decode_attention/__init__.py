"""Attention of a few new tokens over a long KV cache."""
