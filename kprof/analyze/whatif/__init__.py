"""Predicts the time of a step under a change, by replaying its recording."""
