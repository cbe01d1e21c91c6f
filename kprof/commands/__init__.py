"""The commands, one file each: a function named after its verb, its options, no logic."""
