"""Curation: subtitle lines per second with one worker and with two, in alternation."""

import json
import random
import statistics
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import polars as pl
from rich.console import Console

from attune.jobs.bench.command import run_attune_command
from attune.platform.data.conversations import LISTENER, SPEAKER
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.text.tokenizing import punkt_sentences

FILES, LINES = 512, 600
"""Number of synthetic films and of lines per film."""
TURNS = 3
WORKERS = (1, 2)
CORPUS = 441_000_000
"""Number of lines in OpenSubtitles 2018."""


def measure_curation(data: Path, folder: Path) -> dict[str, Any]:
    """Return the speed that the command reports on subtitles made of shuffled corpus sentences."""
    home = folder / "curation"
    home.mkdir()
    dialogues = (
        read_dataset_samples(data, "train").group_by("conversation_id", maintain_order=True).last()
    )
    turns = home / "turns.json"
    labelled = _write_benchmark_turns(dialogues, home)
    run_attune_command(home, "data", "turns", "--source", str(labelled), "--out", str(turns))
    lines = [line for text in dialogues["context"].explode() for line in punkt_sentences(text)]
    films = _write_benchmark_subtitles(lines, home / "films")
    results: dict[str, list[dict[str, Any]]] = {str(workers): [] for workers in WORKERS}
    for turn in range(TURNS):
        for workers in WORKERS:
            out = home / f"{turn}-{workers}"
            result = run_attune_command(
                home, "data", "curate", "--source", str(films), "--turns", str(turns),
                "--workers", str(workers), "--out", str(out),
            )  # fmt: skip
            results[str(workers)].append(result)
    hashes = {each["hash"] for runs in results.values() for each in runs}
    assert len(hashes) == 1, "the number of workers changed the curated data"
    return {workers: [each["speed"] for each in runs] for workers, runs in results.items()}


def _write_benchmark_turns(dialogues: pl.DataFrame, folder: Path) -> Path:
    """Write complete conversations with known speakers, to train the turn classifier."""
    path = folder / "known.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for name, texts, response in dialogues.select(
            "conversation_id", "context", "response"
        ).iter_rows():
            turns = [
                {"role": role, "speaker": role, "text": text}
                for role, text in zip(cycle((SPEAKER, LISTENER)), [*texts, response], strict=False)
            ]
            file.write(json.dumps({"id": name, "utterances": turns}) + "\n")
    return path


def _write_benchmark_subtitles(lines: Sequence[str], folder: Path) -> Path:
    """Write films in the format of OPUS: random lines of two seconds, with occasional pauses."""
    draw = random.Random(0)
    for number in range(FILES):
        film = folder / str(number)
        film.mkdir(parents=True)
        clock, rows = 0.0, []
        for place in range(LINES):
            start = clock + (10.0 if draw.random() < 0.1 else 0.2)
            clock = start + 2.0
            rows.append(
                f'<s id="{place}"><time id="T{place}S" value="{_format_benchmark_clock(start)}" />'
                f"{escape(draw.choice(lines))}"
                f'<time id="T{place}E" value="{_format_benchmark_clock(clock)}" /></s>'
            )
        text = f'<?xml version="1.0" encoding="utf-8"?>\n<document>{"".join(rows)}</document>'
        (film / "1.xml").write_text(text, encoding="utf-8")
    return folder


def _format_benchmark_clock(seconds: float) -> str:
    whole, hundredths = divmod(round(seconds * 100), 100)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d},{hundredths:02d}0"


def print_curation_speed(screen: Console, results: dict[str, Any]) -> None:
    """Print the speeds, and their ratio in each turn."""
    speeds = {
        workers: statistics.median(each["lines_per_second"] for each in turns)
        for workers, turns in results.items()
    }
    ratios = [
        two["lines_per_second"] / one["lines_per_second"]
        for one, two in zip(*results.values(), strict=True)
    ]
    core = statistics.median(
        each["lines_per_second_per_core"] for turns in results.values() for each in turns
    )
    screen.print(
        f"\ncurating {FILES * LINES:,} lines: "
        + ", ".join(f"{speed:,.0f} per second with {n} workers" for n, speed in speeds.items())
        + f"; two are {', '.join(f'{ratio:.2f}' for ratio in ratios)} times as fast as one; "
        f"{core:,.0f} per second of CPU time, so {CORPUS / core / 3600:.1f} CPU hours for the "
        f"{CORPUS / 1e6:.0f} million lines of OpenSubtitles"
    )
