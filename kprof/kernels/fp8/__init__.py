"""FP8: quantisation with scales, matrix multiplications, layers that use them."""
