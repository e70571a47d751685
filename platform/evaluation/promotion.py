"""Who is the best of all runs: the aliases `champion` and `candidate` in MLflow's registry.

All variants stand under one registered model, so that `models:/attune@champion` is whoever it is.
"""

from dataclasses import asdict, dataclass
from typing import Any

import mlflow.artifacts
import polars as pl
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from attune.platform import tracking
from attune.platform.core.errors import UsageError, unknown_choice
from attune.platform.evaluation import significance
from attune.platform.runs.record import Run, write_aliases

MODEL = "attune"
CHAMPION, CANDIDATE = "champion", "candidate"
DECISION = "decision"
"""The tag of a version that says what became of it, and why."""
LOWER = ("perplexity", "perplexity_sample_mean")
HIGHER = (
    "bleu", "distinct_1", "distinct_2", "emotion_accuracy", "emotion_accuracy_top2",
    "emotion_accuracy_top5",
)  # fmt: skip
"""Metrics of which less, or more, is better."""
SURE = 0.05
"""The p-value below which a difference is taken for more than chance."""


@dataclass(frozen=True, kw_only=True)
class PromotionCandidate:
    """A run, and how it does."""

    name: str
    run_id: str
    value: float | None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What became of a candidate."""

    promoted: bool
    reason: str
    split: str
    metric: str
    candidate: PromotionCandidate
    champion: PromotionCandidate | None
    """Who was it until now."""
    p_value: float | None

    def to_json(self) -> dict[str, Any]:
        """For the command's JSON."""
        return asdict(self)


def answers_name(split: str) -> str:
    """The file of a run's greedy answers to a split of the data it learned from."""
    return f"{split}-greedy.parquet"


def check_metric(metric: str) -> None:
    """Only what has a better and a worse can be compared by."""
    if metric not in LOWER + HIGHER:
        raise UsageError(unknown_choice("metric", metric, LOWER + HIGHER))


def promote(run: Run, *, split: str, metric: str, force: bool = False) -> Decision:
    """Make a run the candidate, hold it against the champion, and let it take that place if it is
    better by more than chance, or where `force` says so."""
    check_metric(metric)
    with tracking.open_run(run) as (client, run_id):
        with tracking.short_timeouts():
            model_id = _logged_model(client, run, run_id)
        ours = PromotionCandidate(
            name=run.name,
            run_id=run_id,
            value=_read_metric(client, run_id, run.name, split, metric),
        )
        version = _version(client, run, model_id)
        champion = _holder(client, CHAMPION)
        if champion == run_id:
            raise UsageError(f"run '{run.name}' is the champion already")
        client.set_registered_model_alias(MODEL, CANDIDATE, version.version)
        decision = _decide(client, run, ours, champion, split, metric, force)
        if decision.promoted:
            client.set_registered_model_alias(MODEL, CHAMPION, version.version)
            client.delete_registered_model_alias(MODEL, CANDIDATE)
        client.set_model_version_tag(MODEL, version.version, DECISION, decision.reason)
        _note(client)
    return decision


def note(run: Run) -> None:
    """Note who the registry of a run's store says is champion and who candidate."""
    with tracking.open_run(run) as (client, _):
        _note(client)


def _note(client: MlflowClient) -> None:
    holders = {alias: _holder(client, alias) for alias in (CHAMPION, CANDIDATE)}
    write_aliases({alias: run_id for alias, run_id in holders.items() if run_id is not None})


def _holder(client: MlflowClient, alias: str) -> str | None:
    """The id of the run that has an alias."""
    try:
        return client.get_model_version_by_alias(MODEL, alias).run_id
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None  # no such model, or no such alias
        raise


def _logged_model(client: MlflowClient, run: Run, run_id: str) -> str:
    outputs = client.get_run(run_id).outputs
    if outputs is None or not outputs.model_outputs:
        raise UsageError(
            f"run '{run.name}' is {run.status}, and {run.tracking} has no model of it: promote a "
            f"finished run ('attune runs --send' sends what a server that was away has not got)"
        )
    return str(outputs.model_outputs[-1].model_id)


def _version(client: MlflowClient, run: Run, model_id: str) -> ModelVersion:
    """The run's place in the registry, made where there is none."""
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
    holder = client.get_run(champion)
    name = holder.info.run_name
    if holder.data.tags.get("data_hash") != run.data["hash"]:
        theirs = PromotionCandidate(name=name, run_id=champion, value=None)
        if not force:
            raise UsageError(
                f"the champion '{name}' learned from other data than '{run.name}', and their "
                f"metrics cannot be compared: train one on the other's, or replace it with --force"
            )
        promoted, p_value = True, None
        reason = f"asked for, with other data than the champion '{name}'"
    else:
        theirs = PromotionCandidate(
            name=name,
            run_id=champion,
            value=_read_metric(client, champion, name, split, metric),
        )
        p_value = _p_value(client, run, champion, split, metric)
        promoted, reason = _compare_candidates(ours, theirs, split, metric, p_value)
        if force and not promoted:
            promoted, reason = True, f"asked for, although {reason}"
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
        return True, f"{both}: better, but without answers of both it could not be tested"
    if p_value >= SURE:
        return False, f"{both}: better, but it may be chance (p = {p_value:.2g})"
    return True, f"{both}: better, and not by chance (p = {p_value:.2g})"


def _p_value(
    client: MlflowClient, run: Run, champion: str, split: str, metric: str
) -> float | None:
    ours = run.folder / "answers" / answers_name(split)
    theirs = _download_answers(client, champion, split)
    if theirs is None or not ours.is_file():
        return None
    return significance.p_value(pl.read_parquet(ours), theirs, metric)


def _download_answers(client: MlflowClient, run_id: str, split: str) -> pl.DataFrame | None:
    """As the store has them: the champion may be somebody else's run."""
    path = f"answers/{answers_name(split)}"
    if path not in {file.path for file in client.list_artifacts(run_id, "answers")}:
        return None
    local = mlflow.artifacts.download_artifacts(
        run_id=run_id, artifact_path=path, tracking_uri=client.tracking_uri
    )
    return pl.read_parquet(local)
