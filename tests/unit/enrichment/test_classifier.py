"""The emotion classifier: what it reads, what its probabilities mean, and how it is measured."""

import dataclasses
import itertools
import json

import numpy as np
import polars as pl
import pytest
import torch

from attune.models.base import Progress
from attune.platform.batching.encoding import encode_as_subwords
from attune.platform.batching.streams import Stream
from attune.platform.core.errors import UsageError
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.data.labels import EMOTIONS
from attune.platform.enrichment import calibration, classifier
from attune.platform.enrichment.classifier import (
    CALIBRATION_FILE,
    TEXT_KINDS,
    classify_texts,
    fit_classifier_temperatures,
)
from attune.platform.evaluation import emotion_metrics, metrics
from attune.platform.runs.model import load_model, save_model
from attune.platform.runs.record import find_run
from attune.platform.text import encoders
from tests import contract
from tests.commands import error_of, json_output


@pytest.fixture(scope="module")
def encoder(tiny_encoder):
    return encoders.load_encoder(str(tiny_encoder))


def test_the_emotion_is_not_an_input(encoder, prepared):
    samples = read_dataset_samples(prepared, "test").head(20)
    read = encode_as_subwords(encoder, samples)
    for row in (0, 7, 19):
        context, response = samples["context"][row].to_list(), samples["response"][row]
        spoken_by_turn = encoder.subwords(context)
        expected = [encoder.cls_token]
        for turn in spoken_by_turn:
            expected += [*turn, encoder.separator]
        assert read["context_subwords"].pad(np.array([row]))[0].tolist() == expected
        [alone] = encoder.subwords([response])
        expected = [encoder.cls_token, *alone, encoder.separator]
        assert read["response_subwords"].pad(np.array([row]))[0].tolist() == expected
    other = samples.with_columns(emotion=pl.lit("proud"))
    again = encode_as_subwords(encoder, other)
    assert all((again[name].values == column.values).all() for name, column in read.items())


def test_long_texts_lose_their_beginning_and_missing_ones_are_empty(encoder, prepared):
    samples = read_dataset_samples(prepared, "test").head(1)
    samples = samples.with_columns(
        context=pl.Series([["now " * 150, "then " * 150]]),
        response=pl.lit(None, dtype=pl.String),
    )
    read = encode_as_subwords(encoder, samples)
    assert read["context_subwords"].lengths.tolist() == [encoder.max_length]
    numbers = read["context_subwords"].values.tolist()
    [[now], [then]] = encoder.subwords(["now", "then"])
    assert (numbers[0], numbers[-1]) == (encoder.cls_token, encoder.separator)
    assert (numbers.count(then), numbers.count(now)) == (150, encoder.max_length - 153)
    assert read["response_subwords"].lengths.tolist() == [0]
    unpaired = encode_as_subwords(encoder, read_dataset_samples(prepared, "unpaired_responses"))
    assert set(unpaired["context_subwords"].lengths) == {0}


def test_it_is_trained_on_contexts_and_responses(build, batch):
    variant = build("emotion-classifier", response_weight=0.5).variant.eval()
    losses = variant.losses({"paired": batch}, Progress())
    for kind, predicted in (("context", variant.predict), ("response", variant.predict_response)):
        chosen = predicted(batch)["emotion"].gather(1, batch["emotion"][:, None])
        assert torch.allclose(losses[kind], -chosen.mean())
    [update] = variant.stages()[0].updates
    assert update.weights == {"context": 1.0, "response": 0.5}


def test_a_frozen_encoder_is_not_trained(build):
    [stage] = build("emotion-classifier", tuned=False).variant.stages()
    assert stage.players["model"] == ("output",)


def test_log_probabilities_are_by_row(build, prepared):
    model = build("emotion-classifier")
    samples = read_dataset_samples(prepared, "test").head(40)
    done = []
    for kind in TEXT_KINDS:
        together = classify_texts(model, samples, kind, done.append)
        for row in (0, 13, 39):
            alone = classify_texts(model, samples[row], kind)
            assert together[row] == pytest.approx(alone[0], abs=1e-4)
        assert np.exp(together).sum(axis=1) == pytest.approx(np.ones(40), abs=1e-5)
    assert sum(done) == 80
    with pytest.raises(UsageError, match="'dummy' does not classify texts"):
        classify_texts(build("dummy"), samples, "context")


