"""Rules: each looks for one cause of lost time or memory."""
