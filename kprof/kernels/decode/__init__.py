"""Whole-model decoding: `generate` of a causal language model by few fused kernels in CUDA graphs."""
