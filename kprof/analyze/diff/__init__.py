"""The differences between two runs, as rows that add up."""
