"""Gated units and their activations."""