def test_calibration_error_of_a_small_example():
    confidence = np.array([0.9, 0.9, 0.9, 0.9, 0.5, 0.5])
    right = [0, 0, 1, 1, 0, 1]  # half of the sure ones: 0.4 off; of the others: right
    log_probabilities = np.log(np.stack([confidence, 1 - confidence], axis=1))
    actual = calibration.reliability(log_probabilities, np.array(right))
    assert actual.error == pytest.approx(4 / 6 * 0.4)
    assert actual.count.sum() == 6
    assert actual.count[13] == 4  # 0.9 * 15 = 13.5
    assert actual.accuracy[13] == 0.5
    assert np.isnan(actual.accuracy[0])
    sure = calibration.reliability(np.array([[0.0, -np.inf]]), np.array([0]))
    assert sure.count[-1] == 1
    assert sure.error == 0.0


def test_the_temperature_is_recovered():
    draw = np.random.default_rng(0)
    logits = draw.normal(0, 2, (20_000, 8))
    honest = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    truth = (honest + draw.gumbel(size=honest.shape)).argmax(axis=1)  # labels drawn from it
    assert calibration.temperature(honest, truth) == pytest.approx(1.0, abs=0.03)
    boastful = calibration.apply_calibration_temperature(honest, 1 / 3)
    assert calibration.temperature(boastful, truth) == pytest.approx(3.0, abs=0.1)
    back = calibration.apply_calibration_temperature(
        boastful, calibration.temperature(boastful, truth)
    )
    assert calibration.reliability(boastful, truth).error > 0.2
    assert calibration.reliability(back, truth).error < 0.02
    assert (back.argmax(axis=1) == boastful.argmax(axis=1)).all()
    assert np.exp(back).sum(axis=1) == pytest.approx(np.ones(len(back)))
    always = calibration.temperature(boastful, boastful.argmax(axis=1))
    assert always == pytest.approx(0.01)  # the coldest there is


def test_weighted_scores_count_labels_as_often_as_they_are_true():
    likeliest = np.log(np.eye(3)[[0, 1, 1, 1]] * 0.9 + 0.05)
    actual = metrics.weighted_scores(likeliest, np.array([0, 0, 0, 1]))
    assert actual["weighted_precision"] == pytest.approx((3 * 1 + 1 / 3) / 4)
    assert actual["weighted_recall"] == pytest.approx((3 * (1 / 3) + 1) / 4)
    assert actual["weighted_f1"] == pytest.approx(0.5)


def test_scores_above_a_threshold():
    probabilities = np.array([[0.7, 0.2, 0.1], [0.65, 0.3, 0.05], [0.4, 0.5, 0.1], [0.6, 0.2, 0.2]])
    actual = emotion_metrics.scores(np.log(probabilities), np.array([0, 1, 0, 0]), 0.6)
    assert actual["emotion_accuracy"] == 0.5
    assert actual["emotion_accuracy_top2"] == 1.0
    assert actual["kept_share"] == 0.5  # above, not from it on
    assert actual["kept_accuracy"] == 0.5
    assert (
        emotion_metrics.scores(np.log(probabilities), np.array([0, 1, 0, 0]), 0.8)["kept_accuracy"]
        is None
    )


@pytest.fixture(scope="module")
def taught(build, columns):
    """A classifier that has learned a little, or no temperature would suit it."""
    model = build("emotion-classifier")
    batches = list(itertools.islice(Stream(columns, size=64).epoch(), 60))
    contract.train_on_batches(model.variant, batches, steps=60)
    return model


@pytest.fixture
def home(home_with, build, taught):
    """A home with a classifier and a run that answers."""
    return home_with({"teller": taught, "talker": build("dummy")})


@pytest.mark.usefixtures("home")
def test_temperatures_are_fitted_on_valid_and_kept(prepared, monkeypatch):
    run = find_run("teller")
    actual = fit_classifier_temperatures(run)
    model, samples = load_model(run.model), read_dataset_samples(prepared, "valid")
    truth = np.array([EMOTIONS.index(emotion) for emotion in samples["emotion"]])
    for kind in TEXT_KINDS:
        raw = classify_texts(model, samples, kind)
        assert actual[kind] == pytest.approx(calibration.temperature(raw, truth), rel=1e-3)
    assert actual["context"] != actual["response"]
    kept = json.loads((run.model / CALIBRATION_FILE).read_text())
    assert kept == {"temperature": actual, "split": "valid", "samples": samples.height}
    monkeypatch.setattr(classifier, "classify_texts", None)  # not fitted a second time
    assert fit_classifier_temperatures(run) == actual


