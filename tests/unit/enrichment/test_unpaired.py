"""Harvesting: unpaired texts with emotions, and the streams that are trained on."""

import itertools
import json
import shutil
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch

from attune import models
from attune.models.base import CONTEXTS, PAIRED, RESPONSES, DataFilters, DataRequirements
from attune.models.dummy import Dummy, DummyConfig
from attune.platform.batching.streams import Stream
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.settings import Threshold
from attune.platform.data.conversations import UNPAIRED
from attune.platform.data.dataset_folder import (
    MANIFEST,
    read_dataset_manifest,
    read_dataset_samples,
)
from attune.platform.data.prepare import prepare
from attune.platform.enrichment import calibration, unpaired
from attune.platform.enrichment.classifier import CALIBRATION_FILE, TEXT_KINDS, classify_texts
from attune.platform.enrichment.unpaired import (
    HARVESTED,
    UNPAIRED_FILES,
    count_unpaired,
    harvest_unpaired_texts,
    read_unpaired,
)
from attune.platform.runs.model import Model, load_model
from attune.platform.runs.record import find_run
from attune.platform.training import setup
from attune.platform.training.data import load_training_streams
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.validation import compute_validation_metrics
from tests.commands import error_of, json_output
from tests.tasks import interrupted_after, run_in_process


@dataclass(frozen=True, kw_only=True)
class UnpairedConfig(DummyConfig):
    harvest: str = ""
    harvest_threshold: float = 0.6
    alone: bool = False


class Unpaired(Dummy):
    """A stand-in for systems that learn from unpaired text."""

    Config = UnpairedConfig
    requirements = DataRequirements(
        streams=(PAIRED, CONTEXTS, RESPONSES),
        filters=DataFilters(harvest="harvest", harvest_threshold="harvest_threshold"),
    )
    presets: ClassVar = {"tiny": {}, "small": {}, "paper": {}}

    @classmethod
    def requirements_for(cls, config):
        return DataRequirements() if config.alone else cls.requirements

    def stages(self):
        [stage] = super().stages()
        streams = self.requirements_for(self.config).streams
        return [type(stage)(**{**vars(stage), "streams": streams})]


@pytest.fixture(autouse=True)
def listed(monkeypatch):
    monkeypatch.setitem(models.VARIANTS, "unpaired", f"{__name__}:Unpaired")


@pytest.fixture
def home(home_with, build):
    """A home with a classifier and a run that answers."""
    home = home_with({"teller": build("emotion-classifier"), "talker": build("dummy")})
    fitted = {"temperature": {"context": 0.2, "response": 0.25}}  # it would know nothing otherwise
    (find_run("teller").model / CALIBRATION_FILE).write_text(json.dumps(fitted))
    return home


@pytest.fixture
def here(monkeypatch):
    """The files of the tasks, which run in this process on small shards."""
    monkeypatch.setattr(unpaired, "TEXT_SHARD_ROWS", 4)
    return run_in_process(monkeypatch)


TEXTS = ("My dog is gone.", "Oh no.", "I miss him so much.", "I am sorry for you.", "Thanks.")


def dialogues(path, count=10):
    """Conversations without emotions, as in a dump of a social network; one line is bad."""
    lines = []
    for number in range(count):
        utterances = [
            {"role": ("speaker", "listener")[turn % 2], "text": f"{text} Number {number}!"}
            for turn, text in enumerate(TEXTS)
        ]
        lines.append(json.dumps({"id": f"c{number}", "utterances": utterances}))
    lines.insert(3, '{"id": "bad"}')
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def harvested(home, here, tmp_path):  # noqa: ARG001
    source = dialogues(tmp_path / "reddit.jsonl")
    out = tmp_path / "harvest"
    return out, harvest_unpaired_texts(find_run("teller"), [source], out)


