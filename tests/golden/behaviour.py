"""What a variant computes: losses and gradient norms of its first steps, then greedy answers.

A plain loop in one process, on one thread, without Ray or DeepSpeed. It follows the variant's own
stages as the training loop does, except that a stage continues with the weights that the stage
before left instead of the best ones.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attune.models import all_variants
from attune.models.base import DialogueVariant, Progress
from attune.models.decoding import Decoding
from attune.platform.batching.streams import Stream
from attune.platform.core.settings import find_variant
from attune.platform.evaluation.evaluate import answer, score
from attune.platform.runs.model import read_model_split
from attune.platform.training import setup
from attune.platform.training.data import load_training_streams
from attune.platform.training.updates import train_only_updated, update_loss
from tests.golden.preparation import DIALOGUES, ENCODER, INTENTS, RECCON

FOLDER = Path(__file__).parent / "behaviour"
STEPS = 3
SAMPLES = 10
RELATIVE = 1e-4
ABSOLUTE = 1e-5
"""For differences of larger numbers, such as a policy's advantage: vector instructions of another
processor change them by up to 3e-6."""
LINE = 150
NAMES = ("name", "player")
"""Keys whose values are for readers and are not compared."""
DECODING = Decoding(block_ngrams=2)
"""Greedy without repeated n-grams; barely trained models would repeat one word to the end."""
SETTINGS = {"precision": "fp32", "batch_size": 8}
NOISE = {"dropout": 0.1, "word_dropout": 0.2}
"""Settings for variants that have them; random draws are part of the behaviour."""
OTHER_SOURCES = {
    "cause-annotator-reccon": ("cause-annotator", RECCON),
    "intent-classifier-intents": ("intent-classifier", INTENTS),
}
"""Variants that are also recorded on data with other streams."""


def names() -> list[str]:
    """Return every variant and ablation, and the names of those recorded on another source too."""
    return [*all_variants(), *OTHER_SOURCES]


def path_of(name: str) -> Path:
    """Return the file in which the behaviour of a name is recorded."""
    return FOLDER / f"{name}.json"


def settings_for(variant: str, folder: Path) -> dict[str, Any]:
    """Return the settings to train a variant with on the corpus prepared in `folder`."""
    kind, _ = find_variant(variant)
    fields = {field.name for field in dataclasses.fields(kind.Config)}
    noise = {name: value for name, value in NOISE.items() if name in fields}
    encoder = (
        {kind.requirements.encoder: str(folder / ENCODER)} if kind.requirements.encoder else {}
    )
    return {**SETTINGS, **noise, **encoder}


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Train a variant on the corpus prepared in `folder`, a few steps a stage, and let it answer.

    ATTUNE_HOME must name a folder where no run of that name exists.
    """
    variant_name, source = OTHER_SOURCES.get(name, (name, DIALOGUES))
    run = setup.new_run(
        variant_name,
        data=str(folder / source),
        preset="tiny",
        overrides=settings_for(variant_name, folder),
        name=name,
    )
    model = setup.set_up_run_model(run)
    data, _ = load_training_streams(run, model)
    streams = {stream: Stream(columns, size=8) for stream, columns in data.items()}
    variant = model.variant
    variant.train()
    measures: dict[str, Any] = {
        "stages": [
            {"name": stage.name, "steps": _train(variant, stage, number, streams)}
            for number, stage in enumerate(variant.stages())
        ]
    }
    columns = model.columns(read_model_split(variant, folder / source, "test").head(SAMPLES))
    measures["scores"] = _scores(variant, columns)
    if isinstance(variant, DialogueVariant):
        tokens = answer(variant, columns, DECODING)
        measures["answers"] = [" ".join(model.vocabulary.decode(row)) for row in tokens]
    return measures


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Return a line for each difference between two recordings; values are compared by position."""
    lines = []
    for (place, before), (_, now) in itertools.zip_longest(
        _places(expected), _places(actual), fillvalue=("", None)
    ):
        numbers = isinstance(before, float) and isinstance(now, float)
        if before != now and not (numbers and _close(before, now)):
            lines.append(f"{place or 'added'}: recorded {before!r}, now {now!r}")
    return lines


def text_of(measures: Any, indent: str = "") -> str:
    """Return JSON that people can read and compare: short values are on one line."""
    line = json.dumps(measures)
    if len(indent) + len(line) <= LINE or not isinstance(measures, dict | list):
        return line
    inner = f"{indent} "
    if isinstance(measures, list):
        parts = [text_of(value, inner) for value in measures]
    else:
        parts = [f"{json.dumps(key)}: {text_of(each, inner)}" for key, each in measures.items()]
    body = ",\n".join(f"{inner}{part}" for part in parts)
    return "\n".join(
        ("[{"[isinstance(measures, dict)], body, indent + "]}"[isinstance(measures, dict)])
    )


def _places(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each number and answer with its path in the recording."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            if key not in NAMES:
                yield from _places(part, f"{place}/{key}")
        yield f"{place}/end", None  # so that a missing value does not shift those behind it
    else:
        yield place, value


def _close(before: float, now: float) -> bool:
    return math.isclose(before, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def _train(variant, stage, number, streams):
    """Yield each step of a stage as a list of its updates."""
    parameters = {
        player: list(
            {id(p): p for part in parts for p in getattr(variant, part).parameters()}.values()
        )
        for player, parts in stage.players.items()
    }
    optimizers = {player: torch.optim.Adam(own, lr=1e-3) for player, own in parameters.items()}
    batches = {name: streams[name].batches() for name in stage.streams}
    steps = []
    for step in range(STEPS):
        torch.manual_seed(100 * number + step)
        progress = Progress(step=step, fraction=step / STEPS)
        updates = []
        for update in stage.updates:
            for _ in range(update.repeat):
                batch = {name: next(each).batch for name, each in batches.items()}
                with train_only_updated(variant, stage.players[update.player]):
                    terms = getattr(variant, update.losses)(batch, progress)
                    optimizers[update.player].zero_grad()
                    update_loss(update, terms).backward()
                norm = torch.nn.utils.clip_grad_norm_(parameters[update.player], math.inf)
                optimizers[update.player].step()
                updates.append(
                    {
                        "player": update.player,
                        "terms": {term: _round(value) for term, value in terms.items()},
                        "gradient_norm": _round(norm),
                    }
                )
        steps.append(updates)
    for iterator in batches.values():
        iterator.close()
    return steps


def _scores(variant, columns):
    """Return by sample the log-likelihood of the response, with and without the true labels, and
    the highest log-probability of each prediction."""
    scores = {}
    if isinstance(variant, DialogueVariant):
        oracle = score(variant, columns, oracle=True)["log_likelihood"]
        scores["oracle_log_likelihood"] = oracle.tolist()
    for name, values in score(variant, columns).items():
        scores[name] = (values if values.ndim == 1 else values.max(axis=1)).tolist()
    return {name: [float(f"{value:.8g}") for value in values] for name, values in scores.items()}


def _round(value: torch.Tensor) -> float:
    return float(f"{value.item():.8g}")
