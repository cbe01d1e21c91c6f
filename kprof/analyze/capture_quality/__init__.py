"""How far a capture can be trusted, and what it cannot answer."""
