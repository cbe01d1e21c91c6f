"""Launching kernels, and registering them as operators of torch."""
