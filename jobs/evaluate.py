"""`attune evaluate`: how good are a run's answers to a whole split, or anybody's in a file?

Of an annotator: how good are its marks? Of a classifier: how good are its labels?
"""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from attune.jobs import options
from attune.jobs.console import Json, console, print_json, progress
from attune.jobs.tables import shown, table
from attune.platform.core.errors import UsageError, unknown_choice

if TYPE_CHECKING:
    import polars as pl

    from attune.models.decoding import Decoding
    from attune.models.published import Figure
    from attune.platform.enrichment.causes import Progress
    from attune.platform.evaluation.evaluate import Evaluation
    from attune.platform.runs.record import Run

    Measure = Callable[
        [pl.Series, pl.Series, Path | None, Progress], tuple[dict[str, float | None], str]
    ]

TEST, OWN_PROFILE = "test", "attune"
MARKS, EMOTIONS = "marks", "emotions"
"""What runs tell that do not answer."""
PUBLISHED_ON = ("ed", "intents")
"""The data that papers print figures of."""


def evaluate(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run, by name, MLflow id or `variant@latest`.",
            show_default=False,
        ),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Score this file instead of a run: Parquet or JSON lines with `answer` and "
            "`response`, raw or tokenised.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="bundled|DIR", help="Prepared data.", show_default="what the run learned from"
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(metavar="train|valid|test", help="What to answer.", show_default=TEST),
    ] = None,
    decode: options.Decode = None,
    settings: options.DecodingChanges = None,
    control: options.Controls = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE",
            help="What a run was after an earlier stage of training, such as EmpDG's `generator`.",
            show_default="its last",
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            metavar="attune|empdg|meed2",
            help="Whose way: all samples of a split; EmpDG's, without each conversation's last "
            "listener turn; or MEED2's perplexity, where the true label is told.",
        ),
    ] = OWN_PROFILE,
    bertscore: Annotated[
        str | None,
        typer.Option(
            metavar="minilm|DIR[:LAYER]",
            help="Also BERTScore, with MiniLM or the encoder in a folder, and its last layer or "
            "the one that is named.",
        ),
    ] = None,
    embedding_metrics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also Embedding Average, Greedy and Extrema, with these word vectors (GloVe's "
            "text form, may be packed).",
        ),
    ] = None,
    sentence_similarity: Annotated[
        str | None,
        typer.Option(
            metavar="minilm|DIR",
            help="Also sentence-embedding similarity, with MiniLM or the encoder in a folder.",
        ),
    ] = None,
    threshold: options.Threshold = None,
    as_json: Json = False,
) -> None:
    """Answer a whole split with a run and measure it, or measure answers that a file holds.

    Gives perplexity, emotion accuracy, BLEU and distinct-n; what does not apply to a model is
    shown as `-`. The answers are kept as Parquet in the run's folder, and the metrics beside the
    run's own in the tracking store. Such a file can be given to --answers again, and so can
    anybody's: its columns `log_likelihood`, `emotion` and `predicted_emotion`, if there, give
    perplexity and accuracy too. BERTScore is rescaled by random pairs of the data's train
    responses; for a file --data says which.

    A run of an annotator marks the causes of a split instead, and is measured where the data say
    what they are. A run of a classifier tells the emotions of contexts and of responses, or the
    labels of utterances; besides accuracies there is the calibration error of its probabilities,
    before and after they are scaled by a temperature that is fitted on valid, and what --threshold
    would keep.

    Examples:

    - `attune evaluate multi-trs@latest`
    - `attune evaluate mine --split valid --decode beam --set beams=10`
    - `attune evaluate mine --data data/ed --decode topk --set top_k=5 --set seed=1`
    - `attune evaluate empdg@latest --profile empdg`
    - `attune evaluate meed2@latest --profile meed2`
    - `attune evaluate empdg@latest --stage generator`, before it learned from its critics
    - `attune evaluate mine --bertscore minilm --embedding-metrics glove.6B.300d.txt`
    - `attune evaluate mine --sentence-similarity minilm`
    - `attune evaluate --answers theirs.jsonl --json`
    - `attune evaluate cause-annotator@latest --data data/reccon --threshold 0.4`
    - `attune evaluate emotion-classifier@latest`
    - `attune evaluate intent-classifier@latest`
    """
    if (name is None) == (answers is None):
        raise UsageError("give either a RUN or --answers FILE, and not both")
    run = None if name is None else options.trained_run(name)
    published, special = {}, _named(profile)
    measures = more_measures(bertscore, embedding_metrics, sentence_similarity)
    if run is not None and (kind := labels(run)):
        answering = {
            "--decode": decode, "--set": settings, "--control": control, "--stage": stage,
            "--profile": profile != OWN_PROFILE, "--bertscore": bertscore,
            "--embedding-metrics": embedding_metrics, "--sentence-similarity": sentence_similarity,
        }  # fmt: skip
        if useless := [option for option, value in answering.items() if value]:
            does = "marks causes" if kind == MARKS else "classifies texts"
            raise UsageError(f"{useless[0]} is for runs that answer: '{run.name}' {does}")
        result = of_labels(run, data, split or TEST, threshold)
        published = _published(run, data, result)
    elif threshold is not None:
        raise UsageError("--threshold is for runs of an annotator or a classifier")
    elif run is not None:
        decoding = options.decoding(decode, options.parse_overrides(settings))
        controls = options.controls(control, [run])
        special |= controls | _after(stage)
        result = of_run(run, data, split or TEST, decoding, controls, profile, measures, stage)
        published = _published(run, data, result)
    else:
        assert answers is not None
        given = {
            "--data": data and not bertscore, "--split": split, "--decode": decode,
            "--set": settings, "--control": control, "--profile": profile != OWN_PROFILE,
            "--stage": stage,
        }  # fmt: skip
        if useless := [option for option, value in given.items() if value]:
            raise UsageError(f"{useless[0]} is for a RUN: the answers in a file are made already")
        result = _of_file(answers, measures, data)
    _show(console(as_json), result, published)
    if run is not None:
        log(run, result, special)
    if as_json:
        print_json(result)


