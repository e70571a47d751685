"""The 41 labels: what the classifier learns from, whole corpora labelled, emotional dialogs."""

import json

import numpy as np
import polars as pl
import pytest

from attune.models.base import Progress
from attune.platform.core.errors import UsageError
from attune.platform.core.settings import Threshold, find_variant
from attune.platform.data.conversations import SPLITS
from attune.platform.data.dataset_folder import (
    MANIFEST,
    read_dataset_manifest,
    read_dataset_samples,
    read_labelled_utterances,
)
from attune.platform.data.labels import EMOTIONS, LABELS
from attune.platform.data.prepare import prepare
from attune.platform.data.samples import extract_utterance_samples
from attune.platform.enrichment import labels
from attune.platform.enrichment.classifier import CALIBRATION_FILE
from attune.platform.enrichment.filters import (
    filter_dialogues,
    filtered_label_distribution,
    keep_emotional,
    read_emotionality,
)
from attune.platform.enrichment.labels import (
    LABEL_SCHEMA,
    LABELS_FILE,
    label_probabilities,
    label_utterances,
)
from attune.platform.runs.model import build_model, load_model, model_label_names
from attune.platform.runs.record import find_run
from attune.platform.training import setup
from attune.platform.training.data import load_training_streams, read_training_samples
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.validation import compute_validation_metrics
from tests.commands import error_of, json_output
from tests.tasks import interrupted_after, run_in_process

WORDS = ("gone", "won", "here", "late", "ill", "home")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Dialogs without labels, the last turn of which is the speaker's."""
    folder = tmp_path_factory.mktemp("talk")
    lines = []
    for number in range(24):
        word = WORDS[number % 6]
        texts = [f"My dog is {word}.", f"Oh, {word}?", f"Yes, {number}.", "I am sorry.", "Thanks."]
        message = [
            {"role": ("speaker", "listener")[turn % 2], "text": text}
            for turn, text in enumerate(texts[: 2 + number % 4])
        ]
        split = ("train", "train", "valid", "test")[number % 4]
        lines.append(json.dumps({"id": f"c{number:02d}", "split": split, "utterances": message}))
    (folder / "talk.jsonl").write_text("\n".join(lines))
    prepare(str(folder / "talk.jsonl"), folder / "data")
    return folder / "data"


@pytest.fixture
def home(home_with, build):
    """A home with a classifier of utterances that is fitted, one of emotions, and a talker."""
    models = {name: build(name) for name in ("intent-classifier", "emotion-classifier", "dummy")}
    home = home_with(models)
    fitted = {"temperature": {"context": 0.2}}
    (find_run("intent-classifier").model / CALIBRATION_FILE).write_text(json.dumps(fitted))
    return home


@pytest.fixture
def build(vocabulary, tiny_encoder):
    """As everywhere, but with the labels that a variant is trained with."""
    from attune.platform.core.settings import find_variant
    from attune.platform.training import settings

    def make(name):
        requirements = find_variant(name)[0].requirements
        overrides = {requirements.encoder: str(tiny_encoder)} if requirements.encoder else {}
        config = settings.configure(name, "tiny", overrides)[0]
        return build_model(name, config, vocabulary, model_label_names(requirements))

    return make


@pytest.fixture
def here(monkeypatch):
    """The files of the tasks, which run in this process on small shards."""
    monkeypatch.setattr(labels, "LABEL_SHARD_ROWS", 5)
    return run_in_process(monkeypatch)


def paired(folder):
    return pl.concat([read_dataset_samples(folder, split) for split in SPLITS])


def test_each_utterance_once(data):
    rows = extract_utterance_samples(read_dataset_samples(data, "train"))
    assert rows.select("conversation_id", "turn").is_duplicated().sum() == 0
    one = rows.filter(pl.col("conversation_id") == "c05")  # three turns
    assert one["text"].to_list() == ["My dog is home.", "Oh, home?", "Yes, 5."]
    assert one["role"].to_list() == ["speaker", "listener", "speaker"]
    assert one["turn"].to_list() == [0, 1, 2]


