"""Tables for people, and numbers as people read them."""

from rich.table import Table

_FRACTIONS = (
    "accuracy", "f1", "distinct", "share", "precision", "recall", "agreement", "calibration_error",
)  # fmt: skip
"""What a metric's name holds where its value is a fraction, which people read as per cent."""


def table(title: str = "", *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An airy table; the columns named in `numbers` stand to the right."""
    rendered = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for column in columns:
        rendered.add_column(column, justify="right" if column in numbers else "left")
    return rendered


def format_metric(metric: str, value: float | None) -> str:
    """A metric's value with its unit, `-` where it does not apply."""
    if value is None:
        return "-"
    if any(part in metric for part in _FRACTIONS):
        return f"{value:.2%}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if "loss" in metric else f"{value:.2f}"
