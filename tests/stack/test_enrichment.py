"""Annotators and classifiers label whole corpora, through real Ray."""

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from attune.platform.data.conversations import UNPAIRED
from attune.platform.data.dataset_folder import (
    MANIFEST,
    read_dataset_manifest,
    read_dataset_samples,
)
from attune.platform.enrichment.causes import CAUSE_SHARD_ROWS, cause_probabilities
from attune.platform.enrichment.classifier import (
    TEXT_KINDS,
    classify_texts,
    fit_classifier_temperatures,
)
from attune.platform.enrichment.unpaired import TEXT_SHARD_ROWS
from attune.platform.runs.model import load_model
from attune.platform.training import setup
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.worker import train
from tests.golden.interface import assert_json_keys

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.usefixtures("cluster_home")]

BIN = Path(sys.executable).parent


def attune(*arguments):
    done = subprocess.run(
        [BIN / "attune", *map(str, arguments), "--json"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout.splitlines()[-1])
    assert_json_keys(arguments, output)
    return output


def trained(variant, name, encoder, steps):
    """A run that was trained in this process: to start Ray Train takes longer than all the rest."""
    run = setup.new_run(
        variant, name=name, preset="tiny", overrides={"encoder": str(encoder)}, max_steps=steps
    )
    assert train(run, ProcessGroup())
    result = json.loads((run.folder / "result.json").read_text())
    return run.update(status="finished", result=result)


def test_an_annotator_is_trained_and_marks_a_corpus(prepared, tiny_encoder, tmp_path):
    run = trained("cause-annotator", "marker", tiny_encoder, 10)
    assert {"valid_loss", "valid_cause", "valid_accuracy"} <= set(run.result["metrics"])

    model = load_model(run.model)
    samples = read_dataset_samples(prepared, "valid")
    probabilities = cause_probabilities(model, samples)
    threshold = float(probabilities.explode().median())
    out = tmp_path / "marked"
    report = attune(
        "annotate", "cause", "marker", "--data", "bundled", "--out", out, "--threshold", threshold,
        "--replace",
    )  # fmt: skip
    assert (
        report["hash"]
        == read_dataset_manifest(out)["hash"]
        != read_dataset_manifest(prepared)["hash"]
    )
    assert report["splits"] == read_dataset_manifest(prepared)["splits"]
    assert read_dataset_samples(out, "train").height > 2 * CAUSE_SHARD_ROWS  # several tasks
    marked = read_dataset_samples(out, "valid")
    # Marks near the threshold may fall to either side: another process adds up in another order.
    far = probabilities.list.eval((pl.element() - threshold).abs() > 1e-4).explode()
    expected = probabilities.list.eval(pl.element() >= threshold).explode()
    assert far.mean() > 0.9
    assert marked["context_causes"].explode().filter(far).equals(expected.filter(far))
    assert marked.drop("context_causes").equals(samples.drop("context_causes"))
    assert {path.name for path in out.iterdir()} == {
        *read_dataset_manifest(out)["contents"],
        MANIFEST,
    }
    assert not list(tmp_path.glob(".*"))  # nothing is left of the work


def test_a_classifier_is_trained_and_harvests_a_corpus(prepared, tiny_encoder, tmp_path):
    run = trained("emotion-classifier", "teller", tiny_encoder, 30)
    terms = {"valid_context", "valid_response", "valid_emotion_accuracy"}
    assert terms <= set(run.result["metrics"])

    out = tmp_path / "harvest"
    command = ("data", "harvest", "teller", "--source", prepared, "--out", out)
    report = attune(*command, "--threshold", 0)
    assert report["hash"] == read_dataset_manifest(out)["hash"]
    splits = read_dataset_manifest(prepared)["splits"]
    pairs = sum(splits[split]["samples"] for split in ("train", "valid", "test"))
    assert pairs > 2 * TEXT_SHARD_ROWS  # several tasks
    assert report["streams"]["contexts"]["kept"] == report["streams"]["contexts"]["texts"] == pairs
    samples = read_dataset_samples(prepared, "test").tail(20)
    assert report["harvest"]["temperature"] == fit_classifier_temperatures(run)
    model = load_model(run.model)
    for kind, stream in zip(TEXT_KINDS, UNPAIRED, strict=True):
        actual = read_dataset_samples(out, stream).tail(20)
        best = classify_texts(model, samples, kind).argmax(axis=1)
        emotions = pl.Series([model.variant.data_info.emotions[number] for number in best])
        assert actual[kind].to_list() == samples[kind].to_list()
        # Another process adds up in another order: the likeliest may be one of two equals.
        assert (actual["emotion"] == emotions).mean() > 0.9
    again = attune(*command, "--threshold", 0.5)
    assert again["hash"] == report["hash"]
    assert again["streams"]["responses"]["kept"] < pairs
    assert not list(tmp_path.glob(".*"))  # nothing is left of the work