def test_labels_of_pairs_give_labelled_utterances(prepared):
    actual = read_labelled_utterances(prepared, "valid")
    samples = read_dataset_samples(prepared, "valid")
    assert actual.schema == samples.schema
    assert set(actual["emotion"]) <= set(LABELS)
    assert set(actual["emotion"]) - set(EMOTIONS)  # intents, too
    assert set(actual["context"].list.len()) == {1}
    assert actual["response"].null_count() == actual.height
    for context, label, response, own in (
        samples.head(20)
        .select("context", "context_labels", "response", "response_label")
        .iter_rows()
    ):
        rows = set(actual.select(pl.col("context").list.first(), "emotion").iter_rows())
        assert {*zip(context, label, strict=True), (response, own)} <= rows


def test_data_without_labels_are_refused(data):
    with pytest.raises(UsageError, match="no utterance of train has a label"):
        read_labelled_utterances(data, "train")


def test_empathetic_intents_train_a_classifier(tmp_path, monkeypatch, tiny_encoder):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    (tmp_path / "train.txt").write_text("17 <SEP> i am thankful\n38 <SEP> why?\n40 <SEP> ok.\n")
    (tmp_path / "valid.txt").write_text("17 <SEP> so thankful\n40 <SEP> ok.\n")
    prepare(str(tmp_path), tmp_path / "data")
    run = setup.new_run(
        "intent-classifier", data=str(tmp_path / "data"), preset="tiny",
        overrides={"encoder": str(tiny_encoder)},
    )  # fmt: skip
    model = setup.set_up_run_model(run)
    assert model.variant.data_info.emotions == LABELS
    assert model.variant.output.out_features == 41
    streams, valid = load_training_streams(run, model)
    assert streams["paired"]["emotion"].tolist() == [17, 38, 40]
    [stage] = model.variant.stages()
    actual = compute_validation_metrics(model.variant, stage, valid, ProcessGroup())
    assert {"valid_loss", "valid_context", "valid_emotion_accuracy"} <= set(actual)
    (tmp_path / "home").rename(tmp_path / "gone")


def test_it_is_trained_on_contexts_only(build, batch):
    variant = build("intent-classifier").variant
    assert set(variant.losses({"paired": batch}, Progress())) == {"context"}
    assert variant.stages()[0].updates[0].weights == {"context": 1.0}


@pytest.fixture
def output(home, here, data, tmp_path):  # noqa: ARG001
    out = tmp_path / "out"
    return out, label_utterances(find_run("intent-classifier"), data, out)


def test_every_utterance_gets_its_distribution(output, data):
    out, manifest = output
    rows = pl.read_parquet(out / LABELS_FILE)
    assert rows.schema == LABEL_SCHEMA
    texts = pl.concat(
        [extract_utterance_samples(read_dataset_samples(data, split)) for split in SPLITS]
    )
    assert rows.select("conversation_id", "turn").equals(texts.select("conversation_id", "turn"))
    probabilities = np.stack(rows["probabilities"].to_list())
    assert probabilities.shape == (texts.height, 41)
    assert probabilities.sum(axis=1) == pytest.approx(np.ones(texts.height), abs=1e-5)
    model = load_model(find_run("intent-classifier").model)
    alone = label_probabilities(model, texts[7], 0.2)
    assert probabilities[7] == pytest.approx(alone[0], abs=1e-5)
    assert manifest["emotions"]["labels"] == list(LABELS)
    assert (
        manifest["hash"]
        == read_dataset_manifest(out)["hash"]
        != read_dataset_manifest(data)["hash"]
    )
    assert sorted(p.name for p in out.iterdir()) == sorted([*manifest["contents"], MANIFEST])


