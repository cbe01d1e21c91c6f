"""Rules: each looks for one thing that costs time or memory, and says what proves it."""
