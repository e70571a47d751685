"""`attune show`: what a paper shows of its own model, drawn or printed from runs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attune.jobs import options
from attune.jobs.console import Json, console, print_json, progress
from attune.jobs.tables import table
from attune.platform.core.errors import UsageError, unknown_choice

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attune.models.mime import Mime
    from attune.platform.enrichment.calibration import Reliability
    from attune.platform.runs.record import Run

app = typer.Typer(no_args_is_help=True, help="Show what papers show of their own models.")
COLORS = {"positive": "tab:orange", "negative": "tab:blue"}
SHOWN_TURN = 60
PICTURES = (".png", ".svg", ".pdf")


@app.command()
def embeddings(
    names: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Runs of MIME, with and without mimicry, say."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("emotion-embeddings.png"),
    as_json: Json = False,
) -> None:
    """Draw the emotions' embeddings of MIME's runs side by side (Figure 3 of its paper).

    Two principal components, coloured by group. The separation is the mean silhouette of the two
    groups in the full space: 1 where they lie apart, 0 where they mix. Picture and separation are
    logged to each run.

    Examples:

    - `attune show embeddings mime@latest mime-no-mimicry@latest --out figure-3.png`
    """
    from sklearn.metrics import silhouette_score

    _check_picture(out)
    runs = [options.trained_run(name) for name in names]
    found = [(run, _mime(run)) for run in runs]
    figure = _figure(5 * len(found), 4.2)
    drawn: list[dict[str, Any]] = []
    for axes, (run, variant) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found, strict=True
    ):
        points = variant.emotions.weight.detach().numpy()
        groups = _groups(variant)
        separation = float(silhouette_score(points, groups))
        _draw(axes, points, groups, variant.data_info.emotions)
        axes.set_title(f"{run.name} ({run.variant})\nseparation {separation:.3f}")
        drawn.append({"run": run.name, "variant": run.variant, "separation": separation})
    figure.axes[0].legend(frameon=False)
    separations = ({"emotion_separation": one["separation"]} for one in drawn)
    _keep(figure, out, zip(runs, separations, strict=True))
    screen = console(as_json)
    for one in drawn:
        screen.print(f"{one['run']}: separation {one['separation']:.3f}", markup=False)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        print_json({"picture": str(out), "runs": drawn})


@app.command()
def stochasticity(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run of MIME.")],
    count: Annotated[int, typer.Option(min=1, help="Contexts to answer.")] = 8,
    seed: Annotated[int, typer.Option(min=0, max=99, help="Of the contexts and samples.")] = 0,
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="Where from.")] = "test",
    as_json: Json = False,
) -> None:
    """Print answers with and without stochasticity side by side (Table 7 of MIME's paper).

    Without, the response's emotion is the one at the latent's mean; with, it is sampled, each
    context from a seed of its own.

    Examples:

    - `attune show stochasticity mime@latest`
    - `attune show stochasticity mime@latest --count 20 --seed 3 --json`
    """
    from attune.platform.serving.responder import Responder

    run = options.trained_run(name)
    _mime(run)
    contexts = some_samples(run, split, count, seed)["context"].to_list()
    responder, chosen = Responder(run.model), {"seed": str(seed)}
    said: dict[str, list[str]] = {}
    with progress("answers") as bar:
        for switch in bar.track(("off", "on"), description="answering"):
            controls = {**chosen, "stochasticity": switch}
            said[switch] = [a.text for a in responder.respond(contexts, controls=controls)]
    made = table("", "the speaker's last turn", "without stochasticity", "with")
    for context, off, on in zip(contexts, said["off"], said["on"], strict=True):
        made.add_row(context[-1][:SHOWN_TURN], off, on)
    differ = sum(off != on for off, on in zip(said["off"], said["on"], strict=True))
    screen = console(as_json)
    screen.print(made)
    screen.print(f"\n{differ} of {len(contexts)} answers differ")
    if as_json:
        rows = zip(contexts, said["off"], said["on"], strict=True)
        answers = [{"context": c, "without": off, "with": on} for c, off, on in rows]
        print_json({"run": run.name, "answers": answers, "differing": differ / len(contexts)})


@app.command()
def attention(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run of EmpDG.")],
    context: Annotated[
        list[str],
        typer.Option(metavar="TEXT", help="A turn of the conversation; give one for each."),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("attention.png"),
    as_json: Json = False,
) -> None:
    """Draw what each word of an answer looks at, in the context and in its emotion words (Table 4
    of EmpDG's paper), and log it to the run.

    Examples:

    - `attune show attention empdg@latest --context "I got a new job!" --out table-4.png`
    """
    from attune.platform.serving.responder import Responder

    _check_picture(out)
    run = options.trained_run(name)
    [answer] = Responder(run.model).respond([context])
    explanation = answer.explanation
    if explanation.attention is None:
        raise UsageError(f"'{run.name}' is a {run.variant}: a run of empdg is expected")
    looked_at = {"context": explanation.words, "emotion words": explanation.emotion_words}
    maps = {title: (looked_at[title] or (), rows) for title, rows in explanation.attention.items()}
    said = explanation.answer_words or ()
    columns = [max(len(words), 1) for words, _ in maps.values()]
    figure = _figure(0.24 * (sum(columns) + 14), 0.24 * (len(said) + 10))
    drawn = figure.subplots(1, len(maps), squeeze=False, width_ratios=columns)[0]
    for axes, (title, (words, rows)) in zip(drawn, maps.items(), strict=True):
        axes.imshow([list(row) for row in rows] or [[0.0]], aspect="auto", cmap="Oranges", vmin=0)
        axes.set_xticks(range(len(words)), words, rotation=90)
        axes.set_yticks(range(len(said)), said)
        axes.set_title(title)
    _keep(figure, out, [(run, {})])
    screen = console(as_json)
    screen.print(f"{run.name}: {answer.text}", markup=False)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        explained = dataclasses.asdict(explanation)
        print_json({"picture": str(out), "answer": answer.text, "explanation": explained})


@app.command()
def critics(
    name: Annotated[str, typer.Argument(metavar="RUN", help="A run of EmpDG with its critics.")],
    count: Annotated[int, typer.Option(min=1, help="Contexts to answer.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the contexts.")] = 0,
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="Where from.")] = "test",
    as_json: Json = False,
) -> None:
    """Print what EmpDG's critics give its answers, and people's, where the speaker goes on.

    A score means something only beside another of the same critic and context.

    Examples:

    - `attune show critics empdg@latest --count 20`
    """
    import polars as pl

    from attune.platform.serving.responder import Responder

    run = options.trained_run(name)
    responder = Responder(run.model)
    samples = some_samples(run, split, count, seed, pl.col("next_turn").is_not_null())
    rows = responder.judged(samples)
    if not rows[0]["scores"]:
        raise UsageError(f"'{run.name}' is a {run.variant}: a run of empdg with critics is needed")
    screen = console(as_json)
    names = tuple(rows[0]["scores"])
    made = table("", "the speaker's last turn", "by", "response", *names, numbers=names)
    for row in rows:
        last = row["context"][-1][:SHOWN_TURN]
        person = (f"{row['person_scores'][each]:.2f}" for each in names)
        made.add_row(last, "a person", row["response"], *person)
        made.add_row("", run.name, row["answer"], *(f"{row['scores'][each]:.2f}" for each in names))
    screen.print(made)
    if as_json:
        print_json({"run": run.name, "answers": rows})


@app.command()
def calibration(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run of `emotion-classifier` or `intent-classifier`."),
    ],
    split: Annotated[
        str, typer.Option(metavar="train|valid|test", help="Of which texts.")
    ] = "test",
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("calibration.png"),
    as_json: Json = False,
) -> None:
    """Draw how often a classifier is right against how sure it is (a reliability diagram).

    For each kind of text that it learns from, as it comes and scaled by the temperature that was
    fitted on valid: the nearer to the diagonal, the more a threshold on its probabilities means.
    Picture and calibration errors are logged to the run.

    Examples:

    - `attune show calibration emotion-classifier@latest --out calibration.png`
    """
    from attune.platform.enrichment import calibration
    from attune.platform.enrichment.classifier import (
        classify_texts,
        fit_temperatures,
        require_classifier,
        with_known_emotion,
    )
    from attune.platform.runs.model import load_model

    _check_picture(out)
    run = options.trained_run(name)
    model = load_model(run.model)
    variant = require_classifier(model)
    samples, truth = with_known_emotion(_samples(run, split), variant.data_info.emotions)
    if samples.is_empty():
        raise UsageError(f"no sample of '{split}' has an emotion: choose another")
    figure = _figure(4.2 * len(variant.learns), 4)
    errors: dict[str, float] = {}
    drawn = figure.subplots(1, len(variant.learns), sharey=True, squeeze=False)[0]
    for axes, kind in zip(drawn, variant.learns, strict=True):
        raw = classify_texts(model, samples, kind)
        temperature = fit_temperatures(run)[kind]
        before = calibration.reliability(raw, truth)
        after = calibration.reliability(calibration.scaled(raw, temperature), truth)
        _draw_reliability(axes, {"as it comes": before, f"at temperature {temperature:.2f}": after})
        axes.set(title=f"{kind}s of {split}", xlabel="probability of the likeliest emotion")
        errors |= {f"{kind}_uncalibrated": before.error, f"{kind}_calibrated": after.error}
    figure.axes[0].set(ylabel="share that is right")
    _keep(figure, out, [(run, {f"calibration_error_{each}": e for each, e in errors.items()})])
    screen = console(as_json)
    for each, error in errors.items():
        screen.print(f"{each.replace('_', ', ')}: calibration error {error:.2%}", markup=False)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        print_json({"picture": str(out), "run": run.name, "calibration_error": errors})


def _draw_reliability(axes: "Axes", found: "Mapping[str, Reliability]") -> None:
    for (label, one), color in zip(found.items(), COLORS.values(), strict=True):
        error = f"{label}: {one.error:.1%}"
        axes.plot(one.confidence, one.accuracy, ".-", color=color, label=error)
    axes.plot([0, 1], [0, 1], ":", color="gray", linewidth=1)
    axes.legend(frameon=False, title="calibration error")


@app.command()
def emotions(
    first: Annotated[str, typer.Argument(metavar="RUN_A", help="A run that predicts emotions.")],
    second: Annotated[str, typer.Argument(metavar="RUN_B", help="Another, on the same data.")],
    split: Annotated[str, typer.Option(metavar="train|valid|test", help="Of what.")] = "test",
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("emotions.png"),
    as_json: Json = False,
) -> None:
    """Draw and print how often two runs are right about each emotion (Figure 4 of Dual-Emp's).

    The spread is the standard deviation of the accuracy over the emotions: the paper finds that its
    better model is also more even. What `attune evaluate` has predicted is used where it is there.
    The picture is logged to both runs.

    Examples:

    - `attune show emotions sing-emp-paired@latest dual-emp-paired@latest --out figure-4.png`
    """
    from attune.platform.evaluation.emotion_metrics import by_emotion

    _check_picture(out)
    runs = [options.trained_run(name) for name in (first, second)]
    one, other = (by_emotion(_predictions(run, split)) for run in runs)
    if not one.select("emotion", "samples").equals(other.select("emotion", "samples")):
        raise UsageError(
            f"'{first}' and '{second}' have other samples in {split}: name runs on the same data"
        )
    accuracies = (one["accuracy"].to_numpy(), other["accuracy"].to_numpy())
    counts = one["samples"].to_numpy()
    drawn: list[dict[str, Any]] = [
        {
            "run": run.name,
            "variant": run.variant,
            "accuracy": float(values @ counts / counts.sum()),
            "spread": float(values.std()),
        }
        for run, values in zip(runs, accuracies, strict=True)
    ]
    figure = _figure(9, 3.4)
    _draw_accuracies(figure.subplots(), one["emotion"].to_list(), accuracies, drawn)
    figure.axes[0].set(ylabel=f"accuracy on {split}")
    spreads = ({"emotion_accuracy_spread": each["spread"]} for each in drawn)
    _keep(figure, out, zip(runs, spreads, strict=True))
    rows = list(zip(one["emotion"], one["samples"], *map(list, accuracies), strict=True))
    numbers = ("samples", *(run.name for run in runs), "difference")
    made = table("", "emotion", *numbers, numbers=numbers)
    for emotion, samples, own, its in rows:
        made.add_row(emotion, f"{samples:,}", f"{own:.1%}", f"{its:.1%}", f"{its - own:+.1%}")
    screen = console(as_json)
    screen.print(made)
    for summary in drawn:
        line = "{run}: accuracy {accuracy:.2%}, spread over emotions {spread:.2%}"
        screen.print(line.format(**summary), markup=False)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        names = ("emotion", "samples", "first", "second")
        by_name = [dict(zip(names, row, strict=True)) for row in rows]
        print_json({"picture": str(out), "runs": drawn, "emotions": by_name})


@app.command()
def labels(
    data: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder made by `annotate emotions`.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture: a .png, .svg or .pdf.")
    ] = Path("labels.png"),
    as_json: Json = False,
) -> None:
    """Draw which emotions and intents end the dialogs of a corpus (Figure 2 of MEED2's paper).

    Each dialog counts with the likeliest label of its last utterance. Beside it stands how
    emotional the dialogs are.

    Examples:

    - `attune show labels data/os-emotional --out figure-2.png`
    """
    from attune.platform.data.labels import EMOTIONS, LABELS
    from attune.platform.enrichment.filters import label_distribution, read_emotionality

    _check_picture(out)
    dialogs = read_emotionality(data)
    shares = label_distribution(dialogs, list(LABELS))
    figure = _figure(11, 3.4)
    by_label, by_dialog = figure.subplots(1, 2, width_ratios=(3, 1))
    colors = [COLORS["positive" if label in EMOTIONS else "negative"] for label in shares]
    by_label.bar(range(len(shares)), list(shares.values()), color=colors)
    by_label.set_xticks(range(len(shares)), list(shares), rotation=90)
    by_label.margins(x=0.01)
    by_label.set(ylabel="share of dialogs", title="label of the last utterance")
    by_dialog.hist(dialogs["emotionality"].to_numpy(), bins=20, range=(0, 1), color="gray")
    by_dialog.set(xlabel="emotionality", ylabel="dialogs")
    _keep(figure, out, [])
    made = table("", "label", "share", numbers=("share",))
    for label, share in sorted(shares.items(), key=lambda item: -item[1]):
        made.add_row(label, f"{share:.2%}")
    screen = console(as_json)
    screen.print(made)
    screen.print(f"drawn: {out}", markup=False)
    if as_json:
        print_json({"picture": str(out), "dialogs": dialogs.height, "labels": shares})


def _draw_accuracies(
    axes: "Axes",
    emotions: list[str],
    accuracies: "Sequence[np.ndarray[Any, Any]]",
    runs: list[dict[str, Any]],
) -> None:
    """For each emotion a bar of each of two runs."""
    edges = zip(runs, accuracies, COLORS.values(), (-0.4, 0.0), strict=True)
    for run, values, color, edge in edges:
        places = [place + edge for place in range(len(values))]
        label = f"{run['run']}: {run['accuracy']:.1%}, spread {run['spread']:.1%}"
        axes.bar(places, values, width=0.4, align="edge", color=color, label=label)
    axes.set_xticks(range(len(emotions)), emotions, rotation=90)
    axes.margins(x=0.01)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _predictions(run: "Run", split: str) -> "pl.DataFrame":
    """`emotion` and `predicted_emotion` of a split: kept by `attune evaluate`, else made."""
    import polars as pl

    from attune.platform.evaluation.emotion_metrics import predicted
    from attune.platform.runs.model import MODEL_WEIGHTS, load_model

    for kind in ("greedy", "emotions"):
        kept = run.folder / "answers" / f"{split}-{kind}.parquet"
        if kept.is_file() and kept.stat().st_mtime > (run.model / MODEL_WEIGHTS).stat().st_mtime:
            found = pl.read_parquet(kept, columns=["emotion", "predicted_emotion"])
            if found["predicted_emotion"].count():
                return found
    return predicted(load_model(run.model), _samples(run, split))


def _check_picture(out: Path) -> None:
    if out.suffix not in PICTURES:
        raise UsageError(f"--out {out}: a file that ends in {', '.join(PICTURES)} is expected")


def _figure(width: float, height: float) -> "Figure":
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    return Figure(figsize=(width, height), layout="constrained")


def _keep(figure: "Figure", out: Path, shown: "Iterable[tuple[Run, Mapping[str, float]]]") -> None:
    """Save a picture, and add it to the runs that are tracked, with what it shows in numbers."""
    from attune.platform.tracking import log_picture

    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    for run, metrics in shown:
        if run.run_id is not None:
            log_picture(run, out, metrics)


def some_samples(
    run: "Run", split: str, count: int | None, seed: int, wanted: "pl.Expr | bool" = True
) -> "pl.DataFrame":
    """Some samples of what a run learned from, drawn by a seed; or all."""
    samples = _samples(run, split).filter(wanted)
    if samples.is_empty():
        raise UsageError(f"the split '{split}' has no such samples: choose another")
    return samples.sample(min(count or samples.height, samples.height), seed=seed)


def _samples(run: "Run", split: str) -> "pl.DataFrame":
    """A split of what a run learned from."""
    from attune.platform.core.settings import find_variant
    from attune.platform.data.conversations import SPLITS
    from attune.platform.data.prepare import find_data
    from attune.platform.runs.model import read_split

    if split not in SPLITS:
        raise UsageError(unknown_choice("split", split, SPLITS))
    return read_split(find_variant(run.variant)[0], find_data(run.data["folder"]), split)


def _mime(run: "Run") -> "Mime":
    from attune.models.mime import Mime
    from attune.platform.runs.model import load_model

    variant = load_model(run.model).variant
    if not isinstance(variant, Mime):
        raise UsageError(f"'{run.name}' is a {run.variant}: a run of mime is expected")
    return variant


def _groups(variant: "Mime") -> list[str]:
    """The group of each emotion, also where the run was trained without groups."""
    from attune.models.mime import groups_of

    config = dataclasses.replace(variant.config, grouping=True)
    groups = groups_of(config, variant.data_info.emotions)
    of_emotion = {number: name for name, members in groups.items() for number in members}
    return [of_emotion[number] for number in range(len(variant.data_info.emotions))]


def _draw(axes: "Axes", points: "np.ndarray[Any, Any]", groups: list[str], names: Any) -> None:
    from sklearn.decomposition import PCA

    reduced = PCA(n_components=2, svd_solver="full").fit(points)
    flat = reduced.transform(points)
    for group, color in COLORS.items():
        of_group = [number for number, name in enumerate(groups) if name == group]
        axes.scatter(flat[of_group, 0], flat[of_group, 1], s=14, color=color, label=group)
        for number in of_group:
            axes.annotate(
                names[number], flat[number], xytext=(3, 2), textcoords="offset points", fontsize=6.5
            )
    explained = reduced.explained_variance_ratio_
    axes.set(xlabel=f"first component, {explained[0]:.0%}", ylabel=f"second, {explained[1]:.0%}")
