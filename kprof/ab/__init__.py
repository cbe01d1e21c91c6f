"""Prove: two variants of a workload against each other, and what the difference is worth."""
