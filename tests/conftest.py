"""The bundled corpus, prepared once, and models small enough for seconds."""

import numpy as np
import polars as pl
import pytest
import torch

from attune.models.base import Batch
from attune.platform import runs
from attune.platform.batches import Ragged, encode
from attune.platform.corpora.labels import EMOTIONS
from attune.platform.corpora.prepare import prepare, read_samples
from attune.platform.text.vocabulary import Vocabulary
from attune.platform.training import settings

# One thread: the same sums whatever the machine, and no fight for cores with Ray's processes, which
# makes OpenMP ten times slower.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "bundled"
    prepare("bundled", folder)
    return folder


@pytest.fixture(scope="session")
def vocabulary(prepared):
    return Vocabulary.build(pl.read_parquet(prepared / "tokens.parquet"), always=EMOTIONS)


@pytest.fixture(scope="session")
def columns(prepared, vocabulary):
    return encode(read_samples(prepared, "train"), vocabulary, emotions=EMOTIONS)


@pytest.fixture(scope="session")
def test_samples(prepared):
    return read_samples(prepared, "test")


@pytest.fixture(scope="session")
def test_columns(test_samples, vocabulary):
    return encode(test_samples, vocabulary, emotions=EMOTIONS)


@pytest.fixture(scope="session")
def batch(columns):
    """Twelve samples, of different lengths as no bucketed batch has them."""
    rows = np.linspace(0, len(columns["index"]) - 1, 12).astype(int)
    few = {
        name: column.padded(rows) if isinstance(column, Ragged) else torch.from_numpy(column[rows])
        for name, column in columns.items()
    }
    return Batch(tensors=few, samples=12, tokens=float((few["response"] != 0).sum()))


@pytest.fixture(scope="session")
def build(vocabulary):
    def make(name, preset="tiny", **changes):
        config = settings.configure(name, preset, changes)[0]
        return runs.build(name, config, vocabulary, EMOTIONS)

    return make
