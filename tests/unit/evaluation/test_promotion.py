"""Champion and candidate in a real registry, and the significance test."""

import json
from dataclasses import asdict

import numpy as np
import polars as pl
import pytest

from attune.platform import tracking
from attune.platform.core.errors import DataError, UsageError
from attune.platform.data.dataset_folder import read_dataset_manifest, read_dataset_samples
from attune.platform.evaluation import answers, metrics, promotion, significance
from attune.platform.runs.model import save_model
from attune.platform.runs.record import ALIASES, Run, read_run_aliases

# The environment that `tracking` sets for MLflow comes first.
import mlflow  # isort: skip
from mlflow import MlflowClient  # isort: skip

from tests.commands import error_of, json_output


def exact(first, second, value):
    """Return the exact p-value over all exchanges."""
    total, seen = first + second, abs(value(first.sum(axis=0)) - value(second.sum(axis=0)))
    actual = []
    for number in range(2 ** len(first)):
        kept = np.array([[number >> place & 1] for place in range(len(first))], bool)
        mixed = np.where(kept, first, second).sum(axis=0)
        actual.append(abs(value(mixed) - value(total.sum(axis=0) - mixed)) >= seen * (1 - 1e-9))
    return np.mean(actual)


def test_randomization_agrees_with_all_exchanges():
    draw = np.random.default_rng(1)
    value = significance.METRICS["perplexity"].value
    lengths = draw.integers(5, 20, size=10)
    first = np.column_stack([-3.0 * lengths + draw.normal(0, 3, 10), lengths])
    second = np.column_stack([first[:, 0] - draw.normal(1.5, 3, 10), lengths])
    expected = exact(first, second, value)
    assert 0.01 < expected < 0.9
    assert significance.randomisation_test(first, second, value, trials=4000) == pytest.approx(
        expected, abs=0.03
    )
    assert significance.randomisation_test(first, first, value) == 1.0


def table(samples, likelihood, right=1.0):
    """Return answers with this likelihood per word and this share of correct emotions."""
    words = samples["response_tokens"].str.count_matches(r"\S+") + 1
    known = np.random.default_rng(0).random(samples.height) < right
    predicted = [e if k else "none" for e, k in zip(samples["emotion"], known, strict=True)]
    return samples.select(
        "conversation_id", "turn", "emotion", "response", "response_tokens"
    ).with_columns(
        answer=pl.col("response"),
        answer_tokens=pl.col("response_tokens"),
        log_likelihood=words * likelihood,
        predicted_emotion=pl.Series(predicted),
    )


@pytest.fixture(scope="module")
def samples(prepared):
    return read_dataset_samples(prepared, "valid").head(120)


def test_tested_values_equal_the_metrics(samples):
    output = table(samples, -2.0, right=0.7)
    noise = np.random.default_rng(2).normal(0, 1, samples.height)
    output = output.with_columns(log_likelihood=output["log_likelihood"] + pl.Series(noise))
    message = output["response_tokens"].str.replace(r" \S+ ", " x ")
    output = output.with_columns(answer_tokens=message)
    scored, _ = answers.score(output)
    for name, metric in significance.METRICS.items():
        assert metric.value(metric.counts(output).sum(axis=0)) == pytest.approx(scored[name])
    assert scored["bleu"] == metrics.bleu(message.to_list(), output["response_tokens"].to_list())[0]


def test_only_real_differences_are_significant(samples):
    draw = np.random.default_rng(3)
    noise = pl.Series(draw.normal(0, 4, samples.height))
    ours = table(samples, -2.0)
    noisy = ours.with_columns(log_likelihood=ours["log_likelihood"] + noise)
    worse = table(samples, -2.3)
    assert significance.p_value(ours, worse, "perplexity") < 0.01
    assert significance.p_value(ours, noisy, "perplexity") > 0.05
    # The order of rows does not matter, other samples do.
    assert significance.p_value(ours, worse.reverse(), "perplexity") < 0.01
    with pytest.raises(DataError, match="same samples"):
        significance.p_value(ours, worse.head(100), "perplexity")
    assert significance.p_value(ours, worse, "distinct_2") is None
    unknowing = worse.with_columns(predicted_emotion=pl.lit(None, pl.String))
    assert significance.p_value(ours, unknowing, "emotion_accuracy") is None


@pytest.fixture
def home(home_with_store):
    return home_with_store


