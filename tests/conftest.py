"""The bundled corpus, prepared once, models small enough for seconds, and the command line."""

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
from attune.platform.batching.encoding import Ragged, encode, read_by, subwords_of
from attune.platform.core.settings import find_variant
from attune.platform.data import bundled
from attune.platform.data.dataset_folder import read_manifest, read_samples
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

# One thread: the same sums whatever the machine, and no fight for cores with Ray's processes, which
# makes OpenMP ten times slower.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start
# Ray's workers give way to everything else, and so to the tests beside them, which wait for nobody.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - it is spelled so
# Nobody takes this machine away: one process less for each training.
os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"


@pytest.fixture(autouse=True)
def seeded():
    """Weights and draws are those of the test alone, not of whatever ran before it."""
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
    """The folder of an encoder that has learned nothing and reads whole words."""
    folder = tmp_path_factory.mktemp("encoder")
    write_tiny_encoder(folder, vocabulary.tokens)
    return folder


@pytest.fixture(scope="session")
def encoded(vocabulary, tiny_encoder):
    """Samples as numbers, with everything that any variant reads."""
    find = EmotionWords(bundled.lexicon()).find
    encoder = encoders.load(str(tiny_encoder))

    def numbers(samples):
        own = encode(
            samples, vocabulary, emotions=EMOTIONS, emotion_words=find, causes=True, labels=True
        )
        return {**own, **read_by(encoder, samples), **subwords_of(encoder, samples)}

    return numbers


@pytest.fixture(scope="session")
def columns(prepared, encoded):
    return encoded(read_samples(prepared, "train"))


@pytest.fixture(scope="session")
def test_samples(prepared):
    return read_samples(prepared, "test")


@pytest.fixture(scope="session")
def test_columns(test_samples, encoded):
    return encoded(test_samples)


@pytest.fixture(scope="session")
def batch(columns):
    """Twelve samples, of different lengths as no bucketed batch has them; the speaker answers each,
    which critics need."""
    answered = np.flatnonzero(columns["next_turn"].lengths)
    rows = answered[np.linspace(0, len(answered) - 1, 12).astype(int)]
    few = {
        name: column.padded(rows) if isinstance(column, Ragged) else torch.from_numpy(column[rows])
        for name, column in columns.items()
    }
    return Batch(tensors=few, samples=12, tokens=float((few["response"] != 0).sum()))


@pytest.fixture(scope="session")
def build(vocabulary, tiny_encoder):
    def make(name, preset="tiny", **overrides):
        if setting := find_variant(name)[0].requirements.encoder:
            overrides = {setting: str(tiny_encoder), **overrides}
        config = settings.configure(name, preset, overrides)[0]
        return build_model(name, config, vocabulary, EMOTIONS, lexicon=bundled.lexicon())

    return make


@pytest.fixture
def home_with(tmp_path, monkeypatch, prepared):
    """Makes a home of finished runs, by name the model of each."""

    def make(models):
        home = tmp_path / "home"
        monkeypatch.setenv("ATTUNE_HOME", str(home))
        given = {"name": "x", "folder": str(prepared), "hash": read_manifest(prepared)["hash"]}
        for name, model in models.items():
            run = write_run(home, name, model.name, data=given)
            save_model(model, run.model)
        return home

    return make


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """The whole command line, errors and exit codes too, without a process of its own."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["attune", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(
            list(sys.argv), end.value.code or 0, stdout=shown.out, stderr=shown.err
        )

    yield called
    signal.signal(signal.SIGTERM, handler)
