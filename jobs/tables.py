"""Tables and formatted numbers for people."""

from rich.table import Table

_FRACTIONS = (
    "accuracy", "f1", "distinct", "share", "precision", "recall", "agreement", "calibration_error",
)  # fmt: skip
"""Parts of the names of metrics that are fractions; people see them as percentages."""


def table(title: str = "", *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without lines; the columns named in `numbers` are right-aligned."""
    rendered = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for column in columns:
        rendered.add_column(column, justify="right" if column in numbers else "left")
    return rendered


def format_table_metric(metric: str, value: float | None) -> str:
    """Format the value of a metric with its unit; `-` where it does not apply."""
    if value is None:
        return "-"
    if any(part in metric for part in _FRACTIONS):
        return f"{value:.2%}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if "loss" in metric else f"{value:.2f}"
