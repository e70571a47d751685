"""Create a run's folder from the user's options, find a run to resume, build a run's model."""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
from safetensors.torch import load_file

from attune.models.base import (
    DataRequirements,
    Variant,
)
from attune.platform.core.commit import commit
from attune.platform.core.errors import UsageError
from attune.platform.core.logging import current_job
from attune.platform.core.settings import (
    find_variant,
    labels_utterances,
    override_settings,
    variants_where,
)
from attune.platform.data import bundled
from attune.platform.data.dataset_folder import LEXICON, TOKENS, read_dataset_manifest
from attune.platform.data.labels import EMOTIONS
from attune.platform.data.prepare import find_prepared_data
from attune.platform.enrichment.labels import LABELS_KEY
from attune.platform.runs.model import (
    CONTEXT_LABELS,
    LEXICON_FILE,
    MODEL_WEIGHTS,
    VOCABULARY_FILE,
    Model,
    build_model,
    copy_model_labeller,
    find_model_labeller,
    model_label_names,
    model_requires_lexicon,
)
from attune.platform.runs.record import (
    LATEST,
    RUN_RECORD,
    Run,
    all_runs,
    check_run_name,
    find_run,
    new_run_name,
    runs_folder,
)
from attune.platform.text import subwords
from attune.platform.text.lexicons import Lexicon
from attune.platform.text.subwords import Subwords
from attune.platform.text.vocabulary import Vocabulary
from attune.platform.text.word_vectors import load_word_vectors
from attune.platform.training import engine
from attune.platform.training.data import (
    check_training_data,
    read_training_split_once,
    training_harvest_record,
)
from attune.platform.training.inputs import write_input_checksums
from attune.platform.training.settings import TrainingConfig, configure

LIMITS = ("workers", "max_steps", "max_minutes")
"""The options that may differ when a run is resumed."""


def new_run(
    variant: str,
    *,
    data: str = "bundled",
    preset: str = "small",
    overrides: Mapping[str, Any] | None = None,
    init: str | None = None,
    workers: int = 1,
    zero: int | None = None,
    seed: int = 0,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    name: str | None = None,
) -> Run:
    """Check all options, then create the run's folder with its vocabulary."""
    config, training = configure(variant, preset, overrides)
    training = dataclasses.replace(training, precision=engine.resolve_precision(training.precision))
    deepspeed, stage = _set_up_deepspeed(training, zero)
    check_zero_stage(find_variant(variant)[0], variant, stage)
    first = None if init is None else find_run(init)
    if first is not None and not first.model.is_dir():
        raise UsageError(
            f"run '{first.name}' has no model yet: wait for its first validation, or name another"
        )
    if training.word_vectors and not Path(training.word_vectors).is_file():
        raise UsageError(f"word_vectors={training.word_vectors}: there is no such file")
    folder = find_prepared_data(data)
    manifest = read_dataset_manifest(folder)
    requirements = find_variant(variant)[0].requirements_for(config)
    check_training_data(find_variant(variant)[0], variant, config, folder)
    lexicon, lexicon_notice = None, ""
    if model_requires_lexicon(requirements):
        lexicon, lexicon_notice = _set_up_lexicon(training, requirements, folder)
    labeller, labeller_notice = None, ""
    if CONTEXT_LABELS in requirements.columns:
        labeller, labeller_notice = _set_up_labeller(training, manifest)
    data_name = data if data == "bundled" else folder.name
    name = name or new_run_name(variant, data_name)
    check_run_name(name)
    run = Run(
        name=name,
        folder=runs_folder() / name,
        variant=variant,
        preset=preset,
        config=dataclasses.asdict(config),
        training=dataclasses.asdict(training),
        data={
            "name": data_name,
            "folder": str(folder.absolute()),
            "hash": manifest["hash"],
            **training_harvest_record(requirements, config),
        },
        seed=seed,
        workers=workers,
        zero=stage,
        max_steps=max_steps,
        max_minutes=max_minutes,
        init=None if first is None else str(first.model),
        command=" ".join(["attune", *sys.argv[1:]]),
        commit=commit(),
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        notice="; ".join(filter(None, (lexicon_notice, labeller_notice))),
        **current_job(),
    )
    if (run.folder / RUN_RECORD).exists():
        raise UsageError(
            f"a run named '{name}' exists already: choose another --name, or resume it by "
            f"adding --resume"
        )
    run.folder.mkdir(parents=True, exist_ok=True)
    if first is not None:
        vocabulary = subwords.load_words_or_subwords(first.model / VOCABULARY_FILE)
    else:
        vocabulary = _set_up_vocabulary(
            find_variant(variant)[0], requirements.tokenizer, training, folder, manifest["hash"]
        )
    vocabulary.save(run.folder / VOCABULARY_FILE)
    if lexicon is not None:
        lexicon.save(run.folder / LEXICON_FILE)
    if labeller is not None:
        copy_model_labeller(labeller, run.folder)
    if deepspeed:
        engine.save_deepspeed_settings(deepspeed, run.folder)
    write_input_checksums(run)
    run.write()
    return run


