"""The limit of oneDNN's kernel cache."""

import os

from attune.platform.core import allocator

VARIABLE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


def test_the_kernel_cache_is_limited_unless_its_variable_is_set(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # restored at the end
    monkeypatch.delenv(VARIABLE)
    allocator.limit_kernel_cache()
    assert os.environ[VARIABLE] == str(allocator.CACHED_KERNELS)
    monkeypatch.setenv(VARIABLE, "7")
    allocator.limit_kernel_cache()
    assert os.environ[VARIABLE] == "7"
