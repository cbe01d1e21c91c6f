"""The reports: a terminal summary, an offline HTML page."""
