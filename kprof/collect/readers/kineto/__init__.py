"""The parts of the Kineto reader; what a decoding process imports is free of pandas."""
