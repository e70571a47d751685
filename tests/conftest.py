"""Fixtures for all tests: the prepared bundled corpus, tiny models, and the command line."""

import os
import signal
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
import torch

from attune.jobs import cli
from attune.models.base import Batch
from attune.platform.batching.encoding import (
    Ragged,
    encode,
    encode_as_subwords,
    encode_for_pretrained,
)
from attune.platform.core.settings import find_variant
from attune.platform.data import bundled
from attune.platform.data.dataset_folder import read_dataset_manifest, read_dataset_samples
from attune.platform.data.labels import EMOTIONS
from attune.platform.data.prepare import prepare
from attune.platform.runs.model import build_model, save_model
from attune.platform.text import encoders
from attune.platform.text.emotion_words import EmotionWords
from attune.platform.text.vocabulary import Vocabulary
from attune.platform.training import settings
from tests.encoders import write_tiny_encoder
from tests.golden.preparation import prepare_corpus
from tests.runs import write_run

# One thread: sums do not depend on the machine, and OpenMP does not compete for cores with Ray's
# processes, which makes it ten times slower.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
# By default Ray's workers have a low priority and would starve beside other tests.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's spelling
# This machine is not preemptible: one process less for each training.
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"


@pytest.fixture(autouse=True)
def seed():
    """Make weights and random draws of a test independent of the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "bundled"
    prepare("bundled", folder)
    return folder


@pytest.fixture(scope="session")
def golden_corpus(tmp_path_factory):
    """The folder of the corpus that golden behaviour is recorded on."""
    folder = tmp_path_factory.mktemp("golden")
    prepare_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def vocabulary(prepared):
    return Vocabulary.build(pl.read_parquet(prepared / "tokens.parquet"), always=EMOTIONS)


@pytest.fixture(scope="session")
def tiny_encoder(vocabulary, tmp_path_factory):
    """The folder of an untrained encoder with a tokenizer of whole words."""
    folder = tmp_path_factory.mktemp("encoder")
    write_tiny_encoder(folder, vocabulary.tokens)
    return folder


@pytest.fixture(scope="session")
def encode_samples(vocabulary, tiny_encoder):
    """A function that encodes samples with every column that any variant reads."""
    emotion_words = EmotionWords(bundled.lexicon()).find_emotion_words
    encoder = encoders.load_encoder(str(tiny_encoder))

    def encode_all(samples):
        columns = encode(
            samples,
            vocabulary,
            emotions=EMOTIONS,
            emotion_words=emotion_words,
            causes=True,
            labels=True,
        )
        return {
            **columns,
            **encode_for_pretrained(encoder, samples),
            **encode_as_subwords(encoder, samples),
        }

    return encode_all


@pytest.fixture(scope="session")
def columns(prepared, encode_samples):
    return encode_samples(read_dataset_samples(prepared, "train"))


@pytest.fixture(scope="session")
def test_samples(prepared):
    return read_dataset_samples(prepared, "test")


@pytest.fixture(scope="session")
def test_columns(test_samples, encode_samples):
    return encode_samples(test_samples)


@pytest.fixture(scope="session")
def batch(columns):
    """Twelve samples of more different lengths than a bucketed batch has.

    Each has a next turn, which critics need.
    """
    encoded_with_next_turn = np.flatnonzero(columns["next_turn"].lengths)
    rows = encoded_with_next_turn[np.linspace(0, len(encoded_with_next_turn) - 1, 12).astype(int)]
    tensors = {
        name: column.pad(rows) if isinstance(column, Ragged) else torch.from_numpy(column[rows])
        for name, column in columns.items()
    }
    return Batch(tensors=tensors, samples=12, tokens=float((tensors["response"] != 0).sum()))


@pytest.fixture(scope="session")
def build(vocabulary, tiny_encoder):
    """A function that builds an untrained model of a variant."""

    def build_variant(name, preset="tiny", **overrides):
        if setting := find_variant(name)[0].requirements.encoder:
            overrides = {setting: str(tiny_encoder), **overrides}
        config = settings.configure(name, preset, overrides)[0]
        return build_model(name, config, vocabulary, EMOTIONS, lexicon=bundled.lexicon())

    return build_variant


@pytest.fixture
def home_with(tmp_path, monkeypatch, prepared):
    """A function that writes a home of finished runs from their models by run name."""

    def write_home(models):
        home = tmp_path / "home"
        monkeypatch.setenv("ATTUNE_HOME", str(home))
        data = {
            "name": "x",
            "folder": str(prepared),
            "hash": read_dataset_manifest(prepared)["hash"],
        }
        for name, model in models.items():
            run = write_run(home, name, model.name, data=data)
            save_model(model, run.model)
        return home

    return write_home


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """A function that runs the command line in this process, errors and exit codes included."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def run_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["attune", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        output = capsys.readouterr()
        return subprocess.CompletedProcess(
            list(sys.argv), exit_info.value.code or 0, stdout=output.out, stderr=output.err
        )

    yield run_command
    signal.signal(signal.SIGTERM, handler)