def _set_up_deepspeed(training: TrainingConfig, zero: int | None) -> tuple[dict[str, Any], int]:
    """Return the settings in the DeepSpeed file, and the ZeRO stage from it or from --zero."""
    if training.deepspeed is None:
        return {}, zero or 0
    settings = engine.read_deepspeed_settings(training.deepspeed)
    stage = settings.get(engine.ZERO, {}).get("stage", zero or 0)
    if zero not in (None, stage):
        raise UsageError(
            f"--zero {zero}, but deepspeed={training.deepspeed} says stage {stage}: leave one out"
        )
    return settings, stage


def _set_up_vocabulary(
    variant: type[Variant], kind: str, training: TrainingConfig, folder: Path, data_hash: str
) -> Vocabulary:
    """Return a vocabulary of words or of subwords, as the variant requires."""
    if kind == "words":
        return _set_up_word_vocabulary(
            folder, data_hash, training.vocabulary, training.min_count, training.vocabulary_size
        )
    if training.tokenizer is not None:
        return Subwords.read_byte_pairs(Path(training.tokenizer))
    return _set_up_subwords(variant, folder, data_hash, training.vocabulary_size or subwords.SIZE)


@functools.lru_cache(4)
def _set_up_word_vocabulary(
    folder: Path, data_hash: str, column: str, min_count: int, max_size: int | None
) -> Vocabulary:
    """Return the words of data with this hash; cached for the runs of a sweep."""
    assert data_hash, "part of the cache key"
    return Vocabulary.build(
        pl.read_parquet(folder / TOKENS),
        column=column,
        min_count=min_count,
        max_size=max_size,
        always=EMOTIONS,
    )


@functools.lru_cache(4)
def _set_up_subwords(variant: type[Variant], folder: Path, data_hash: str, size: int) -> Subwords:
    samples = read_training_split_once(variant, folder, "train", data_hash)
    texts = pl.concat([samples["context_tokens"].explode(), samples["response_tokens"]])
    return Subwords.learn_byte_pairs(texts.drop_nulls().unique(maintain_order=True), size)


def _set_up_lexicon(
    training: TrainingConfig, requirements: DataRequirements, folder: Path
) -> tuple[Lexicon, str]:
    """Return the emotion lexicon, and a notice if it is neither set nor part of the data."""
    lexicon, notice = _set_up_emotion_words(training.lexicon, folder)
    if not requirements.intensity:
        return lexicon, notice
    if training.valence_arousal is not None:
        return lexicon.with_valence_arousal(Path(training.valence_arousal)), ""
    ask = "name NRC-VAD with --set valence_arousal=FILE"
    if not lexicon.valence_arousal:
        raise UsageError(f"lexicon={training.lexicon} has no valence and arousal: {ask}")
    few = f"only {len(lexicon.valence_arousal)} words have valence and arousal: {ask}"
    return lexicon, few if notice else ""


def _set_up_labeller(
    training: TrainingConfig, manifest: Mapping[str, Any]
) -> tuple[Path | None, str]:
    """Return the folder of the model that labels contexts, and a notice if there is none."""
    if training.labeller is not None:
        run = find_run(training.labeller)
        if find_variant(run.variant)[0].requirements.labels != "utterances":
            able = " or ".join(variants_where(labels_utterances))
            raise UsageError(f"labeller={training.labeller}: name a run of {able}")
        if not run.model.is_dir():
            raise UsageError(f"labeller={training.labeller}: '{run.name}' has no model yet")
        return run.model, ""
    name = manifest.get(LABELS_KEY, {}).get("run")
    for run in all_runs():
        if run.name == name and run.model.is_dir():
            return run.model, ""
    return None, (
        "when it answers, what it is told has no labels: name a run of "
        f"{' or '.join(variants_where(labels_utterances))} with --set labeller=RUN"
    )


def _set_up_emotion_words(path: str | None, folder: Path) -> tuple[Lexicon, str]:
    if path is not None:
        return Lexicon.load(Path(path)), ""
    if (folder / LEXICON).is_file():
        return Lexicon.load(folder / LEXICON), ""
    small = bundled.lexicon()
    return small, (
        f"emotion words are the {len(small.words)} of the bundled corpus, and adjectives: name "
        f"NRC's lexicon with --set lexicon=FILE"
    )


def find_resumable_run(variant: str, name: str | None, asked: Mapping[str, Any]) -> Run | None:
    """Return the run to resume: the one of that name, or the variant's latest unfinished one.

    Limits and the number of workers may differ from its record; all else must be the same. The
    record is not changed: another process may be training the run (`apply_run_limits`).
    """
    if name is None:
        open_runs = [r for r in all_runs() if r.variant == variant and r.status != "finished"]
        if not open_runs:
            return None
        run = open_runs[-1]
    elif (runs_folder() / name / RUN_RECORD).is_file():
        run = find_run(name)
    else:
        return None
    _check_unfinished(run)
    _check_same_settings(run, variant, asked)
    return run