def test_samples_carry_the_likeliest_labels(output, data):
    out, _ = output
    rows = pl.read_parquet(out / LABELS_FILE)
    best = {
        (name, turn): LABELS[int(np.argmax(actual))]
        for name, turn, _, actual in rows.iter_rows()
    }  # fmt: skip
    samples = paired(out)
    assert len(set(best.values())) > 1
    for row in samples.iter_rows(named=True):
        name, turns = row["conversation_id"], range(len(row["context"]))
        assert row["context_labels"] == [best[name, turn] for turn in turns]
        assert row["response_label"] == best[name, len(turns)]
    others = ("context_labels", "response_label")
    assert samples.drop(others).equals(paired(data).drop(others))
    turns = (
        read_dataset_samples(out, "train")
        .group_by("conversation_id")
        .agg(pl.col("turn").max() + 1)["turn"]
        .sum()
    )
    assert read_labelled_utterances(out, "train").height == turns


def test_an_interrupted_annotation_is_resumed(home, here, data, tmp_path, monkeypatch):  # noqa: ARG001
    run, out = find_run("intent-classifier"), tmp_path / "out"
    whole = label_utterances(run, data, tmp_path / "whole")
    shards = len(here)
    assert shards > 3

    with interrupted_after(2):
        label_utterances(run, data, out)
    assert not out.exists()
    del here[:]
    counts = []
    output = label_utterances(run, data, out, progress=counts.append)
    assert len(here) == shards - 2
    assert sum(counts) == paired(data).height
    assert output["contents"] == whole["contents"]


def test_label_rejects_wrong_input(output, data, prepared, tmp_path):
    out, manifest = output
    run = find_run("intent-classifier")
    assert label_utterances(run, data, out) == manifest  # it is there already
    with pytest.raises(UsageError, match="'emotion-classifier' does not label utterances"):
        label_utterances(find_run("emotion-classifier"), data, tmp_path / "x")
    with pytest.raises(UsageError, match="already, from its source"):
        label_utterances(run, prepared, tmp_path / "x")
    with pytest.raises(UsageError, match=r"from 'intent-classifier': add --replace"):
        label_utterances(run, out, tmp_path / "x")
    with pytest.raises(UsageError, match="is the data itself"):
        label_utterances(run, data, data)


def test_emotionality_is_the_share_of_the_32(output):
    out, _ = output
    rows = pl.read_parquet(out / LABELS_FILE)
    actual = read_emotionality(out)
    assert actual["emotionality"].is_sorted(descending=True)
    assert actual["utterances"].sum() == rows.height
    for name, _, emotional, count, label in actual.iter_rows():
        own = rows.filter(pl.col("conversation_id") == name)
        shares = [sum(row[:32]) for row in own["probabilities"]]
        assert emotional == pytest.approx(np.mean(shares), abs=1e-6)
        assert count == len(shares)
        assert label == LABELS[int(np.argmax(own["probabilities"][-1].to_numpy()))]
    shares = filtered_label_distribution(actual, list(LABELS))
    assert list(shares) == list(LABELS)
    assert sum(shares.values()) == pytest.approx(1)


def test_the_most_emotional_dialogues_are_selected(output, data, tmp_path):
    out, _ = output
    every = read_emotionality(out)
    manifest, chosen = filter_dialogues(out, tmp_path / "top", top=7)
    assert chosen.equals(every.head(7))
    kept = paired(tmp_path / "top")
    assert set(kept["conversation_id"]) == set(chosen["conversation_id"])
    wanted = pl.col("conversation_id").is_in(chosen["conversation_id"].implode())
    assert kept.equals(paired(out).filter(wanted))
    rows = pl.read_parquet(tmp_path / "top" / LABELS_FILE)
    assert rows.equals(pl.read_parquet(out / LABELS_FILE).filter(wanted))
    statistics = manifest["statistics"]
    assert (statistics["dialogs"], statistics["turns"]) == (7, rows.height)
    least = float(every["emotionality"][6])
    same, _ = filter_dialogues(out, tmp_path / "from", threshold=least)
    assert same["hash"] == manifest["hash"]
    filter_dialogues(out, tmp_path / "rest", top=7, rest=True)
    assert paired(tmp_path / "rest").equals(paired(out).filter(~wanted))
    with pytest.raises(UsageError, match="--rest: no dialogue is left"):
        filter_dialogues(out, tmp_path / "x", top=1000, rest=True)
    whole, _ = filter_dialogues(out, tmp_path / "all", top=1000)
    assert pl.read_parquet(tmp_path / "all" / "tokens.parquet").equals(
        pl.read_parquet(data / "tokens.parquet")
    )
    assert whole["splits"] == read_dataset_manifest(data)["splits"]
    assert whole["hash"] == read_dataset_manifest(out)["hash"]


