"""Idle time of a device, by cause."""
