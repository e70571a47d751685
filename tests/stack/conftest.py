"""A Ray cluster for tests of commands."""

import pytest
import ray


@pytest.fixture(scope="module")
def cluster_home(prepared, tmp_path_factory):
    """A Ray cluster of two cores that commands find, and a home with the bundled data."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    (home / "data" / "bundled").symlink_to(prepared)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ATTUNE_HOME", str(home))
        context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        patched.setenv("RAY_ADDRESS", context.address_info["address"])
        yield home
        ray.shutdown()