def test_texts_have_the_classifiers_emotions(harvested, tmp_path):
    out, manifest = harvested
    prepare(str(tmp_path / "reddit.jsonl"), tmp_path / "prepared")
    pairs = pl.concat(
        [read_dataset_samples(tmp_path / "prepared", s) for s in ("train", "valid", "test")]
    )
    model = load_model(find_run("teller").model)
    temperature = {"context": 0.2, "response": 0.25}
    for kind, stream in zip(TEXT_KINDS, UNPAIRED, strict=True):
        actual = read_dataset_samples(out, stream)
        assert actual.schema == HARVESTED
        assert actual[kind].to_list() == pairs[kind].to_list()
        raw = classify_texts(model, pairs, kind)
        sure = np.exp(calibration.apply_calibration_temperature(raw, temperature[kind])).max(axis=1)
        assert actual["probability"].to_numpy() == pytest.approx(sure, abs=1e-5)
        emotions = [model.variant.data_info.emotions[n] for n in raw.argmax(axis=1)]
        assert actual["emotion"].to_list() == emotions
    contexts, responses = (read_dataset_samples(out, stream) for stream in UNPAIRED)
    assert contexts["response"].null_count() == contexts["response_tokens"].null_count() == 20
    assert contexts["next_turn"].null_count() == 20
    assert responses["context"].list.len().sum() == 0
    assert responses["situation"].null_count() == 20
    assert manifest["rejected"] == {
        "rows": 1, "file": "rejects.jsonl", "reasons": {"missing key": 1}
    }  # fmt: skip
    [line] = (out / "rejects.jsonl").read_text().splitlines()
    assert (json.loads(line)["file"], json.loads(line)["row"]) == ("reddit.jsonl", 4)
    assert manifest["splits"]["unpaired_contexts"]["samples"] == 20
    assert sorted(p.name for p in out.iterdir()) == sorted([*manifest["contents"], MANIFEST])
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]  # nothing is left


@pytest.mark.usefixtures("home", "here")
def test_short_texts_are_left_out(tmp_path):
    source = dialogues(tmp_path / "own.jsonl", 2)
    out = tmp_path / "out"
    harvest_unpaired_texts(find_run("teller"), [source], out, min_length=9)
    lengths = {
        "unpaired_contexts": pl.col("context_tokens").list.join(" ").str.split(" ").list.len(),
        "unpaired_responses": pl.col("response_tokens").str.split(" ").list.len(),
    }
    counts = {}
    for stream, length in lengths.items():
        actual = read_dataset_samples(out, stream).select(length).to_series()
        assert actual.min() >= 9
        counts[stream] = len(actual)
    assert counts == {"unpaired_contexts": 2, "unpaired_responses": 2}
    with pytest.raises(DataError, match="no text of the sources has 1000 tokens"):
        harvest_unpaired_texts(find_run("teller"), [source], tmp_path / "no", min_length=1000)


def test_probabilities_must_exceed_the_threshold(harvested):
    out, _ = harvested
    texts = read_dataset_samples(out, "unpaired_contexts")
    one = float(texts["probability"].sort()[10])
    kept = read_unpaired(out, CONTEXTS, Threshold("harvest_threshold", one))
    expected = texts.filter(pl.col("probability") > one)
    assert kept.equals(expected.drop("probability"))
    assert 0 < kept.height < 10
    counts = count_unpaired(out, one)
    assert counts["contexts"]["texts"] == 20
    assert counts["contexts"]["kept"] == sum(counts["contexts"]["emotions"].values()) == kept.height
    by_emotion = dict(expected["emotion"].value_counts().iter_rows())
    assert counts["contexts"]["emotions"] == by_emotion
    with pytest.raises(UsageError, match=r"harvest_threshold=1.0: no emotion of the responses"):
        read_unpaired(out, RESPONSES, Threshold("harvest_threshold", 1.0))


