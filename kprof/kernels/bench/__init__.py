"""Measuring the providers of a kernel, and choosing among them."""
