"""`attune show`: what a paper shows of its own model, drawn or printed from runs."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attune.jobs import options
from attune.jobs.console import Json, console, print_json, progress
from attune.jobs.tables import table
from attune.platform.errors import UsageError, unknown

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

    from attune.models.mime import Mime
    from attune.platform.store import Run

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
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from sklearn.metrics import silhouette_score

    from attune.platform.tracking import log_picture

    if out.suffix not in PICTURES:
        raise UsageError(f"--out {out}: a file that ends in {', '.join(PICTURES)} is expected")
    runs = [options.trained_run(name) for name in names]
    found = [(run, _mime(run)) for run in runs]
    mpl.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(5 * len(found), 4.2), layout="constrained")
    drawn: list[dict[str, Any]] = []
    for axes, (run, variant) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found, strict=True
    ):
        points = variant.emotions.weight.detach().numpy()
        groups = _groups(variant)
        separation = float(silhouette_score(points, groups))
        _draw(axes, points, groups, variant.facts.emotions)
        axes.set_title(f"{run.name} ({run.variant})\nseparation {separation:.3f}")
        drawn.append({"run": run.name, "variant": run.variant, "separation": separation})
    figure.axes[0].legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    for (run, _), one in zip(found, drawn, strict=True):
        if run.run_id is not None:
            log_picture(run, out, {"emotion_separation": one["separation"]})
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
    from attune.platform.corpora.conversations import SPLITS
    from attune.platform.corpora.prepare import find_data, read_samples
    from attune.platform.serving import Responder

    if split not in SPLITS:
        raise UsageError(unknown("split", split, SPLITS))
    run = options.trained_run(name)
    _mime(run)
    samples = read_samples(find_data(run.data["folder"]), split)
    if samples.is_empty():
        raise UsageError(f"the split '{split}' has no samples: choose another")
    contexts = samples.sample(min(count, samples.height), seed=seed)["context"].to_list()
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


def _mime(run: "Run") -> "Mime":
    from attune.models.mime import Mime
    from attune.platform import runs

    variant = runs.load(run.model).variant
    if not isinstance(variant, Mime):
        raise UsageError(f"'{run.name}' is a {run.variant}: a run of mime is expected")
    return variant


def _groups(variant: "Mime") -> list[str]:
    """The group of each emotion, also where the run was trained without groups."""
    from attune.models.mime import groups_of

    config = dataclasses.replace(variant.config, grouping=True)
    groups = groups_of(config, variant.facts.emotions)
    of_emotion = {number: name for name, members in groups.items() for number in members}
    return [of_emotion[number] for number in range(len(variant.facts.emotions))]


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
