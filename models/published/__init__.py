"""What papers print of these systems on EmpatheticDialogues, one file for each paper that does.

Figures are in our units (accuracies and distinct-n as fractions) under the name of the metric they
may stand beside; a paper's perplexity is a mean over samples. What is printed is kept, slips too,
with a note.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One printed number."""

    variant: str
    metric: str
    value: float
    paper: str
    """Who printed it, which need not be who proposed the system."""
    source: str
    """Where in the paper."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How somebody's figures were measured, where that is not our way."""

    help: str
    drops_last_turns: bool = False
    """Leaves out the last listener turn of each conversation."""
    tells_truth: bool = False
    """Perplexity is that of a model which is told what it otherwise has to predict."""


PROFILES = {
    "attune": Profile(help="all samples of a split"),
    "empdg": Profile(
        help="EmpDG's 2,713 test samples: no conversation's last listener turn",
        drops_last_turns=True,
    ),
    "meed2": Profile(
        help="MEED2's perplexity, very likely: the true label is told",
        tells_truth=True,
    ),
}


def find_figures(variant: str, metric: str) -> list[Figure]:
    """Return the published values of a metric of a variant."""
    return [each for each in figures() if (each.variant, each.metric) == (variant, metric)]


@cache
def figures() -> tuple[Figure, ...]:
    """Everything, paper by paper."""
    return tuple(_read_published())


def _read_published() -> Iterator[Figure]:
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
