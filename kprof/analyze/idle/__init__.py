"""Idle time of a device: its gaps, and what caused each of them."""
