"""Files of answers: written by evaluations, and scored from any source.

answer, response                    text or space-separated tokens; tokenized like our data
answer_tokens, response_tokens      optional, used instead of tokenizing
log_likelihood                      optional, of the response with `<eos>`, for perplexity
emotion, predicted_emotion          optional, for emotion accuracy
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from attune.platform.core.errors import DataError, UsageError
from attune.platform.data.files import file_extension, read_file_lines
from attune.platform.evaluation import metrics
from attune.platform.text.tokenizing import tokenize

REQUIRED = ("answer", "response")
MAY_BE_NULL = ("emotion", "predicted_emotion")
ROW = "row"
COLUMNS = {
    "answer": pl.String(),
    "response": pl.String(),
    "answer_tokens": pl.String(),
    "response_tokens": pl.String(),
    "log_likelihood": pl.Float64(),
    "emotion": pl.String(),
    "predicted_emotion": pl.String(),
}
METRICS = (
    "perplexity", "perplexity_sample_mean", "unknown_share", "emotion_accuracy",
    "emotion_accuracy_top2", "emotion_accuracy_top5", "bleu", "distinct_1", "distinct_2",
    "different_answers",
    "parameters",
)  # fmt: skip


def write(answers: pl.DataFrame, path: Path) -> None:
    """Write answers as Parquet, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        answers.write_parquet(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read(path: Path) -> pl.DataFrame:
    """Return the known columns of a Parquet or JSON-lines file, checked."""
    readers: dict[str, Callable[[Path], pl.DataFrame]] = {
        ".parquet": _read_parquet,
        **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json_lines),
    }
    if not path.is_file():
        raise UsageError(f"no such file of answers: '{path}'")
    if file_extension(path) not in readers:
        raise UsageError(f"'{path}': answers are read from .parquet and .jsonl (JSON lines)")
    answers = readers[file_extension(path)](path)
    if answers.is_empty():
        raise DataError(f"{path} holds no answers")
    # A column of nothing but nulls, such as the emotions of a model without any, says nothing.
    silent = [c.name for c in answers if c.name not in REQUIRED and c.null_count() == c.len()]
    answers = answers.drop(silent)
    _check_values(path, answers)
    return answers.drop(ROW)


def score(answers: pl.DataFrame) -> tuple[dict[str, float | None], str]:
    """Return all metrics, None for those whose columns are missing, and their signature."""
    hypotheses, references = tokens(answers, "answer"), tokens(answers, "response")
    bleu, signature = metrics.bleu(hypotheses.to_list(), references.to_list())
    words = [_split(text) for text in hypotheses]
    scores: dict[str, float | None] = {
        **dict.fromkeys(METRICS),
        "bleu": bleu,
        "distinct_1": metrics.distinct(words, 1),
        "distinct_2": metrics.distinct(words, 2),
        "different_answers": len(set(hypotheses)),
    }
    if "log_likelihood" in answers:
        lengths = np.array([len(_split(text)) + 1 for text in references])  # 1 for <eos>
        scores.update(metrics.perplexity(answers["log_likelihood"].to_numpy(), lengths))
    if {"emotion", "predicted_emotion"} <= set(answers.columns):
        labelled = answers.drop_nulls("emotion")  # what was not predicted was not right
        right = (labelled["emotion"] == labelled["predicted_emotion"]).sum()
        scores["emotion_accuracy"] = float(right / labelled.height)
    return scores, signature


def tokens(answers: pl.DataFrame, column: str) -> pl.Series:
    """Return the tokens of a column, or those of its text."""
    token_column = f"{column}_tokens"
    return answers[token_column] if token_column in answers else tokenize(answers[column])


def _split(tokens: str) -> list[str]:
    return tokens.split(" ") if tokens else []


def _check_values(path: Path, answers: pl.DataFrame) -> None:
    for column in answers.drop(ROW, *MAY_BE_NULL, strict=False):
        usable = column.is_not_null()
        if column.dtype.is_float():
            usable &= column.is_finite().fill_null(False)
        if not usable.all():
            row = answers.filter(~usable)[ROW][0]
            raise DataError(f"{path}, row {row}: '{column.name}' is missing or not a number")


def _read_parquet(path: Path) -> pl.DataFrame:
    try:
        answers = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise DataError(f"{path} is not readable as Parquet: {error}") from error
    _check_columns(path, answers.columns)
    present = {column: kind for column, kind in COLUMNS.items() if column in answers}
    for column, kind in present.items():
        dtype = answers.schema[column]
        if dtype not in (kind, pl.Null) and not (kind.is_float() and dtype.is_numeric()):
            raise DataError(f"{path}: column '{column}' is {dtype}, where {kind} is expected")
    known = answers.select(pl.col(column).cast(kind) for column, kind in present.items())
    return known.with_row_index(ROW, offset=1)


def _read_json_lines(path: Path) -> pl.DataFrame:
    rows: list[dict[str, Any]] = []
    for piece in read_file_lines(path):
        for number, line, problem, _ in piece.iter_rows():
            if problem:
                raise DataError(f"{path}, row {number}: {problem}")
            if line.strip():
                rows.append({**_parse_row(f"{path}, row {number}", line), ROW: number})
    present = [column for column in COLUMNS if any(column in row for row in rows)]
    _check_columns(path, present)
    schema = {ROW: pl.Int64(), **{column: COLUMNS[column] for column in present}}
    return pl.DataFrame([{column: row.get(column) for column in schema} for row in rows], schema)


def _parse_row(place: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise DataError(f"{place}: not readable as JSON: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a line must be a JSON object")
    for column, kind in COLUMNS.items():
        value = row.get(column)
        expected = (int, float) if kind.is_float() else (str,)
        if value is not None and (isinstance(value, bool) or not isinstance(value, expected)):
            what = "a number" if kind.is_float() else "text"
            raise DataError(f"{place}: '{column}' must be {what}")
    return row


def _check_columns(path: Path, present: list[str]) -> None:
    for column in REQUIRED:
        if column not in present:
            listed = ", ".join(present) or "none that is known"
            raise DataError(f"{path}: column '{column}' is missing; it has {listed}")
