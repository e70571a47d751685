"""Memory of training: keep freed blocks for the next step, and limit the cache of kernels."""

import contextlib
import ctypes
import os

# glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
CACHED_KERNELS = 96
"""oneDNN's cache keeps this many kernels, enough for the products that one step repeats."""


def keep_freed_memory() -> None:
    """Make glibc keep freed large blocks instead of returning them to the system.

    The page faults of mapping them again take about a tenth of a training step. Without glibc
    this does nothing.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 2**26)


def limit_kernel_cache() -> None:
    """Limit oneDNN's cache of compiled kernels, unless its environment variable is set.

    In bf16 it compiles a kernel for each shape of a product, and batches have hundreds of shapes:
    its own limit of 1,024 kernels holds half a gigabyte and saves no time. It reads the variable at
    the first product of a process.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(CACHED_KERNELS))
