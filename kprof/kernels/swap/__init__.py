"""The swap: the reversible way of kernels into models."""