def test_a_run_trains_on_emotional_dialogues_only(output, data):
    out, _ = output
    samples = read_dataset_samples(out, "train")
    every = read_emotionality(out).filter(split="train")
    least = float(every["emotionality"].median())
    kept = keep_emotional(samples, out, Threshold("emotionality_threshold", least))
    enough = every.filter(pl.col("emotionality") >= least)["conversation_id"]
    assert 0 < kept["conversation_id"].n_unique() < samples["conversation_id"].n_unique()
    assert set(kept["conversation_id"]) == set(enough)
    variant = find_variant("meed2")[0]
    config = variant.Config(emotionality_threshold=least)
    assert read_training_samples(variant, config, out, "train").equals(kept)
    assert read_training_samples(variant, config, out, "valid").equals(
        read_dataset_samples(out, "valid")
    )
    with pytest.raises(UsageError, match=r"emotionality_threshold=0.999: no dialogue of train"):
        keep_emotional(samples, out, Threshold("emotionality_threshold", 0.999))
    with pytest.raises(UsageError, match="attune annotate emotions"):
        setup.new_run(
            "meed2", data=str(data), preset="tiny", overrides={"emotionality_threshold": "0.5"}
        )


def test_select_rejects_wrong_input(output, data, tmp_path):
    out, _ = output
    for options in ({}, {"top": 3, "threshold": 0.5}):
        with pytest.raises(UsageError, match="either --top N or --threshold T, not both"):
            filter_dialogues(out, tmp_path / "x", **options)
    with pytest.raises(UsageError, match=r"--threshold 1\.5: no dialogue is that emotional"):
        filter_dialogues(out, tmp_path / "x", threshold=1.5)
    with pytest.raises(UsageError, match="has no labels of utterances"):
        filter_dialogues(data, tmp_path / "x", top=3)


@pytest.mark.usefixtures("home", "here")
def test_the_commands(call, data, prepared, tmp_path):
    command = ("annotate", "emotions", "intent-classifier", "--data", data, "--out", "out")
    done = json_output(call(*command, "--json"))
    assert done["utterances"] == pl.read_parquet(tmp_path / "out" / LABELS_FILE).height
    assert 0 < done["emotionality"] < 1
    chosen = json_output(call("data", "select", "out", "--top", "5", "--out", "best", "--json"))
    assert chosen["statistics"]["dialogs"] == 5
    assert chosen["emotionality"]["least"] >= done["emotionality"] - 0.5
    assert "either --top N" in error_of(call("data", "select", "out", "--out", "none"))
    drawn = json_output(call("show", "labels", "best", "--out", "two.png", "--json"))
    assert drawn["dialogs"] == 5
    assert (tmp_path / "two.png").stat().st_size > 1000
    evaluated = json_output(
        call("evaluate", "intent-classifier", "--data", prepared, "--split", "test", "--json")
    )
    assert 0 <= evaluated["metrics"]["emotion_accuracy"] <= 1
    assert not [name for name in evaluated["metrics"] if name.startswith("response_")]
    assert "classifies utterances only" in error_of(
        call("data", "harvest", "intent-classifier", "--source", prepared, "--out", "h")
    )