@pytest.mark.usefixtures("home")
def test_the_command(call, here, tmp_path, monkeypatch):
    source = dialogues(tmp_path / "own.jsonl")
    command = ("data", "harvest", "teller", "--source", source, "--out", tmp_path / "out")
    replies = json_output(call(*command, "--threshold", "0", "--json"))
    assert replies["streams"]["contexts"]["kept"] == replies["streams"]["contexts"]["texts"] == 20
    assert replies["threshold"] == 0
    assert replies["harvest"]["run"] == "teller"
    assert replies["harvest"]["temperature"] == {"context": 0.2, "response": 0.25}
    assert replies["rejected"]["rows"] == 1
    done = len(here)
    assert done == 2 * sum(-(-n // 4) for n in split_sizes(source, tmp_path))
    # Another threshold looks at what is there.
    monkeypatch.setattr(unpaired, "classify_unpaired_shard", None)
    again = json_output(call(*command, "--threshold", "0.999", "--json"))
    assert again["hash"] == replies["hash"]
    assert again["streams"]["contexts"]["kept"] < 20
    assert len(here) == done


def split_sizes(source, folder):
    splits = prepare(source, folder / "sizes")["splits"]
    return [splits[split]["samples"] for split in ("train", "valid", "test")]


@pytest.mark.usefixtures("home")
def test_an_interrupted_harvest_is_resumed(here, tmp_path, monkeypatch):
    run, out = find_run("teller"), tmp_path / "out"
    source = dialogues(tmp_path / "own.jsonl")

    with interrupted_after(2):
        harvest_unpaired_texts(run, [source], out)
    assert not out.exists()
    monkeypatch.setattr(unpaired, "prepare", None)  # the source is not read again
    first, counts, totals = here[:], [], []
    harvest_unpaired_texts(run, [source], out, total=totals.append, progress=counts.append)
    assert len(first) == 2
    assert not set(first) & set(here[2:])
    assert sum(counts) == sum(totals) == 40
    monkeypatch.setattr(unpaired, "prepare", prepare)
    whole = harvest_unpaired_texts(run, [source], tmp_path / "whole")
    assert whole["hash"] == read_dataset_manifest(out)["hash"]
    assert whole["contents"] == read_dataset_manifest(out)["contents"]


@pytest.mark.usefixtures("home", "here")
def test_several_sources_and_prepared_ones(tmp_path):
    run = find_run("teller")
    one, other = dialogues(tmp_path / "a.jsonl", 3), dialogues(tmp_path / "b.jsonl", 2)
    prepare(other, tmp_path / "b")
    output = harvest_unpaired_texts(run, [one, str(tmp_path / "b")], tmp_path / "both")
    assert output["splits"]["unpaired_responses"]["samples"] == 10
    assert output["rejected"]["rows"] == 2
    alone = harvest_unpaired_texts(run, [other], tmp_path / "alone")
    texts = read_dataset_samples(tmp_path / "both", "unpaired_contexts")
    expected = read_dataset_samples(tmp_path / "alone", "unpaired_contexts")
    assert texts.tail(4).drop("probability").equals(expected.drop("probability"))
    assert alone["harvest"]["sources"][0]["format"] == "dialogues"


@pytest.mark.usefixtures("home", "here")
def test_harvest_rejects_wrong_input(call, tmp_path):
    source = dialogues(tmp_path / "own.jsonl", 2)

    def replies(*arguments, code=2):
        return error_of(call("data", "harvest", *arguments), code)

    out = ("--out", tmp_path / "out")
    assert "'dummy' does not classify texts" in replies("talker", "--source", source, *out)
    assert "no such source: 'nowhere'" in replies("teller", "--source", "nowhere", *out)
    assert "--threshold: expected a number" in replies(
        "teller", "--source", source, *out, "--threshold", "1.5"
    )
    assert "--min-length: expected at least 1, got 0" in replies(
        "teller", "--source", source, *out, "--min-length", "0"
    )
    (tmp_path / "empty.jsonl").write_text('{"id": "a", "utterances": []}\n')
    message = replies("teller", "--source", tmp_path / "empty.jsonl", *out, code=1)
    assert "empty.jsonl, row 1: not a list: 'utterances' must be a list" in message
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "note").write_text("mine")
    assert "exists and was made in another way" in replies("teller", "--source", source, *out)


@pytest.mark.usefixtures("home", "here")
def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    """No piece that is read or written is larger than a shard, however many there are."""
    seen = []
    real_read, real_columns = pl.read_parquet, Model.columns

    def read(path, *rest, **named):
        frame = real_read(path, *rest, **named)
        seen.append(frame.height)
        return frame

    def columns(self, samples):
        seen.append(samples.height)
        return real_columns(self, samples)

    source = dialogues(tmp_path / "own.jsonl", 30)
    prepare(source, tmp_path / "prepared")
    monkeypatch.setattr(unpaired.pl, "read_parquet", read)
    monkeypatch.setattr(Model, "columns", columns)
    harvest_unpaired_texts(find_run("teller"), [str(tmp_path / "prepared")], tmp_path / "out")
    count_unpaired(tmp_path / "out", 0.5)
    assert len(seen) >= 60
    assert max(seen) == 4
    groups = pq.ParquetFile(tmp_path / "out" / "unpaired_contexts.parquet")
    assert groups.metadata.num_row_groups >= 15


def begin(prepared, **overrides):
    return setup.new_run("unpaired", data=str(prepared), preset="tiny", overrides=overrides)


def test_a_harvest_gives_two_streams(harvested, prepared):
    out, manifest = harvested
    value = min(float(read_dataset_samples(out, s)["probability"].sort()[4]) for s in UNPAIRED)
    threshold = Threshold("harvest_threshold", value)
    run = begin(prepared, harvest=str(out), harvest_threshold=value)
    assert run.data["harvest"] == {"folder": str(out), "hash": manifest["hash"]}
    model = setup.set_up_run_model(run)
    streams, valid = load_training_streams(run, model)
    assert set(streams) == {PAIRED, CONTEXTS, RESPONSES}
    assert set(streams[CONTEXTS]) == {"index", "context", "context_roles", "emotion"}
    assert set(streams[RESPONSES]) == {"index", "response", "emotion"}
    assert set(valid) > {"context", "response"}
    expected = read_unpaired(out, CONTEXTS, threshold)
    assert len(streams[CONTEXTS]["index"]) == expected.height
    emotions = [model.variant.data_info.emotions[n] for n in streams[CONTEXTS]["emotion"]]
    assert emotions == expected["emotion"].to_list()
    responses = read_unpaired(out, RESPONSES, threshold)
    assert len(streams[RESPONSES]["index"]) == responses.height
    assert expected.height + responses.height < 40


def test_without_a_harvest_the_unpaired_text_of_the_data_is_used(home, prepared):  # noqa: ARG001
    run = begin(prepared)
    assert "harvest" not in run.data
    streams, _ = load_training_streams(run, setup.set_up_run_model(run))
    for name, stream in UNPAIRED_FILES.items():
        assert len(streams[name]["index"]) == read_dataset_samples(prepared, stream).height
    paired = begin(prepared, alone=True)
    assert set(load_training_streams(paired, setup.set_up_run_model(paired))[0]) == {PAIRED}


def test_unpaired_text_that_is_missing_or_changed(harvested, prepared, tmp_path):
    out, _ = harvested
    prepare(str(tmp_path / "reddit.jsonl"), tmp_path / "plain")
    with pytest.raises(UsageError, match=r"no 'unpaired_contexts': create it with 'attune data h"):
        begin(tmp_path / "plain")
    with pytest.raises(UsageError, match=r"=0\.5: only the texts of a harvest have probabilities"):
        begin(prepared, harvest_threshold=0.5)
    with pytest.raises(UsageError, match="no such harvest"):
        begin(prepared, harvest="nowhere")
    with pytest.raises(UsageError, match="expected a harvest, got prepared data"):
        begin(prepared, harvest=str(prepared))
    with pytest.raises(UsageError, match=r"contains no pairs \(harvest\)"):
        begin(out)
    with pytest.raises(UsageError, match="contains no pairs"):
        harvest_unpaired_texts(find_run("teller"), [str(out)], tmp_path / "again")
    with pytest.raises(UsageError, match=r"harvest_threshold=1\.0"):
        begin(prepared, harvest=str(out), harvest_threshold=1.0)
    run = begin(prepared, harvest=str(out), harvest_threshold=0.0)
    shutil.rmtree(out)
    dialogues(tmp_path / "reddit.jsonl", 5)
    harvest_unpaired_texts(find_run("teller"), [str(tmp_path / "reddit.jsonl")], out)
    with pytest.raises(UsageError, match="has changed since run"):
        load_training_streams(run, setup.set_up_run_model(run))


@pytest.mark.parametrize("name", [CONTEXTS, RESPONSES])
@pytest.mark.parametrize(("size", "by"), [(16, "samples"), (300, "tokens")])
def test_unpaired_batches(home, prepared, name, size, by):  # noqa: ARG001
    run = begin(prepared)
    columns = load_training_streams(run, setup.set_up_run_model(run))[0][name]
    spoken_by = "context" if name == CONTEXTS else "response"
    ranks = [list(Stream(columns, size=size, by=by, rank=r, world_size=2).epoch(1)) for r in (0, 1)]
    seen = []
    for parts in zip(*ranks, strict=True):
        tokens = sum(int((part[spoken_by] != 0).sum()) for part in parts)
        assert tokens == pytest.approx(2 * parts[0].tokens)
        assert by == "samples" or max(map(len, parts)) * parts[0][spoken_by].shape[1] <= 300
        seen.extend(int(i) for part in parts for i in part["index"])
    assert sorted(seen) == list(range(len(columns["index"])))
    stream = Stream(columns, size=size, by=by, seed=3)
    whole = list(itertools.islice(stream.batches(), 12))
    resumed = itertools.islice(stream.batches(stream.position(7)), 5)
    for loaded, expected in zip(resumed, whole[7:], strict=True):
        assert torch.equal(loaded.batch["index"], expected.batch["index"])


def test_validation_uses_paired_samples_only(home, prepared):  # noqa: ARG001
    run = begin(prepared)
    model = setup.set_up_run_model(run)
    _, valid = load_training_streams(run, model)
    [stage] = model.variant.stages()
    asked = []
    real = model.variant.losses
    model.variant.losses = lambda batches, progress: (
        asked.append(set(batches)) or real(batches, progress)
    )
    actual = compute_validation_metrics(model.variant, stage, valid, ProcessGroup())
    assert "valid_loss" in actual
    assert all(names == {PAIRED} for names in asked)
