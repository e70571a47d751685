"""How runs share the machines of a cluster."""

import pytest

from attune.platform.cluster import _shared


@pytest.mark.parametrize(
    ("machines", "workers", "runs", "at_once", "cores"),
    [
        ([2], 1, 1, 1, 2),  # alone: all of it
        ([2], 2, 1, 1, 1),
        ([2], 1, 3, 2, 1),  # two at a time, a core each
        ([16], 1, 3, 3, 5),
        ([4, 4], 1, 3, 3, 2),  # three would not fit with more: two on one machine
        ([5, 5], 3, 1, 1, 2),
        ([4, 4], 1, 2, 2, 4),
        ([2], 4, 1, 1, 1),  # too many workers is for Ray to say
    ],
)
def test_everyone_gets_as_much_as_all_can_have(machines, workers, runs, at_once, cores):
    assert _shared(machines, workers, runs) == (at_once, cores)


@pytest.mark.parametrize(
    ("machines", "workers", "runs", "asked", "at_once"),
    [([8], 1, 3, 2, 3), ([8], 2, 3, 2, 2), ([2], 1, 2, 4, 1), ([4, 4], 1, 9, 3, 2)],
)
def test_cores_that_were_asked_for(machines, workers, runs, asked, at_once):
    assert _shared(machines, workers, runs, asked) == (at_once, asked)
