"""Pure functions from tables to tables: no GPU, no torch, no printing, no drawing."""
