"""What people see: the terminal summary and the offline HTML page."""
