"""The parts of the Nsight Systems reader."""
