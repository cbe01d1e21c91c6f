"""Attribution: whose every nanosecond of device time is, and of what kind."""
