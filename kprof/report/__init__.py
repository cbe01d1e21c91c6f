"""Output for people: the terminal summary and the offline HTML pages."""
