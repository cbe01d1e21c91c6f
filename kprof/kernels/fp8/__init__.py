"""FP8: quantisation with scales, matrix multiplications, and layers that use them."""
