"""The quality of a capture: how far it can be trusted."""
