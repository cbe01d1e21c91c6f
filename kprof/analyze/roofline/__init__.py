"""The roofline: what work each launch has, what bounds it, and how much of the device it uses."""
