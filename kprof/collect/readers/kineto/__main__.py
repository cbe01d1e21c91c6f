"""The decoding process that `workers` starts."""

from kprof.collect.readers.kineto.workers import serve

serve()
