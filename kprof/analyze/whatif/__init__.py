"""What a step would take if something were different, by replaying its recording."""
