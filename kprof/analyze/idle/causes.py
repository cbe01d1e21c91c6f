"""The causes of idle time: their names, and how the host's calls and functions show them."""

from __future__ import annotations

LAUNCH_BOUND = "launch-bound"
DATA_LOADING = "data loading"
SYNCHRONIZATION = "synchronization"
PAGEABLE_COPY = "pageable copy"
ALLOCATOR = "allocator"
COLLECTIVE_WAIT = "collective wait"
DEPENDENCY_WAIT = "dependency wait"
BETWEEN_KERNELS = "between kernels"
PROFILER = "profiler"
NO_WORK = "no work"

CAUSES = (
    LAUNCH_BOUND,
    DATA_LOADING,
    SYNCHRONIZATION,
    PAGEABLE_COPY,
    ALLOCATOR,
    COLLECTIVE_WAIT,
    DEPENDENCY_WAIT,
    BETWEEN_KERNELS,
    PROFILER,
    NO_WORK,
)

# What goes away with its cause. Of a wait for another stream nobody knows what would be left; the
# device's own time between kernels, and the time in which nothing was to be done, remain; what the
# profiler took is not there without it.
RECOVERABLE = frozenset(
    {LAUNCH_BOUND, DATA_LOADING, SYNCHRONIZATION, PAGEABLE_COPY, ALLOCATOR, COLLECTIVE_WAIT}
)
NOT_RECOVERABLE = frozenset({BETWEEN_KERNELS, PROFILER, NO_WORK})
# The device's and the recorder's own: no start-up of the workload.
BESIDES = (BETWEEN_KERNELS, PROFILER)

# Calls of the CUDA and HIP runtimes and drivers; Nsight Systems adds a version to their names.
SYNCHRONIZING_CALL = (
    r"Synchronize|^(?:cuda|hip)Memcpy(?:2D|3D|Peer|ToSymbol|FromSymbol|WithStream)?(?:_v\d+|_ptds)*$"
    r"|^cuMemcpy(?!.*Async)"
)
ALLOCATING_CALL = (
    r"^(?:cuda|hip)(?!.*Async)(?:Malloc|Free|Host(?:Alloc|Malloc|Free|Register|Unregister))"
    r"|^cuMem(?!.*Async)(?:Create|Release|Map|Unmap|SetAccess|Alloc|Free|Address|Host)"
)
# Copies from memory that is not pinned: the host itself moves the bytes to where the device gets
# them. (Copies the other way are how the host fetches a result, and count as synchronization.)
PAGEABLE_UPLOAD = r"HtoD \(Pageable"
PAGEABLE_DOWNLOAD = r"DtoH \(.*Pageable\)"
# Operators in which the host itself waits for the other ranks.
BLOCKING_COLLECTIVE = r"barrier"
LOADING_RANGE = r"^enumerate\(DataLoader\)#"
LOADING_FUNCTION = r"^torch/utils/data/dataloader\.py\(\d+\): __next__"
# Python's own ways to wait, as its profiler names them.
WAITING_FUNCTION = (
    r"^<built-in (?:function|method) (?:sleep|acquire|select|poll|wait|recv|recv_into|recv_bytes"
    r"|accept|sigwait|sigtimedwait|waitpid)\b(?! of torch)"
)
# What CUPTI reports beside its own work: the driver loads a kernel when it is first launched.
LOADING_OF_KERNELS = r"^Lazy "
DRIVERS_OWN = r"^(?:Lazy |Command Buffer Full)"