def of_run(
    run: "Run",
    data: str | None,
    split: str,
    decoding: "Decoding",
    controls: Mapping[str, str] | None = None,
    profile: str = OWN_PROFILE,
    measures: "Sequence[Measure]" = (),
    stage: str | None = None,
) -> dict[str, Any]:
    """What the command's JSON says, with the answers kept in the run's folder."""
    import polars as pl

    from attune.platform.evaluation import answers

    folder, others = _data(run, data, split)
    evaluation = _evaluated(run, folder, split, decoding, controls, profile, stage)
    special = {**(controls or {}), **_named(profile), **_after(stage), **others}
    path = run.folder / "answers" / _file_name(split, decoding, special)
    # `answer` holds tokens already: under this name they are scored as they stand.
    table = evaluation.answers.with_columns(answer_tokens=pl.col("answer"))
    answers.write(table, path)
    more, definition = _measured(measures, table, folder)
    return {
        "run_id": run.run_id,
        "split": split,
        "decode": decoding.method,
        "answers": str(path),
        "signature": f"profile:{profile} {evaluation.signature}{definition}",
        "metrics": evaluation.metrics | more,
    }


def labels(run: "Run") -> str | None:
    """What a run tells instead of answering."""
    from attune.models.base import Annotator, TextClassifier
    from attune.platform.core.settings import find_variant

    variant = find_variant(run.variant)[0]
    if issubclass(variant, Annotator):
        return MARKS
    return EMOTIONS if issubclass(variant, TextClassifier) else None


def of_labels(run: "Run", data: str | None, split: str, threshold: float | None) -> dict[str, Any]:
    """The same of an annotator's marks, or of a classifier's emotions."""
    from attune.platform.evaluation import answers

    folder, others = _data(run, data, split)
    kind = labels(run)
    with progress("texts") as bar:
        task = bar.add_task(f"{run.name} on {split}", total=None)
        evaluation = (_marks if kind == MARKS else _emotions)(
            run,
            folder,
            split,
            threshold,
            lambda count: bar.update(task, total=count),
            lambda done: bar.advance(task, done),
        )
    ending = "".join(f"-{value[:8]}" for value in others.values())
    path = run.folder / "answers" / f"{split}-{kind}{ending}.parquet"
    answers.write(evaluation.answers, path)
    return {
        "run_id": run.run_id,
        "split": split,
        "decode": None,
        "answers": str(path),
        "signature": evaluation.signature,
        "metrics": evaluation.metrics,
    }


