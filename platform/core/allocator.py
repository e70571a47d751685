"""The allocator: what one step frees, the next one wants again."""

import contextlib
import ctypes

# glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Have glibc keep large blocks for the next step instead of giving them back to the system,
    which faults them in anew each time: about a tenth of a training step. Elsewhere, nothing."""
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 2**30)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_TOP_PAD, 2**26)
