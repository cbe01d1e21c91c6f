"""Workloads with one planted fault each, and without it, on a simulated host and GPU."""
