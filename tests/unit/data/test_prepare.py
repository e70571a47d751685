"""Preparation: right samples, the same bytes every time, whole or not at all."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from attune.platform.core.errors import DataError, UsageError
from attune.platform.data import files, prepare
from attune.platform.data.dataset_folder import STREAMS, read_dataset_manifest, read_dataset_samples
from attune.platform.data.inspection import inspect
from attune.platform.data.samples import SAMPLES

# Recorded: the bundled corpus and all that makes samples of it. A commit that changes it says why.
BUNDLED = "192995ec05aabf491b971e8bf5f4254b3d837f1edebe99952ae2520e970c786e"


def conversation(number, turns=4, **more):
    roles = ("speaker", "listener")
    utterances = [
        {"role": roles[turn % 2], "text": f"Text {turn} of {number}.", "cause": turn == 0}
        for turn in range(turns)
    ]
    return {"id": f"c{number}", "emotion": "sad", "utterances": utterances, **more}


def write(path, conversations):
    path.write_text("".join(json.dumps(c) + "\n" for c in conversations))
    return str(path)


def contents(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def test_one_sample_per_listener_turn(tmp_path):
    source = write(
        tmp_path / "own.jsonl", [conversation(1, 5, split="train", situation="It rains.")]
    )
    manifest = prepare.prepare(source, tmp_path / "out")
    assert manifest["splits"]["train"] == {"conversations": 1, "samples": 2}
    first, second = read_dataset_samples(tmp_path / "out", "train").to_dicts()
    assert first["context"] == ["Text 0 of 1."]
    assert (first["response"], first["next_turn"]) == ("Text 1 of 1.", "Text 2 of 1.")
    assert first["situation_tokens"] == "it rains ."
    assert second["context"] == ["Text 0 of 1.", "Text 1 of 1.", "Text 2 of 1."]
    assert second["context_tokens"][1] == "text 1 of 1 ."
    assert second["context_roles"] == ["speaker", "listener", "speaker"]
    assert second["context_causes"] == [True, False, False]
    assert second["response_tokens"] == "text 3 of 1 ."
    assert second["next_turn_tokens"] == "text 4 of 1 ."


def test_no_next_turn_where_nobody_answers(tmp_path):
    utterances = [{"role": r, "text": r} for r in ("speaker", "listener", "listener")]
    lines = [{"id": "x", "utterances": utterances, "split": "train"}]
    prepare.prepare(write(tmp_path / "own.jsonl", lines), tmp_path / "out")
    samples = read_dataset_samples(tmp_path / "out", "train")
    assert samples["context"].list.len().to_list() == [1, 2]
    assert samples["next_turn"].to_list() == [None, None]


def test_a_first_turn_of_a_listener_gives_no_sample(tmp_path):
    utterances = [{"role": r, "text": r} for r in ("listener", "speaker", "listener")]
    lines = [{"id": "x", "utterances": utterances, "split": "train"}]
    manifest = prepare.prepare(write(tmp_path / "own.jsonl", lines), tmp_path / "out")
    assert manifest["splits"]["train"]["samples"] == 1


def test_schema_is_the_same_in_every_stream(tmp_path):
    prepare.prepare("bundled", tmp_path / "out")
    for stream in STREAMS:
        assert read_dataset_samples(tmp_path / "out", stream).schema == SAMPLES
    source = write(tmp_path / "own.jsonl", [conversation(1, split="train")])
    prepare.prepare(source, tmp_path / "own")
    assert read_dataset_samples(tmp_path / "own", "test").schema == SAMPLES


def test_splits_without_names_come_from_the_id(tmp_path):
    source = write(tmp_path / "own.jsonl", [conversation(n) for n in range(1000)])
    counts = prepare.prepare(source, tmp_path / "out")["splits"]
    assert 750 < counts["train"]["conversations"] < 850
    assert counts["valid"]["conversations"] + counts["test"]["conversations"] > 150
    # Other conversations beside it do not move one to another side.
    few = write(tmp_path / "few.jsonl", [conversation(n) for n in range(500, 600)])
    prepare.prepare(few, tmp_path / "few")
    for split in ("train", "valid", "test"):
        some = read_dataset_samples(tmp_path / "few", split)["conversation_id"]
        assert set(some) <= set(read_dataset_samples(tmp_path / "out", split)["conversation_id"])


def test_bundled_corpus_is_the_recorded_one(tmp_path):
    assert prepare.prepare("bundled", tmp_path / "out")["hash"] == BUNDLED


DIGEST = """
import hashlib, sys
from pathlib import Path
import polars as pl
from attune.platform.batching.encoding import encode
from attune.platform.batching.streams import Stream
from attune.platform.data.labels import EMOTIONS
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.data.prepare import prepare
from attune.platform.text.vocabulary import Vocabulary
folder = Path(sys.argv[1])
prepare("bundled", folder)
vocabulary = Vocabulary.build(pl.read_parquet(folder / "tokens.parquet"), always=EMOTIONS)
vocabulary.save(folder / "vocabulary.txt")
samples = read_dataset_samples(folder, "train")
stream = Stream(encode(samples, vocabulary, emotions=EMOTIONS), size=16)
digest = hashlib.sha256()
for batch in stream.epoch(1):
    for name, tensor in sorted(batch.tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
(folder / "batches.txt").write_text(digest.hexdigest())
"""


def test_digest_does_not_depend_on_threads_or_hash_seed(tmp_path):
    """Data, vocabulary, batch order: polars keeps no row order by itself, nor do sets."""
    for name, threads in (("one", "1"), ("four", "4")):
        environment = {**os.environ, "POLARS_MAX_THREADS": threads, "PYTHONHASHSEED": threads}
        command = [sys.executable, "-c", DIGEST, str(tmp_path / name)]
        subprocess.run(command, env=environment, check=True)
    assert contents(tmp_path / "one") == contents(tmp_path / "four")
    assert {"train.parquet", "batches.txt", "manifest.json"} <= set(contents(tmp_path / "one"))


def test_chunk_size_does_not_change_the_samples(tmp_path, monkeypatch):
    source = write(tmp_path / "own.jsonl", [conversation(n, 2 + n % 5) for n in range(60)])
    whole = prepare.prepare(source, tmp_path / "whole")
    seen = []
    real = prepare.build_samples
    monkeypatch.setattr(prepare, "build_samples", lambda u: seen.append(u.height) or real(u))
    monkeypatch.setattr(files, "ROWS_AT_A_TIME", 3)
    pieces = prepare.prepare(source, tmp_path / "pieces")
    assert pieces["hash"] == whole["hash"]
    assert pieces["splits"] == whole["splits"]
    tokens = [pl.read_parquet(tmp_path / name / "tokens.parquet") for name in ("whole", "pieces")]
    assert tokens[0].equals(tokens[1])
    # Memory: never more in hand than a piece and the conversation that it breaks off in.
    assert len(seen) > 10
    assert max(seen) < 20


def test_tokens_are_counted_once_and_train_apart(tmp_path):
    lines = [
        conversation(1, 5, split="train", situation="Sunny"),
        conversation(2, 2, split="test"),
    ]
    prepare.prepare(write(tmp_path / "own.jsonl", lines), tmp_path / "out")
    counts = pl.read_parquet(tmp_path / "out" / "tokens.parquet")
    by_token = {token: (train, everything) for token, train, everything in counts.iter_rows()}
    assert by_token["text"] == (4, 6)  # the fifth turn stands in no sample
    assert by_token["sunny"] == (0, 1)
    assert by_token["2"][0] == 1  # "text 2 of 1", not conversation 2
    assert counts["train"].is_sorted(descending=True)


def bad_source(tmp_path):
    lines = [conversation(1, split="train"), conversation(2, emotion="sadd"), conversation(3)]
    return write(tmp_path / "own.jsonl", lines)


def test_bad_rows_are_rejected_and_counted(tmp_path):
    manifest = prepare.prepare(bad_source(tmp_path), tmp_path / "out")
    # One row of the file, whatever it holds.
    assert manifest["rejected"] == {
        "rows": 1,
        "file": "rejects.jsonl",
        "reasons": {"unknown emotion": 1},
    }
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").open()]
    assert {(r["file"], r["row"], r["conversation_id"]) for r in rejects} == {
        ("own.jsonl", 2, "c2")
    }


def test_strict_stops_and_writes_nothing(tmp_path):
    source = bad_source(tmp_path)
    with pytest.raises(DataError, match=r"own.jsonl, row 2: unknown emotion 'sadd': did you mean"):
        prepare.prepare(source, tmp_path / "out", strict=True)
    assert [p.name for p in tmp_path.iterdir()] == ["own.jsonl"]


def test_nothing_usable_is_an_error_and_leaves_nothing(tmp_path):
    source = write(tmp_path / "own.jsonl", [conversation(1, emotion="sadd")])
    with pytest.raises(DataError, match=r"the source gives no sample.*own.jsonl, row 1"):
        prepare.prepare(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["own.jsonl"]


def test_a_crash_leaves_no_partial_folder(tmp_path, monkeypatch):
    def crash(*_):
        raise RuntimeError("the machine goes away")

    monkeypatch.setattr(prepare.TokenCounts, "frame", crash)
    with pytest.raises(RuntimeError):
        prepare.prepare("bundled", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_existing_data_is_never_lost(tmp_path):
    out = tmp_path / "out"
    one = write(tmp_path / "one.jsonl", [conversation(1, split="train")])
    two = write(tmp_path / "two.jsonl", [conversation(2, split="train")])
    prepare.prepare(one, out)
    (out / "annotated.parquet").write_text("somebody's work")
    prepare.prepare(one, out)  # the same again: left alone
    assert (out / "annotated.parquet").read_text() == "somebody's work"
    with pytest.raises(UsageError, match="--overwrite"):
        prepare.prepare(two, out)
    assert read_dataset_samples(out, "train")["conversation_id"].to_list() == ["c1", "c1"]
    with pytest.raises(UsageError, match=r"'annotated.parquet', which --overwrite would delete"):
        prepare.prepare(two, out, overwrite=True)
    (out / "annotated.parquet").unlink()
    prepare.prepare(two, out, overwrite=True)
    assert read_dataset_samples(out, "train")["conversation_id"].to_list() == ["c2", "c2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.jsonl", "out", "two.jsonl"]
    other = tmp_path / "notes"
    other.mkdir()
    (other / "thesis.txt").write_text("precious")
    for name in ("thesis.txt", "manifest.json"):
        (other / name).write_text("{}")
        with pytest.raises(UsageError, match="something else than prepared data"):
            prepare.prepare(one, other, overwrite=True)
    with pytest.raises(UsageError, match="is a file"):
        prepare.prepare(one, tmp_path / "one.jsonl")


def test_a_damaged_folder_is_repaired(tmp_path):
    out = tmp_path / "out"
    source = write(tmp_path / "one.jsonl", [conversation(1, split="train")])
    prepare.prepare(source, out)
    whole = contents(out)
    (out / "train.parquet").write_bytes(b"garbage")
    (out / "tokens.parquet").unlink()
    with pytest.raises(DataError, match=r"train.parquet is missing or damaged"):
        read_dataset_samples(out, "train")
    prepare.prepare(source, out)
    assert contents(out) == whole
    (out / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_dataset_manifest(out)


def test_unwritable_output_folders_are_named(tmp_path, monkeypatch):
    source = write(tmp_path / "one.jsonl", [conversation(1, split="train")])
    with pytest.raises(UsageError, match="cannot be created"):
        prepare.prepare(source, tmp_path / "one.jsonl" / "x")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="is the working directory"):
        prepare.prepare(source, Path())
    # A link stays a link.
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    prepare.prepare(source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_dataset_samples(tmp_path / "real", "train").height == 2
    # A failure leaves no folders on the way behind.
    with pytest.raises(DataError):
        prepare.prepare(bad_source(tmp_path), tmp_path / "a" / "b" / "c", strict=True)
    assert not (tmp_path / "a").exists()


def test_inspect(tmp_path):
    lines = [conversation(n, split="train" if n < 8 else "test") for n in range(10)]
    prepare.prepare(write(tmp_path / "own.jsonl", lines), tmp_path / "out")
    report = inspect(tmp_path / "out", samples=2)
    assert report["emotions"] == {"sad": {"train": 16, "valid": 0, "test": 4}}
    assert report["lengths"]["turns of context"]["longest"] == 3
    assert report["lengths"]["tokens of response"]["50 %"] == 5
    # Of 4 test responses of 5 tokens each one token, the conversation's number, is new.
    assert report["vocabulary"]["unknown_share"] == {"valid": None, "test": pytest.approx(0.2)}
    assert len(report["samples"]) == 2
    assert report == inspect(tmp_path / "out", samples=2)
    with pytest.raises(UsageError, match="not a prepared folder"):
        inspect(tmp_path)
    with pytest.raises(UsageError, match="no stream 'unpaired_contexts'"):
        read_dataset_samples(tmp_path / "out", "unpaired_contexts")