def _marks(
    run: "Run", folder: Path, split: str, threshold: float | None, total: "Progress",
    done: "Progress",
) -> "Evaluation":  # fmt: skip
    from attune.platform.data.dataset_folder import read_marked
    from attune.platform.enrichment.causes import CAUSE_THRESHOLD
    from attune.platform.evaluation import cause_metrics
    from attune.platform.runs.model import load_model

    samples = read_marked(folder, split)
    total(samples.height)
    given = CAUSE_THRESHOLD if threshold is None else threshold
    return cause_metrics.evaluate(load_model(run.model), samples, given, done)


def _emotions(
    run: "Run", folder: Path, split: str, threshold: float | None, total: "Progress",
    done: "Progress",
) -> "Evaluation":  # fmt: skip
    from attune.platform.enrichment.classifier import fit_temperatures, require_classifier
    from attune.platform.evaluation import emotion_metrics
    from attune.platform.runs.model import load_model, read_split

    model = load_model(run.model)
    variant = require_classifier(model)
    samples = read_split(variant, folder, split)
    total(len(variant.learns) * samples.height)
    given = emotion_metrics.THRESHOLD if threshold is None else threshold
    return emotion_metrics.evaluate(model, samples, given, fit_temperatures(run), done)


def _data(run: "Run", data: str | None, split: str) -> tuple[Path, dict[str, str]]:
    """The folder to be evaluated on, and its hash where it is not what the run learned from."""
    from attune.platform.data.conversations import SPLITS
    from attune.platform.data.dataset_folder import read_manifest
    from attune.platform.data.prepare import find_data

    if split not in SPLITS:
        raise UsageError(unknown_choice("split", split, SPLITS))
    folder = find_data(data or run.data["folder"])
    data_hash = read_manifest(folder)["hash"]
    is_own = data_hash == run.data["hash"]
    if data is None and not is_own:
        console(True).print(f"note: {folder} has changed since the run learned from it")
    return folder, {} if is_own else {"data": data_hash}


def more_measures(
    encoder: str | None = None, vectors: Path | None = None, sentence_encoder: str | None = None
) -> "list[Measure]":
    """What is measured by pretrained models where it is asked for. They are looked for before the
    answers are made: what is not there is told at once."""
    from attune.platform.evaluation import bertscore, embeddings, sentences
    from attune.platform.text import encoders

    found: list[Measure] = []
    if encoder is not None:
        metric = bertscore.load(encoder)
        found.append(
            lambda said, meant, folder, done: bertscore.score(
                metric, said.to_list(), meant.to_list(), folder, done
            )
        )
    if vectors is not None:
        path = vectors
        embeddings.check(path)
        found.append(lambda said, meant, _, done: embeddings.score(path, said, meant, done))
    if sentence_encoder is not None:
        reader = encoders.load(sentence_encoder)
        found.append(
            lambda said, meant, _, done: sentences.score(
                reader, said.to_list(), meant.to_list(), done
            )
        )
    return found


def _measured(
    measures: "Sequence[Measure]", answers: "pl.DataFrame", folder: Path | None
) -> tuple[dict[str, float | None], str]:
    """Their metrics, and what to add to the signature."""
    from attune.platform.evaluation.answers import tokens

    metrics: dict[str, float | None] = {}
    definitions = ""
    with progress("pairs") as bar:
        for measure in measures:
            task = bar.add_task("comparing answers with responses", total=answers.height)
            found, definition = measure(
                tokens(answers, "answer"),
                tokens(answers, "response"),
                folder,
                functools.partial(bar.advance, task),
            )
            metrics |= found
            definitions += f" {definition}"
    return metrics, definitions


def _named(profile: str) -> dict[str, str]:
    return {} if profile == OWN_PROFILE else {"profile": profile}


def _after(stage: str | None) -> dict[str, str]:
    return {} if stage is None else {"stage": stage}


