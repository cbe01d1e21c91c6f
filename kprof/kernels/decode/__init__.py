"""Whole-model decoding: `generate` of a language model by few fused kernels in CUDA graphs."""
