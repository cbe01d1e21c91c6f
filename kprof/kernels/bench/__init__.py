"""The measurement of a kernel's providers, from which one is chosen."""
