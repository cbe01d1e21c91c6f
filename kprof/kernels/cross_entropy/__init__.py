"""Cross-entropy over a large vocabulary, alone or with the linear layer before it."""
