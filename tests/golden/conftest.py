"""The golden corpus, prepared once."""

import pytest

from tests.golden.preparation import prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    prepare_corpus(folder)
    return folder
