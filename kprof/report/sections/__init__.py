"""One part of the report each."""
