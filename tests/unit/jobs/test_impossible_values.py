"""Impossible values are rejected before a run, a sweep or a job exists."""

import pytest

from tests.commands import error_of

TRAIN = ("train", "mime", "--preset", "tiny")
TUNE = ("tune", "mime", "--preset", "tiny", "--space", "loss-weights")
SWEEP = ("tune", "--sweep", "mine.yaml", "--preset", "tiny")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((*TRAIN, "--set", "dropout=1.5"), "dropout: expected a number from 0 to below 1, got 1.5"),
        ((*TRAIN, "--set", "learning_rate=0"), "learning_rate: expected a number above 0"),
        ((*TRAIN, "--seeds", "1,2", "--set", "width=-5"), "width: expected a number from 1"),
        ((*TUNE, "--set", f"batch_size={10**20}"), "batch_size: expected a number from 1"),
        ((*TUNE, "--metric", "foo"), "--metric: unknown metric of mime 'foo': choose from"),
        ((*TUNE, "--metric", "perplexty"), "did you mean 'perplexity'"),
        (("submit", "--", "train", "mime", "--preset", "huge"), "unknown preset 'huge'"),
        (("submit", "--", *TRAIN, "--set", "dropout=1.5"), "dropout: expected"),
        (("submit", "--", *TUNE, "--metric", "foo"), "unknown metric of mime 'foo'"),
        (("submit", "--", *TUNE, "--set", "elbo=2"), "did you mean 'elbo_weight'"),
    ],
)
def test_options(call, folder, command, message):
    assert message in error_of(call(*command))
    assert not folder.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("space: {dropout: [0.1, 1.5]}", "mine.yaml: space.dropout: expected a number from 0"),
        ("space: {width: {low: -5, high: 8, scale: int}}", "mine.yaml: space.width: expected"),
        ("space: {gate: [each, wide]}", "mine.yaml: space.gate: unknown value of gate 'wide'"),
        (
            "space: {dropout: [0.1, 0.2]}\nset: {learning_rate: 0}",
            "mine.yaml: set.learning_rate: expected a number above 0",
        ),
        ("space: {dropout: [0.1, 0.2]}\nmetric: foo", "unknown metric of mime 'foo'"),
    ],
)
def test_sweep_files(call, folder, tmp_path, content, message):
    (tmp_path / "mine.yaml").write_text(f"variants: [mime]\n{content}\n")
    error = error_of(call(*SWEEP))
    assert message in error
    assert error.count("dropout:") < 2
    assert not folder.exists()


def test_a_binary_file_is_no_sweep(call, folder, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(bytes(range(256)))
    assert "--sweep mine.yaml: not readable as text" in error_of(call(*SWEEP))
    assert not folder.exists()
