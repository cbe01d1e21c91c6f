"""The sections of a partner report, one file each."""
