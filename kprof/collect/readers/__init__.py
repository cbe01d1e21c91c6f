"""Readers: one profiler's file to a Trace, one module each."""
