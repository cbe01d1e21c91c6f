"""The swap: how kernels get into models, and out again."""