@pytest.fixture
def new_run(home, prepared, build, samples):
    """Create finished runs, evaluated on valid, with a fixed likelihood per word."""
    model, manifest = build("dummy"), read_dataset_manifest(prepared)

    def make(name, likelihood, *, variant="dummy", right=1.0, data=None):
        run = Run(
            name=name, folder=home / "runs" / name, variant=variant, preset="tiny",
            config=asdict(model.variant.config), training={"track_checkpoint": False},
            data={"name": "x", "folder": str(prepared), "hash": data or manifest["hash"]},
            result={"best_step": 1, "steps": 1, "seconds": 1.0, "metrics": {}},
        )  # fmt: skip
        run.write()
        save_model(model, run.model)
        run = tracking.start_run(run, manifest).update(status="finished")
        tracking.finish_run(run, None)
        path = run.folder / "answers" / promotion.answers_name("valid")
        answers.write(table(samples, likelihood, right), path)
        tracking.log_evaluation(run, "valid", "greedy", answers.score(answers.read(path))[0], path)
        return run

    return make


def promoted(run, **inputs):
    return promotion.promote(run, **{"split": "valid", "metric": "perplexity", **inputs})


def test_significantly_better_run_becomes_champion(new_run, home, monkeypatch, call):
    first = new_run("first", -2.5)
    decision = promoted(first)
    assert decision.promoted
    assert "no champion" in decision.reason
    assert read_run_aliases() == {first.run_id: "champion"}

    worse = new_run("worse", -2.9)
    decision = promoted(worse)
    assert not decision.promoted
    assert decision.candidate.value == pytest.approx(np.exp(2.9))
    assert decision.champion.value == pytest.approx(np.exp(2.5))
    assert "not better" in decision.reason
    assert read_run_aliases() == {first.run_id: "champion", worse.run_id: "candidate"}

    better = new_run("better", -2.2)
    done = json_output(call("promote", "better", "--json"))
    assert done["promoted"]
    assert done["p_value"] < 0.05
    assert (done["candidate"]["name"], done["champion"]["name"]) == ("better", "first")
    shown = {run["name"]: run["alias"] for run in json_output(call("runs", "--json"))["runs"]}
    assert shown == {"first": None, "worse": None, "better": "champion"}
    assert "better (champion)" in call("runs").stdout

    client = MlflowClient(tracking_uri=f"sqlite:///{home}/mlflow.db")
    champion = client.get_model_version_by_alias("attune", "champion")
    assert champion.run_id == better.run_id
    assert "significantly better" in champion.tags["decision"]
    assert set(client.get_registered_model("attune").aliases) == {"champion"}
    assert len(client.search_model_versions("name='attune'")) == 3
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{home}/mlflow.db")
    loaded = mlflow.pyfunc.load_model("models:/attune@champion")
    assert loaded.metadata.run_id == better.run_id


def test_insignificant_difference_promotes_only_with_force(new_run, samples):
    promoted(new_run("first", -2.5, right=0.5))
    lucky = new_run("lucky", -2.5, right=0.5)
    path = lucky.folder / "answers" / promotion.answers_name("valid")
    noise = np.random.default_rng(6).normal(0, 4, samples.height)
    noise += 0.05 - noise.mean()  # a little better on the whole
    answers.write(pl.read_parquet(path).with_columns(pl.col("log_likelihood") + noise), path)
    scored, _ = answers.score(answers.read(path))
    tracking.log_evaluation(lucky, "valid", "greedy", scored, path)
    decision = promoted(lucky)
    assert decision.candidate.value < decision.champion.value
    assert not decision.promoted
    assert "not significantly" in decision.reason
    decision = promoted(lucky, force=True)
    assert decision.promoted
    assert "forced; " in decision.reason
    with pytest.raises(UsageError, match="already the champion"):
        promoted(lucky)


def test_incomparable_runs_are_errors(new_run, call):
    promoted(new_run("first", -2.5))
    other = new_run("other", -2.0, data="f" * 64)
    with pytest.raises(UsageError, match="'first' was trained on other data"):
        promoted(other)
    with pytest.raises(UsageError, match="attune evaluate other --split test"):
        promoted(other, split="test")
    assert promoted(other, force=True).champion.value is None
    error_of(call("promote", "other", "--metric", "perplexty"))
    assert "perplexity" in call("promote", "other", "--metric", "perplexty").stderr


def test_metrics_decide_without_answers(new_run):
    promoted(new_run("first", -2.5), metric="bleu")
    second = new_run("second", -2.4)
    (second.folder / "answers" / promotion.answers_name("valid")).unlink()
    decision = promoted(second)
    assert decision.promoted
    assert decision.p_value is None
    assert "not tested" in decision.reason


def test_aliases_are_updated_from_the_registry(new_run, home, call):
    run = new_run("first", -2.5)
    promoted(run)
    (home / ALIASES).write_text(json.dumps({"champion": "gone"}))
    actual = json_output(call("runs", "--send", "--json"))["runs"]
    assert [each["alias"] for each in actual] == ["champion"]
