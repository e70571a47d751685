"""The one training loop: follows a variant's stages, looks at valid, keeps the best, resumes.

Whatever a step draws at random is seeded by the run's seed, the stage, the step and the worker, and
the data's order depends on the seed and the step alone. So a run that goes on from a checkpoint
does exactly what it would have done.
"""

import dataclasses
import json
import math
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from attune.models.base import (
    Batch,
    Batches,
    Losses,
    Progress,
    Stage,
    Update,
)
from attune.platform.batching.encoding import Columns
from attune.platform.batching.streams import PositionedBatch, Stream
from attune.platform.runs.log import write_log
from attune.platform.runs.metrics_file import MetricsFile
from attune.platform.runs.model import MODEL_WEIGHTS, Model, load_weights, save_model, save_weights
from attune.platform.runs.record import Run
from attune.platform.training import checkpoints
from attune.platform.training.checkpoints import Standing
from attune.platform.training.engine import Engine, Player, gathered, kept_settings, to_universal
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.schedules import rate
from attune.platform.training.settings import TrainingConfig
from attune.platform.training.updates import seed_generators, step_seed, total_loss, trainable_only
from attune.platform.training.validation import compute_validation_metrics, tokens_per_word_in

PLAN, RESULT, PROBLEM = "plan.json", "result.json", "problem.txt"
Watch = Callable[[int, Mapping[str, float], bool], None]
"""Called by the first worker with a step, what it logged there, and whether all is over after it;
of a look at valid only when its checkpoint is written. It may raise to end the training."""
Export = Callable[[int, Mapping[str, float]], None]
"""Called by the first worker with a step and all that it logged there, for whoever measures."""


