"""A against B: one process, alternating processes, functions."""
