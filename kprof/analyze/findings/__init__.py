"""Findings: what the rules see, what a fix would save, and what no rule explains."""
