"""Memory settings of training: glibc's reuse of freed blocks, and oneDNN's kernel cache."""

import contextlib
import ctypes
import os

# glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
CACHED_KERNELS = 96
"""Capacity of oneDNN's cache in kernels, enough for the matrix products that a step repeats."""


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks instead of returning them to the operating system.

    Otherwise the page faults of mapping them again take about a tenth of a training step. On
    systems without glibc this has no effect.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 2**26)


def limit_kernel_cache() -> None:
    """Limit oneDNN's cache of compiled kernels, unless its environment variable is set.

    In bf16 oneDNN compiles a kernel for each shape of a matrix product, and batches have hundreds
    of shapes. Its default of 1,024 kernels uses half a gigabyte and saves no time. The variable is
    read at the first matrix product of a process.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(CACHED_KERNELS))
