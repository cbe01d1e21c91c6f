"""The Kineto reader; a decoding process imports no pandas."""
