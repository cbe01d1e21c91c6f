"""The script counts what it has: threads, descriptors, children, handlers, paths, random state."""

# seen: 9

import gc
import os
import random
import re
import resource
import signal
import sys
import threading

import torch

if torch.cuda.is_available():
    torch.set_default_device("cuda")

torch.manual_seed(0)
random.seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
print(threading.active_count(), threading.enumerate() == [threading.main_thread()])
# The driver's own are kept by CUPTI, as after any use of torch's profiler.
files = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
shown = (name for name in files if not name.startswith("/dev/nvidia"))
print(sorted("a file" if os.path.isfile(name) else re.sub(r"\d+", "N", name) for name in shown))
print(os.path.exists(f"/proc/{os.getpid()}/task/0/children"))
print([signal.getsignal(number) for number in sorted(signal.valid_signals())])
print(sys.path, len(sys.path_hooks), sys.flags, sys.getrecursionlimit())
print(sys.gettrace(), sys.getprofile(), gc.get_threshold(), gc.callbacks, os.getcwd())
print(torch.rand(1).item(), random.random(), torch.get_num_threads(), torch.is_grad_enabled())
print(resource.getrlimit(resource.RLIMIT_NOFILE), sys.getswitchinterval(), sys.stdout.encoding)
print(torch.autograd.profiler._is_profiler_enabled, torch.autograd._profiler_enabled())
