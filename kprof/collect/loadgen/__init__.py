"""Readers of load generators' result files, one file each: `knows(path, head)`, `read(path)`."""