@pytest.mark.usefixtures("home")
def test_changed_data_cannot_calibrate():
    run = find_run("teller")
    changed = run.update(data={**run.data, "hash": "other"})
    with pytest.raises(UsageError, match=r"'teller' is not calibrated yet, and .* has changed"):
        fit_classifier_temperatures(changed)


@pytest.mark.usefixtures("home")
def test_evaluate_measures_labels(call, prepared):
    done = json_output(call("evaluate", "teller", "--threshold", "0.01", "--json"))
    actual = done["metrics"]
    names = (
        "emotion_accuracy", "emotion_accuracy_top2", "emotion_accuracy_top5", "calibration_error",
        "calibration_error_uncalibrated", "kept_share", "kept_accuracy", "temperature",
        "weighted_precision", "weighted_recall", "weighted_f1",
    )  # fmt: skip
    assert {*names, *(f"response_{name}" for name in names), "parameters"} == set(actual)
    assert actual["kept_share"] == 1.0
    assert actual["kept_accuracy"] == actual["emotion_accuracy"]
    samples = read_dataset_samples(prepared, "test")
    assert done["decode"] is None
    assert done["signature"] == (
        f"calibration_error:top-label,15-equal-bins threshold:0.01 samples:{samples.height}"
    )
    kept = pl.read_parquet(done["answers"])
    right = (kept["emotion"] == kept["predicted_emotion"]).mean()
    assert right == pytest.approx(actual["emotion_accuracy"])
    assert kept["response_probability"].is_between(0, 1).all()
    assert "'teller' classifies texts" in error_of(call("evaluate", "teller", "--decode", "beam"))


@pytest.mark.usefixtures("home")
def test_show_calibration(call, tmp_path):
    out = tmp_path / "pictures" / "reliability.png"
    done = json_output(call("show", "calibration", "teller", "--out", out, "--json"))
    assert out.read_bytes().startswith(b"\x89PNG")
    errors = done["calibration_error"]
    assert set(errors) == {
        f"{kind}_{when}"
        for kind in ("context", "response")
        for when in ("calibrated", "uncalibrated")
    }
    actual = json_output(call("evaluate", "teller", "--json"))["metrics"]
    assert errors["context_calibrated"] == pytest.approx(actual["calibration_error"])
    assert errors["response_uncalibrated"] == pytest.approx(
        actual["response_calibration_error_uncalibrated"]
    )
    assert "does not classify texts" in error_of(call("show", "calibration", "talker"))
    assert "ending in .png" in error_of(call("show", "calibration", "teller", "--out", "x.xyz"))


def test_accuracy_by_emotion():
    predicted = pl.DataFrame(
        {
            "emotion": ["sad", "proud", "sad", "sad", None],
            "predicted_emotion": ["sad", "sad", "sad", None, "sad"],
        }
    )
    assert emotion_metrics.by_emotion(predicted).rows() == [("proud", 1, 0.0), ("sad", 3, 2 / 3)]


def test_show_emotions(call, home, tmp_path, build, prepared):
    for name, variant in (("first", "multi-trs"), ("silent", "transformer")):
        run = find_run("talker")
        run = dataclasses.replace(run, name=name, folder=home / "runs" / name, variant=variant)
        run.write()
        save_model(build(variant), run.model)
    out = tmp_path / "figure-4.png"
    command = ("show", "emotions", "first", "teller", "--split", "valid", "--out", out, "--json")
    done = json_output(call(*command))
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [row["emotion"] for row in done["emotions"]] == sorted(EMOTIONS)
    samples = read_dataset_samples(prepared, "valid")
    assert sum(row["samples"] for row in done["emotions"]) == samples.height
    actual = json_output(call("evaluate", "teller", "--split", "valid", "--json"))
    assert done["runs"][1]["accuracy"] == pytest.approx(actual["metrics"]["emotion_accuracy"])
    of_emotions = [row["second"] for row in done["emotions"]]
    assert done["runs"][1]["spread"] == pytest.approx(np.std(of_emotions))
    # What was predicted before is not predicted again.
    kept = pl.read_parquet(actual["answers"]).with_columns(predicted_emotion="emotion")
    kept.write_parquet(actual["answers"])
    assert json_output(call(*command))["runs"][1] == {
        "run": "teller", "variant": "emotion-classifier", "accuracy": 1.0, "spread": 0.0
    }  # fmt: skip
    assert "'transformer' predicts no emotion" in error_of(
        call("show", "emotions", "silent", "teller", "--out", out)
    )
