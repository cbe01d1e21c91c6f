"""Service levels: targets as text, percentiles with bounds, the verdict."""
