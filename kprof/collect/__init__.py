"""All that touches a GPU, a child process or a profiler's file."""