def apply_run_limits(run: Run, asked: Mapping[str, Any]) -> Run:
    """Record the limits and the number of workers that a run is resumed with. The caller holds its
    lock and has read its record since: it may have finished in the meantime."""
    _check_unfinished(run)
    return run.update(**{key: asked[key] for key in LIMITS if key in asked})


def _check_unfinished(run: Run) -> None:
    if run.status == "finished":
        raise UsageError(
            f"run '{run.name}' is finished: start a new one with its weights by --init {run.name}"
        )


def _check_same_settings(run: Run, variant: str, asked: Mapping[str, Any]) -> None:
    was: dict[str, Any] = {
        "variant": run.variant, "preset": run.preset, "seed": run.seed, "zero": run.zero,
        **run.config, **run.training,
    }  # fmt: skip
    config, training = configure(run.variant, run.preset, asked.get("overrides"))
    typed = {**dataclasses.asdict(config), **dataclasses.asdict(training)}
    wanted = {key: typed[key] for key in asked.get("overrides", {})}
    if wanted.get("precision") == "auto":  # resolved when the run was created
        del wanted["precision"]
    wanted.update({key: asked[key] for key in ("preset", "seed", "zero") if key in asked})
    for key, value in {"variant": variant, **wanted}.items():
        if was[key] != value:
            raise UsageError(
                f"run '{run.name}' was started with {key}={was[key]}, not {value}: leave it out to "
                f"resume, or start a new run under another --name"
            )
    if "data" in asked:
        _check_same_data(run, asked["data"])
    if "init" in asked:
        _check_same_init(run, asked["init"])


def _check_same_data(run: Run, data: str) -> None:
    """Refuse other data than the run's; the content counts, not the folder."""
    if read_dataset_manifest(find_prepared_data(data))["hash"] != run.data["hash"]:
        is_bundled = run.data["name"] == bundled.NAME
        original = bundled.NAME if is_bundled else run.data["folder"]
        raise UsageError(
            f"run '{run.name}' was started with --data {original}, not {data}: leave --data out to "
            f"resume it, or start a new run with another --name"
        )


def _check_same_init(run: Run, init: str) -> None:
    """Refuse other initial weights than the run's; `V@latest` is the latest run of V before it."""
    variant, _, which = init.partition("@")
    earlier = [r for r in all_runs() if r.variant == variant and r.created < run.created]
    first = earlier[-1] if which == LATEST and earlier else find_run(init)
    if run.init is None:
        difference = f"without --init, not with --init {init}"
    elif Path(run.init).resolve() != first.model.resolve():
        difference = f"with --init {Path(run.init).parent.name}, not {init}"
    else:
        return
    raise UsageError(
        f"run '{run.name}' was started {difference}: leave --init out to resume it, or start a new "
        f"run with another --name"
    )


def check_zero_stage(variant: type[Variant], name: str, zero: int) -> None:
    """Refuse ZeRO 3 for variants that use weights outside the forward of the module owning them:
    only there does ZeRO 3 gather them."""
    if zero == 3 and not variant.zero_3:
        raise UsageError(
            f"'{name}' cannot be trained with --zero 3: some of its weights are used outside the "
            f"modules that own them (shared with the output layer, say); use --zero 0, 1 or 2"
        )


def set_up_run_model(run: Run) -> Model:
    """Return the model of a run with its initial weights."""
    vocabulary = subwords.load_words_or_subwords(run.folder / VOCABULARY_FILE)
    variant, _ = find_variant(run.variant)
    training = TrainingConfig(**run.training)
    vectors = (
        load_word_vectors(Path(training.word_vectors), vocabulary, seed=run.seed)
        if training.word_vectors
        else None
    )
    config = override_settings(variant.Config(), run.config)
    reads = model_requires_lexicon(variant.requirements_for(config))
    model = build_model(
        run.variant,
        config,
        vocabulary,
        model_label_names(variant.requirements),
        vectors=vectors,
        lexicon=Lexicon.load(run.folder / LEXICON_FILE) if reads else None,
        max_context=training.max_context,
        labeller=find_model_labeller(run.folder),
        seed=run.seed,
    )
    if run.init is not None:
        set_up_initial_weights(model.variant, Path(run.init))
    return model


def set_up_initial_weights(variant: Variant, folder: Path) -> None:
    """Load those weights of another model that have the same name and shape."""
    initial = load_file(folder / MODEL_WEIGHTS)
    current = variant.state_dict()
    shared = {n: t for n, t in initial.items() if n in current and current[n].shape == t.shape}
    if not shared:
        raise UsageError(f"--init {folder}: none of its weights fit this variant")
    variant.load_state_dict(shared, strict=False)
