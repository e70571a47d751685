"""Promote the best of all runs: the aliases `champion` and `candidate` in MLflow's registry.

All variants are versions of one registered model, so that `models:/attune@champion` is the best.
"""

from dataclasses import asdict, dataclass
from typing import Any

import mlflow.artifacts
import polars as pl
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from attune.platform import tracking
from attune.platform.core.errors import UsageError, unknown_choice_error
from attune.platform.evaluation import significance
from attune.platform.runs.record import Run, write_run_aliases

MODEL = "attune"
CHAMPION, CANDIDATE = "champion", "candidate"
DECISION = "decision"
"""The tag of a version with the reason of the last decision."""
LOWER = ("perplexity", "perplexity_sample_mean")
HIGHER = (
    "bleu", "distinct_1", "distinct_2", "emotion_accuracy", "emotion_accuracy_top2",
    "emotion_accuracy_top5",
)  # fmt: skip
"""Metrics of which lower, or higher, values are better."""
SIGNIFICANCE_LEVEL = 0.05
"""The p-value below which a difference is significant."""


@dataclass(frozen=True, kw_only=True)
class PromotionCandidate:
    """A run and its value of the metric."""

    name: str
    run_id: str
    value: float | None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision about a candidate."""

    promoted: bool
    reason: str
    split: str
    metric: str
    candidate: PromotionCandidate
    champion: PromotionCandidate | None
    """The champion before the decision."""
    p_value: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the JSON of the command."""
        return asdict(self)


def answers_name(split: str) -> str:
    """Return the file name of a run's greedy answers to a split of its own data."""
    return f"{split}-greedy.parquet"


def check_metric(metric: str) -> None:
    """Raise UsageError for a metric without a better direction."""
    if metric not in LOWER + HIGHER:
        raise UsageError(unknown_choice_error("metric", metric, LOWER + HIGHER))


def promote(run: Run, *, split: str, metric: str, force: bool = False) -> Decision:
    """Make a run the candidate, and the champion if it is significantly better, or with `force`."""
    check_metric(metric)
    with tracking.open_run(run) as (client, run_id):
        with tracking.short_timeouts():
            model_id = _find_logged_model(client, run, run_id)
        ours = PromotionCandidate(
            name=run.name,
            run_id=run_id,
            value=_read_metric(client, run_id, run.name, split, metric),
        )
        version = _find_or_add_version(client, run, model_id)
        champion = _find_aliased_run(client, CHAMPION)
        if champion == run_id:
            raise UsageError(f"run '{run.name}' is already the champion")
        client.set_registered_model_alias(MODEL, CANDIDATE, version.version)
        decision = _decide(client, run, ours, champion, split, metric, force)
        if decision.promoted:
            client.set_registered_model_alias(MODEL, CHAMPION, version.version)
            client.delete_registered_model_alias(MODEL, CANDIDATE)
        client.set_model_version_tag(MODEL, version.version, DECISION, decision.reason)
        _store_aliases(client)
    return decision


def update_aliases(run: Run) -> None:
    """Store the champion and the candidate of a run's registry for `attune runs`."""
    with tracking.open_run(run) as (client, _):
        _store_aliases(client)


def _store_aliases(client: MlflowClient) -> None:
    run_ids = {alias: _find_aliased_run(client, alias) for alias in (CHAMPION, CANDIDATE)}
    write_run_aliases({alias: run_id for alias, run_id in run_ids.items() if run_id is not None})


def _find_aliased_run(client: MlflowClient, alias: str) -> str | None:
    """Return the id of the run that has an alias."""
    try:
        return client.get_model_version_by_alias(MODEL, alias).run_id
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None  # no such model, or no such alias
        raise


def _find_logged_model(client: MlflowClient, run: Run, run_id: str) -> str:
    outputs = client.get_run(run_id).outputs
    if outputs is None or not outputs.model_outputs:
        raise UsageError(
            f"run '{run.name}' is {run.status}, and {run.tracking} has no model of it: promote a "
            f"finished run ('attune runs --send' sends what could not be sent before)"
        )
    return str(outputs.model_outputs[-1].model_id)


