"""Findings: the time that changes would save, by rule."""
