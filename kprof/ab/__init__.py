"""A against B: in one process, in alternating processes, as functions; and its cost."""
