"""Attribution of every nanosecond of device time."""
