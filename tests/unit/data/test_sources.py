"""Sources: which reader reads which files, by what readers declare."""

from types import SimpleNamespace

import pytest

from attune.platform.core.errors import UsageError
from attune.platform.data.conversations import LISTENER, SPEAKER, conversations
from attune.platform.data.prepare import prepare
from attune.platform.data.sources import READERS, Source


def read_lines(path, tolerated):  # noqa: ARG001
    """A conversation of a stream of its own, from a line each for speaker and listener."""
    texts = path.read_text().splitlines()
    yield conversations(
        [
            {
                "conversation_id": "a", "split": "labelled_train", "turn": turn, "text": text,
                "role": (SPEAKER, LISTENER)[turn], "file": path.name, "row": turn + 1,
            }
            for turn, text in enumerate(texts)
        ]
    )  # fmt: skip


@pytest.fixture
def reader(monkeypatch):
    reader = SimpleNamespace(
        NAME="lines", EMOTION_LABELS=(), SUFFIXES=(".lines",), STREAMS=("labelled_train",),
        recognises=lambda path, head: path.name.startswith("chat") and bool(head), read=read_lines,
    )  # fmt: skip
    monkeypatch.setitem(READERS, reader.NAME, reader)
    return reader


def test_a_reader_declares_its_suffixes_and_streams(reader, tmp_path):
    (tmp_path / "chat.lines").write_text("Hello.\nHi.\n")
    (tmp_path / "notes.md").write_text("no data")
    assert Source(str(tmp_path)).format == "lines"
    assert Source(str(tmp_path), "lines").paths == [tmp_path / "chat.lines"]
    (tmp_path / "other.lines").write_text("Hello.\n")
    with pytest.raises(UsageError, match=r"'other.lines' is not lines like the other files"):
        Source(str(tmp_path))
    manifest = prepare(str(tmp_path / "chat.lines"), tmp_path / "out")
    assert manifest["splits"]["labelled_train"]["samples"] == 1
    reader.STREAMS = ("train",)
    with pytest.raises(Exception, match="unknown split 'labelled_train'"):
        prepare(str(tmp_path / "chat.lines"), tmp_path / "again")


def test_every_reader_declares_its_files():
    for name, reader in READERS.items():
        assert name == reader.NAME
        assert all(suffix.startswith(".") for suffix in reader.SUFFIXES)
        assert reader.STREAMS