class Training:
    """One run, from its last checkpoint to its end."""

    def __init__(
        self,
        run: Run,
        model: Model,
        data: Mapping[str, Columns],
        valid: Columns,
        group: ProcessGroup = ProcessGroup(),  # noqa: B008
        watch: Watch = lambda *_: None,
        export: Export = lambda *_: None,
    ):
        self.run, self.model, self.valid, self.group = run, model, valid, group
        self.watch, self.export = watch, export
        self.training = TrainingConfig(**run.training)
        self.deepspeed = kept_settings(run.folder)
        self.variant = model.variant.to(group.device)
        self.stages = self.variant.stages()
        self.tokens_per_word = tokens_per_word_in(model, valid)
        self.streams = {
            name: Stream(
                columns,
                size=self.training.batch_size,
                by=self.training.batch_by,
                seed=run.seed,
                rank=group.rank,
                world_size=group.world_size,
            )
            for name, columns in data.items()
        }

    def go(self) -> bool:
        """Train to the end; False where the run was asked to stop before."""
        standing, found = self._resumed()
        if self.group.is_first:
            self.metrics = MetricsFile(self.run.metrics_file, standing.total)
            steps = {stage.name: self.steps_of(n) for n, stage in enumerate(self.stages)}
            _write(self.run.folder / PLAN, {"steps": steps, "done": standing.total})
        while standing.stage < len(self.stages):
            standing = self._stage(standing, found)
            if not standing.stage_over:
                return False
            found = None
            if standing.stage + 1 == len(self.stages):
                break
            standing = Standing(
                stage=standing.stage + 1,
                total=standing.total,
                total_seconds=standing.total_seconds,
                workers=standing.workers,
                zero=standing.zero,
            )
            if self.group.is_first:  # before the checkpoint: resuming from it skips this
                ended = self._best_of(standing.stage - 1) / checkpoints.STANDING
                _write(ended, dataclasses.asdict(standing))
            self._checkpoint(standing, {})
        self._write_result(standing)
        return True

    def steps_of(self, number: int) -> int:
        """How many rounds a stage may take: its share of the run's, at least one.

        Of epochs it is a share of the passes through its first stream; a round draws a batch for
        each of its updates.
        """
        stage = self.stages[number]
        share = stage.share / sum(each.share for each in self.stages)
        epoch = len(self.streams[stage.streams[0]].plan(0))
        whole = self.run.max_steps or self.training.max_epochs * epoch / _draws(stage)
        return max(1, round(whole * share))

    def _stage(self, standing: Standing, found: Path | None) -> Standing:
        """A stage from where it stands; for the next one the variant gets the best weights."""
        stage, steps = self.stages[standing.stage], self.steps_of(standing.stage)
        if standing.stage_over:  # it had ended when the run was interrupted
            self._load_best(standing.stage)
            return standing
        engines = self._engines(stage, standing, found)
        batches = {name: self._batches(name, stage, standing) for name in stage.streams}
        saved = standing.total
        started, seconds = time.monotonic(), standing.seconds
        total_seconds = standing.total_seconds
        self.variant.train()
        stopped = False
        looked: dict[str, float] = {}
        while not standing.stage_over and not stopped:
            epoch_ended = self._round(stage, standing, steps, engines, batches)
            elapsed = time.monotonic() - started
            standing = dataclasses.replace(
                standing,
                step=standing.step + 1,
                total=standing.total + 1,
                seconds=seconds + elapsed,
                total_seconds=total_seconds + elapsed,
            )
            over, stopped = self._limits(standing, steps)
            if over or self._due(self.training.evaluate_every, standing.total, epoch_ended):
                standing, looked = self._evaluated(stage, standing)
                over = over or 0 < self.training.patience <= standing.waited
                standing = dataclasses.replace(standing, stage_over=over)
                due = True
            else:
                due = self._due(self.training.checkpoint_every, standing.total, False)
            if due or stopped:
                self._checkpoint(standing, engines)
                saved = standing.total
            if looked and self.group.is_first:
                self.watch(standing.total, looked, self._last(standing))
            looked = {}
        assert saved == standing.total
        for engine in engines.values():
            engine.close()
        for stream in batches.values():
            stream.close()  # type: ignore[attr-defined]
        if standing.stage_over and standing.stage + 1 < len(self.stages):
            self._load_best(standing.stage)
        return standing

    def _last(self, standing: Standing) -> bool:
        return standing.stage_over and standing.stage + 1 == len(self.stages)

    def _round(
        self, stage: Stage, standing: Standing, steps: int, engines: Mapping[str, Engine],
        batches: Mapping[str, Iterator[PositionedBatch]],
    ) -> bool:  # fmt: skip
        """All updates of a stage once; whether an epoch of the paired stream ended with it."""
        progress = Progress(step=standing.step, share=standing.step / steps)
        learning_rate = stage.rate * rate(self.training, standing.step, steps)
        logs = (standing.total + 1) % self.training.log_every == 0 or standing.step == 0
        terms: dict[str, Tensor] = {}
        total = torch.zeros(())
        samples = 0
        epoch_ended = False
        started = time.monotonic()
        seed_generators(step_seed(self.run.seed, standing.stage, standing.step, self.group.rank))
        for update in stage.updates:
            for _ in range(update.repeat):
                loaded = {name: next(stream) for name, stream in batches.items()}
                epoch_ended |= loaded[stage.streams[0]].following.batch == 0
                samples += round(loaded[stage.streams[0]].batch.samples * self.group.world_size)
                with trainable_only(self.variant, stage.players[update.player]):
                    found = self._update(engines, update, loaded, progress, learning_rate, logs)
            terms.update(found)
            total = total + total_loss(update, found).cpu()
        if logs:
            self._log(standing, terms, total, learning_rate, samples, time.monotonic() - started)
        return epoch_ended

    def _update(
        self, engines: Mapping[str, Engine], update: Update, loaded: Mapping[str, PositionedBatch],
        progress: Progress, learning_rate: float, logs: bool,
    ) -> Losses:  # fmt: skip
        """One optimizer step; the terms of the whole batch, this worker's share, and the norm of
        the gradient where it is logged."""
        engine = engines[update.player]
        sums: Losses = {}
        for part in self._parts({name: one.batch for name, one in loaded.items()}):
            terms = engine(update.losses, part, progress)
            engine.backward(total_loss(update, terms))
            norm = engine.step(learning_rate, measure=logs)
            for name, term in terms.items():
                sums[name] = (
                    sums.get(name, 0.0) + term.detach().float() / self.training.accumulation
                )
        return {**sums, f"gradient_norm_{update.player}": norm} if logs else sums

    def _parts(self, batches: Batches) -> Iterator[Batches]:
        """A batch cut for accumulation: the mean over the parts is the whole batch's loss."""
        count = self.training.accumulation
        public = self.training.loss_scale == "public"
        for place in range(count):
            yield {
                name: Batch(
                    tensors={n: t[place::count] for n, t in batch.tensors.items()},
                    samples=batch.samples / count,
                    tokens=(1 / self.group.world_size if public else batch.tokens) / count,
                ).to(self.group.device)
                for name, batch in batches.items()
            }

    def _batches(self, name: str, stage: Stage, standing: Standing) -> Iterator[PositionedBatch]:
        stream = self.streams[name]
        return stream.batches(stream.position(standing.step * _draws(stage)))

    def _limits(self, standing: Standing, steps: int) -> tuple[bool, bool]:
        """Whether the stage is over, and whether the run is to stop before its end."""
        shares = [stage.share for stage in self.stages]
        minutes = (self.run.max_minutes or math.inf) * shares[standing.stage] / sum(shares)
        over = standing.step >= steps
        if self.run.max_minutes is not None:
            over = self.group.agreed(over or standing.seconds >= 60 * minutes)
        return over, self.group.agreed(self.run.stop_file.exists())

    @staticmethod
    def _due(every: int, total: int, otherwise: bool) -> bool:
        return total % every == 0 if every else otherwise

    def _log(
        self, standing: Standing, terms: Losses, total: Tensor, learning_rate: float, samples: int,
        seconds: float,
    ) -> None:  # fmt: skip
        names = sorted(terms)
        values = torch.stack([total, *(terms[name].cpu() for name in names)])
        values = self.group.mean(values)
        if self.group.is_first:
            found = dict(zip(("loss", *names), values.tolist(), strict=True))
            speed = {"samples_per_second": samples / seconds, "learning_rate": learning_rate}
            self._add(standing.total + 1, {**found, **speed, "stage": standing.stage})
            self.watch(standing.total + 1, found, False)

    def _add(self, step: int, found: dict[str, float]) -> None:
        self.metrics.add(step, found)
        self.export(step, found)

    def _evaluated(self, stage: Stage, standing: Standing) -> tuple[Standing, dict[str, float]]:
        """Look at valid, and keep the model if it is the stage's best so far."""
        found = compute_validation_metrics(
            self.variant, stage, self.valid, self.group, tokens_per_word=self.tokens_per_word
        )
        if self.group.is_first:
            self._add(standing.total, found)
        value = found[stage.metric]
        value = -value if "accuracy" in stage.metric else value
        if standing.best is not None and not value < standing.best:
            return dataclasses.replace(standing, waited=standing.waited + 1), found
        with gathered(self.variant, self.run.zero):
            if self.group.is_first:
                best = self._best_of(standing.stage)
                _replace(best, lambda folder: save_model(self.model, folder))
        standing = dataclasses.replace(
            standing, best=value, best_step=standing.total, best_metrics=found, waited=0
        )
        return standing, found

    def _best_of(self, number: int) -> Path:
        """The last stage's best is the run's model."""
        if number + 1 == len(self.stages):
            return self.run.model
        return self.run.model_after(self.stages[number].name)

    def _load_best(self, number: int) -> None:
        self.group.barrier()
        load_weights(self.variant, self._best_of(number) / MODEL_WEIGHTS)

    def _engines(self, stage: Stage, standing: Standing, found: Path | None) -> dict[str, Engine]:
        folder, universal = None, False
        if found is not None and standing.step:
            folder = found / checkpoints.ENGINES
            # What is partitioned among workers must be put together for another number of them.
            universal = standing.zero > 0 and standing.workers != self.group.world_size
        if universal and folder is not None:
            folder = self._universal(stage, folder)
        engines = {}
        for player, parts in stage.players.items():
            engine = Engine(
                Player(self.variant, parts, self.training.precision),
                self.training,
                zero=self.run.zero,
                universal=universal,
                more=self.deepspeed,
            )
            if folder is not None:
                engine.load(folder, player)
            engines[player] = engine
        return engines

    def _universal(self, stage: Stage, folder: Path) -> Path:
        into = self.run.folder / "universal"
        if self.group.is_first:
            shutil.rmtree(into, ignore_errors=True)
            for player in stage.players:
                to_universal(folder, player, into)
        self.group.barrier()
        return into

    def _resumed(self) -> tuple[Standing, Path | None]:
        """Where to go on, and the checkpoint with the state to go on from."""
        found = checkpoints.last_good(self.run.checkpoints, self._report)
        if found is None:
            return Standing(workers=self.group.world_size, zero=self.run.zero), None
        load_weights(self.variant, found / checkpoints.WEIGHTS)
        standing = checkpoints.standing_of(found)
        self._report(f"going on from step {standing.total:,}")
        return standing, found

    def _checkpoint(self, standing: Standing, engines: Mapping[str, Engine]) -> None:
        def save_engines(folder: Path) -> None:
            for player, engine in engines.items():
                engine.save(folder, player)

        def write_weights(path: Path) -> None:
            with gathered(self.variant, self.run.zero):
                if self.group.is_first:
                    save_weights(self.variant, path)

        here = dataclasses.replace(standing, workers=self.group.world_size, zero=self.run.zero)
        checkpoints.write(
            self.run.checkpoints,
            here,
            save_engines=save_engines,
            save_weights=write_weights,
            first=self.group.is_first,
            barrier=self.group.barrier,
        )

    def _write_result(self, standing: Standing) -> None:
        if not self.group.is_first:
            return
        result = {
            "steps": standing.total,
            "seconds": standing.total_seconds,
            "best_step": standing.best_step,
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "metrics": standing.best_metrics,
            "samples": {name: len(stream.tokens) for name, stream in self.streams.items()},
        }
        _write(self.run.folder / RESULT, result)

    def _report(self, message: str) -> None:
        if self.group.is_first:
            write_log(self.run, message)


def _draws(stage: Stage) -> int:
    return sum(update.repeat for update in stage.updates)


def _write(path: Path, content: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside the one it replaces, then change places."""
    new = folder.with_name(f".{folder.name}.new")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    write(new)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    new.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