def _published(run: "Run", data: str | None, result: dict[str, Any]) -> dict[str, list["Figure"]]:
    """What papers print of the same metrics, where it is the same data."""
    from attune.models import published
    from attune.platform.data.dataset_folder import read_manifest
    from attune.platform.data.prepare import find_data

    form = read_manifest(find_data(data or run.data["folder"]))["format"]
    if result["split"] != TEST or form not in PUBLISHED_ON:
        return {}
    found = {name: published.of(run.variant, name) for name in result["metrics"]}
    return {name: figures for name, figures in found.items() if figures}


def _evaluated(
    run: "Run", folder: Path, split: str, decoding: "Decoding", controls: Mapping[str, str] | None,
    profile: str, stage: str | None,
) -> "Evaluation":  # fmt: skip
    from attune.models.base import DialogueVariant
    from attune.models.published import PROFILES
    from attune.platform.data.dataset_folder import read_samples
    from attune.platform.evaluation.evaluate import evaluate
    from attune.platform.evaluation.profiles import samples_of
    from attune.platform.runs.model import check_labels, load_model

    if stage is not None and stage not in run.stages():
        if not run.stages():
            raise UsageError(f"'{run.name}' has no earlier stages: leave --stage out")
        raise UsageError(unknown_choice("earlier stage", stage, run.stages()))
    model = load_model(run.model if stage is None else run.model_after(stage))
    variant = model.variant
    assert isinstance(variant, DialogueVariant)
    samples = samples_of(profile, read_samples(folder, split))
    if samples.is_empty():
        raise UsageError(f"the split '{split}' of {folder} has no samples: choose another")
    check_labels(variant.requirements_for(variant.config), samples, f"{folder}, {split}")
    with progress("answers") as bar:
        task = bar.add_task(f"{run.name} on {split}", total=samples.height)
        return evaluate(
            variant,
            samples,
            model.columns(samples),
            model.vocabulary,
            decoding,
            progress=lambda done: bar.advance(task, done),
            controls=controls,
            told=PROFILES[profile].tells_truth,
        )


def _of_file(path: Path, measures: "Sequence[Measure]", data: str | None) -> dict[str, Any]:
    from attune.platform.data.prepare import find_data
    from attune.platform.evaluation import answers

    given = answers.read(path)
    metrics, signature = answers.score(given)
    more, definition = _measured(measures, given, find_data(data) if data else None)
    return {
        "run_id": None,
        "split": None,
        "decode": None,
        "answers": str(path),
        "signature": signature + definition,
        "metrics": metrics | more,
    }


def log(run: "Run", result: dict[str, Any], controls: Mapping[str, str] | None = None) -> None:
    """Tell MLflow of it, where the run is tracked."""
    from attune.platform.tracking import log_evaluation

    if run.run_id is None:
        return
    answers = Path(result["answers"])
    decode = "-".join(
        [
            result["decode"] or labels(run) or "",
            *(f"{k}-{v}" for k, v in (controls or {}).items()),
        ]
    )
    log_evaluation(run, result["split"], decode, result["metrics"], answers)


def _file_name(split: str, decoding: "Decoding", others: Mapping[str, str]) -> str:
    """Answers that were made in another way, or to other data, have another name."""
    usual = type(decoding)(method=decoding.method)
    special: dict[str, Any] = {
        key: value for key, value in asdict(decoding).items() if value != getattr(usual, key)
    } | dict(others)
    if not special:
        return f"{split}-{decoding.method}.parquet"
    digest = hashlib.sha256(json.dumps(special, sort_keys=True).encode()).hexdigest()
    return f"{split}-{decoding.method}-{digest[:8]}.parquet"


def _show(screen: Console, result: dict[str, Any], published: Mapping[str, list["Figure"]]) -> None:
    columns = ("metric", "value", "published") if published else ("metric", "value")
    made = table("", *columns, numbers=("value",))
    for metric, value in result["metrics"].items():
        printed = ", ".join(
            f"{shown(metric, each.value)} ({each.paper}, {each.source})"
            for each in published.get(metric, ())
        )
        row = (metric.replace("_", " "), shown(metric, value), printed)
        made.add_row(*row[: len(columns)])
    screen.print(made)
    notes = {each.note for figures in published.values() for each in figures if each.note}
    for note in sorted(notes):
        screen.print(f"published: {note}", style="dim", markup=False)
    screen.print(f"\n{result['signature']}", style="dim", markup=False)
    screen.print(f"answers: {result['answers']}", markup=False)
