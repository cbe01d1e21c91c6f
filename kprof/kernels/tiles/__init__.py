"""The tile kit: device functions that several kernels are made of."""
