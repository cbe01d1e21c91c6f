"""The decoding process that `workers` starts."""

from kprof.collect.readers._kineto.workers import serve

serve()
