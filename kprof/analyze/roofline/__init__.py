"""The roofline: the work of each launch against the limits of the device."""
