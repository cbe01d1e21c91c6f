"""What differs between two runs, as rows that add up."""