def _find_or_add_version(client: MlflowClient, run: Run, model_id: str) -> ModelVersion:
    """Return the run's version in the registry, which is added if it is missing."""
    known = client.search_model_versions(f"name='{MODEL}' and run_id='{run.run_id}'")
    if known:
        return known[0]
    return tracking.add_version(client, MODEL, "The best of all systems.", run, model_id)


def _read_metric(client: MlflowClient, run_id: str, name: str, split: str, metric: str) -> float:
    value = client.get_run(run_id).data.metrics.get(f"{split}/{metric}")
    if value is None:
        raise UsageError(
            f"run '{name}' has no {metric} of greedy answers to {split}: evaluate it with 'attune "
            f"evaluate {name} --split {split}', or choose another --metric"
        )
    return float(value)


def _decide(
    client: MlflowClient, run: Run, ours: PromotionCandidate, champion: str | None, split: str,
    metric: str, force: bool,
) -> Decision:  # fmt: skip
    if champion is None:
        return Decision(
            promoted=True, reason="there was no champion", split=split, metric=metric,
            candidate=ours, champion=None, p_value=None,
        )  # fmt: skip
    champion_run = client.get_run(champion)
    name = champion_run.info.run_name
    if champion_run.data.tags.get("data_hash") != run.data["hash"]:
        theirs = PromotionCandidate(name=name, run_id=champion, value=None)
        if not force:
            raise UsageError(
                f"the champion '{name}' was trained on other data than '{run.name}', and their "
                f"metrics cannot be compared: train both on the same data, or use --force"
            )
        promoted, p_value = True, None
        reason = f"forced; the champion '{name}' was trained on other data"
    else:
        theirs = PromotionCandidate(
            name=name,
            run_id=champion,
            value=_read_metric(client, champion, name, split, metric),
        )
        p_value = _test_significance(client, run, champion, split, metric)
        promoted, reason = _compare_candidates(ours, theirs, split, metric, p_value)
        if force and not promoted:
            promoted, reason = True, f"forced; {reason}"
    return Decision(
        promoted=promoted, reason=reason, split=split, metric=metric, candidate=ours,
        champion=theirs, p_value=p_value,
    )  # fmt: skip


def _compare_candidates(
    ours: PromotionCandidate,
    theirs: PromotionCandidate,
    split: str,
    metric: str,
    p_value: float | None,
) -> tuple[bool, str]:
    assert ours.value is not None
    assert theirs.value is not None
    both = f"{metric} on {split} is {ours.value:.4g}, the champion's {theirs.value:.4g}"
    better = ours.value < theirs.value if metric in LOWER else ours.value > theirs.value
    if not better:
        return False, f"{both}: not better"
    if p_value is None:
        return True, f"{both}: better, but not tested, because answers of one are missing"
    if p_value >= SIGNIFICANCE_LEVEL:
        return False, f"{both}: better, but not significantly (p = {p_value:.2g})"
    return True, f"{both}: significantly better (p = {p_value:.2g})"


def _test_significance(
    client: MlflowClient, run: Run, champion: str, split: str, metric: str
) -> float | None:
    ours = run.folder / "answers" / answers_name(split)
    theirs = _download_answers(client, champion, split)
    if theirs is None or not ours.is_file():
        return None
    return significance.p_value(pl.read_parquet(ours), theirs, metric)


def _download_answers(client: MlflowClient, run_id: str, split: str) -> pl.DataFrame | None:
    """Return the answers in the store, or None; the champion may be another user's run."""
    path = f"answers/{answers_name(split)}"
    if path not in {file.path for file in client.list_artifacts(run_id, "answers")}:
        return None
    local = mlflow.artifacts.download_artifacts(
        run_id=run_id, artifact_path=path, tracking_uri=client.tracking_uri
    )
    return pl.read_parquet(local)
