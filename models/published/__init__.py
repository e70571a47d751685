"""Published results on EmpatheticDialogues, one JSON file per paper.

Values are in Attune's units (accuracies and distinct-n as fractions), under the name of the metric
that they are comparable with; a paper's perplexity is a mean over samples. Printed values are
copied without correction; a note points out misprints.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published value."""

    variant: str
    metric: str
    value: float
    paper: str
    """The paper that published it, not necessarily the paper that proposed the system."""
    source: str
    """The table or section of the paper."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The conditions under which results are measured, which some papers chose differently."""

    help: str
    drops_last_turns: bool = False
    """Leave out the last listener turn of each conversation."""
    uses_true_labels: bool = False
    """Compute perplexity with the true labels that the model otherwise predicts."""


PROFILES = {
    "attune": Profile(help="all samples of a split"),
    "empdg": Profile(
        help="EmpDG's 2,713 test samples, without the last listener turn of each conversation",
        drops_last_turns=True,
    ),
    "meed2": Profile(
        help="perplexity with the true label of the response, very likely as in MEED2",
        uses_true_labels=True,
    ),
}


def find_figures(variant: str, metric: str) -> list[Figure]:
    """Return the published values of a metric of a variant."""
    return [each for each in figures() if (each.variant, each.metric) == (variant, metric)]


@cache
def figures() -> tuple[Figure, ...]:
    """Return all published values."""
    return tuple(_read_published())


def _read_published() -> Iterator[Figure]:
    """Yield the values of all files, sorted by file name."""
    files = [path for path in resources.files(__name__).iterdir() if path.name.endswith(".json")]
    for path in sorted(files, key=lambda path: path.name):
        content = json.loads(path.read_text(encoding="utf-8"))
        for table in content["tables"]:
            for variant, row in table["rows"].items():
                for metric, value in row.items():
                    yield Figure(
                        variant=variant,
                        metric=metric,
                        value=value,
                        paper=content["paper"],
                        source=table["source"],
                        note=table.get("note", ""),
                    )
