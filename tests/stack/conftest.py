"""A home with the bundled data, and a Ray cluster, for tests of commands."""

import pytest
import ray


@pytest.fixture(scope="module")
def home_with_data(prepared, tmp_path_factory):
    """A home with the prepared bundled data and no runs."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    (home / "data" / "bundled").symlink_to(prepared)
    return home


@pytest.fixture(scope="module")
def cluster_home(home_with_data):
    """A Ray cluster of two cores that commands find, and a home with the bundled data."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ATTUNE_HOME", str(home_with_data))
        context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        patched.setenv("RAY_ADDRESS", context.address_info["address"])
        yield home_with_data
        ray.shutdown()
