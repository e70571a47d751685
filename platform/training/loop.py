"""The training loop: trains a variant's stages, validates, saves the best model, resumes.

The random numbers of a step are seeded by the run's seed, the stage, the step and the worker, and
the order of the data depends on the seed and the step alone. A run that resumes from a checkpoint
therefore computes exactly what an uninterrupted run would.
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
from torch import Tensor, nn

from attune.models.base import (
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
from attune.platform.training.checkpoints import TrainState
from attune.platform.training.engine import (
    Engine,
    Player,
    convert_engine_to_universal,
    gather_engine_weights,
    load_deepspeed_settings,
)
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.schedules import has_dropout_decayed, rate, scheduled_dropout_factor
from attune.platform.training.settings import TrainingConfig
from attune.platform.training.updates import (
    LossScale,
    seed_update,
    train_only_updated,
    update_loss,
    update_seed,
)
from attune.platform.training.validation import compute_validation_metrics, valid_tokens_per_word

PLAN, RESULT, PROBLEM = "plan.json", "result.json", "problem.txt"
TIMED_STEPS = 50
"""Number of first steps of a stage whose speed determines how many steps a time limit allows."""
STEP_TIME_SHARE = 0.9
"""Share of a time limit that is planned for steps; the rest is for validation and checkpoints."""
Watch = Callable[[int, Mapping[str, float], bool], None]
"""Called by the first worker with a step, its metrics, and whether training ends. Validation
metrics are passed after their checkpoint is written. It may raise to end the training."""
Export = Callable[[int, Mapping[str, float]], None]
"""Called by the first worker with a step and all metrics logged at it, to export them."""


class Training:
    """Trains one run, from its last checkpoint to its end."""

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
        self.record, self.model, self.valid, self.group = run, model, valid, group
        self.watch, self.export = watch, export
        self.settings = TrainingConfig(**run.training)
        self.deepspeed = load_deepspeed_settings(run.folder)
        self.variant = model.variant.to(group.device)
        self.stages = self.variant.stages()
        self.tokens_per_word = valid_tokens_per_word(model, valid)
        self.streams = {
            name: Stream(
                columns,
                size=self.settings.batch_size,
                by=self.settings.batch_by,
                seed=run.seed,
                rank=group.rank,
                world_size=group.world_size,
            )
            for name, columns in data.items()
        }
        self.loss_scale = LossScale(self.settings, self.streams, group.world_size)
        self.dropouts = {
            module: module.p for module in self.variant.modules() if isinstance(module, nn.Dropout)
        }
        """The dropout rate of each module (all kinds of dropout), before any decay."""

    @property
    def weights_bytes(self) -> int:
        """The size of the variant's weights."""
        return sum(each.numel() * each.element_size() for each in self.variant.parameters())

    def run(self) -> bool:
        """Train to the end; return False if the run was stopped before it."""
        state, checkpoint = self.load_last_checkpoint()
        if self.group.is_first:
            self.metrics = MetricsFile(self.record.metrics_file, state.total, self._log_message)
            self._write_plan(state)
        while state.stage < len(self.stages):
            state = self.train_stage(state, checkpoint)
            if not state.stage_over:
                return False
            checkpoint = None
            if state.stage + 1 == len(self.stages):
                break
            state = TrainState(
                stage=state.stage + 1,
                total=state.total,
                total_seconds=state.total_seconds,
                seconds_per_step=state.seconds_per_step,
                workers=state.workers,
                zero=state.zero,
            )
            if self.group.is_first:  # before the checkpoint: resuming from it skips this
                ended = self.best_model_folder(state.stage - 1) / checkpoints.TRAIN_STATE
                _write_json(ended, dataclasses.asdict(state))
            self._save_checkpoint(state, {})
        self._write_result(state)
        return True

    def stage_steps(self, number: int, state: TrainState = TrainState()) -> int:  # noqa: B008
        """Return the maximum number of a stage's rounds: its share of the run's, at least one.

        A limit in epochs refers to passes through the stage's first stream, of which a round takes
        one batch per update. A limit in minutes is converted to steps once the speed is known, so
        that the learning rate and dropout decay within the limit.
        """
        stage = self.stages[number]
        share = stage.share / sum(each.share for each in self.stages)
        epoch = len(self.streams[stage.streams[0]].plan(0))
        whole = self.record.max_steps or self.settings.max_epochs * epoch / _batches_per_round(
            stage
        )
        seconds_per_step = state.seconds_per_step.get(stage.name)
        if seconds_per_step is not None:
            in_time = STEP_TIME_SHARE * 60 * self.stage_minutes(number) / seconds_per_step
            return max(1, round(min(whole * share, in_time)))
        return max(1, round(whole * share))

    def stage_minutes(self, number: int) -> float:
        """Return a stage's share of the run's limit of minutes."""
        share = self.stages[number].share / sum(stage.share for stage in self.stages)
        return (self.record.max_minutes or math.inf) * share

    def train_stage(self, state: TrainState, checkpoint: Path | None) -> TrainState:
        """Train a stage from its current state, then load its best weights for the next stage."""
        stage, steps = self.stages[state.stage], self.stage_steps(state.stage, state)
        if state.stage_over:  # the run was interrupted after the end of the stage
            self._load_best_of_stage(state.stage)
            return state
        engines = self._build_loop_engines(stage, state, checkpoint)
        batches = {name: self._stream_batches(name, stage, state) for name in stage.streams}
        saved = state.total
        started, seconds = time.monotonic(), state.seconds
        total_seconds = state.total_seconds
        self.variant.train()
        stopped = False
        validation_metrics: dict[str, float] = {}
        while not state.stage_over and not stopped:
            epoch_ended = self.train_round(stage, state, steps, engines, batches)
            elapsed = time.monotonic() - started
            state = dataclasses.replace(
                state,
                step=state.step + 1,
                total=state.total + 1,
                seconds=seconds + elapsed,
                total_seconds=total_seconds + elapsed,
            )
            if self.record.max_minutes is not None and state.step == TIMED_STEPS:
                state = self._time_steps(stage, state)
                steps = self.stage_steps(state.stage, state)
            over, stopped = self._check_limits(state, steps)
            if over or self.is_due(
                self.settings.evaluate_every, state.total, at_epoch_end=epoch_ended
            ):
                state, validation_metrics = self.validate(stage, state)
                if not has_dropout_decayed(self.settings, state.step, steps):
                    state = dataclasses.replace(state, validations_without_improvement=0)
                over = over or 0 < self.settings.patience <= state.validations_without_improvement
                state = dataclasses.replace(state, stage_over=over)
                due = True
            else:
                due = self.is_due(self.settings.checkpoint_every, state.total, at_epoch_end=False)
            if due or stopped:
                self._save_checkpoint(state, engines)
                saved = state.total
            if validation_metrics and self.group.is_first:
                self.watch(state.total, validation_metrics, self._is_last_stage(state))
            validation_metrics = {}
        assert saved == state.total
        for engine in engines.values():
            engine.close()
        for stream in batches.values():
            stream.close()  # type: ignore[attr-defined]
        if state.stage_over and state.stage + 1 < len(self.stages):
            self._load_best_of_stage(state.stage)
        return state

    def _is_last_stage(self, state: TrainState) -> bool:
        return state.stage_over and state.stage + 1 == len(self.stages)

    def train_round(
        self, stage: Stage, state: TrainState, steps: int, engines: Mapping[str, Engine],
        batches: Mapping[str, Iterator[PositionedBatch]],
    ) -> bool:  # fmt: skip
        """Apply all updates of a stage once; return whether an epoch of its first stream ended."""
        progress = Progress(step=state.step, fraction=state.step / steps)
        learning_rate = rate(self.settings, stage, state.step, steps)
        dropout = scheduled_dropout_factor(self.settings, state.step, steps)
        for module, share in self.dropouts.items():
            module.p = dropout * share
        is_logged = (state.total + 1) % self.settings.log_every == 0 or state.step == 0
        terms: dict[str, Tensor] = {}
        total = torch.zeros(())
        samples = 0
        epoch_ended = False
        started = time.monotonic()
        seed_update(update_seed(self.record.seed, state.stage, state.step, self.group.rank))
        for update in stage.updates:
            for _ in range(update.repeat):
                loaded = {name: next(stream) for name, stream in batches.items()}
                epoch_ended |= loaded[stage.streams[0]].next_position.batch == 0
                samples += round(loaded[stage.streams[0]].batch.samples * self.group.world_size)
                with train_only_updated(self.variant, stage.players[update.player]):
                    update_terms = self._apply_update(
                        engines, update, loaded, progress, learning_rate, is_logged
                    )
            terms.update(update_terms)
            total = total + update_loss(update, update_terms).cpu()
        if is_logged:
            self._log(state, terms, total, learning_rate, samples, time.monotonic() - started)
        return epoch_ended

    def _apply_update(
        self, engines: Mapping[str, Engine], update: Update, loaded: Mapping[str, PositionedBatch],
        progress: Progress, learning_rate: float, is_logged: bool,
    ) -> Losses:  # fmt: skip
        """Make one optimizer step; return this worker's loss terms of the whole batch, and at a
        logged step the gradient norm."""
        engine = engines[update.player]
        sums: Losses = {}
        for part in self._split_for_accumulation({name: one.batch for name, one in loaded.items()}):
            terms = engine(update.losses, part, progress)
            engine.backward(update_loss(update, terms))
            norm = engine.step(learning_rate, return_norm=is_logged)
            for name, term in terms.items():
                sums[name] = (
                    sums.get(name, 0.0) + term.detach().float() / self.settings.accumulation
                )
        return {**sums, f"gradient_norm_{update.player}": norm} if is_logged else sums

    def _split_for_accumulation(self, batches: Batches) -> Iterator[Batches]:
        """Yield the parts of batches for accumulation; the mean of their losses is the loss of the
        batch."""
        count = self.settings.accumulation
        for place in range(count):
            yield {
                name: self.loss_scale.scaled_batch(
                    name, batch, {n: t[place::count] for n, t in batch.tensors.items()}
                ).to(self.group.device)
                for name, batch in batches.items()
            }

    def _stream_batches(
        self, name: str, stage: Stage, state: TrainState
    ) -> Iterator[PositionedBatch]:
        stream = self.streams[name]
        return stream.batches(stream.position(state.step * _batches_per_round(stage)))

    def _check_limits(self, state: TrainState, steps: int) -> tuple[bool, bool]:
        """Return whether the stage is over, and whether a stop of the run was requested."""
        over = state.step >= steps
        if self.record.max_minutes is not None:
            over = self.group.agree_on_flag(
                over or state.seconds >= 60 * self.stage_minutes(state.stage)
            )
        return over, self.group.agree_on_flag(self.record.stop_file.exists())

    def _time_steps(self, stage: Stage, state: TrainState) -> TrainState:
        """Return the state with the speed of the stage's steps so far."""
        seconds = float(self.group.mean(torch.tensor(state.seconds / state.step)))
        state = dataclasses.replace(
            state, seconds_per_step={**state.seconds_per_step, stage.name: seconds}
        )
        steps = self.stage_steps(state.stage, state)
        self._log_message(f"{stage.name}: {steps:,} steps planned, at {seconds:.3f} s per step")
        if self.group.is_first:
            self._write_plan(state)
        return state

    @staticmethod
    def is_due(every: int, step: int, *, at_epoch_end: bool) -> bool:
        """Return whether a step is a multiple of `every`; if that is 0, whether an epoch ended."""
        return step % every == 0 if every else at_epoch_end

    def _log(
        self, state: TrainState, terms: Losses, total: Tensor, learning_rate: float, samples: int,
        seconds: float,
    ) -> None:  # fmt: skip
        names = sorted(terms)
        values = torch.stack([total, *(terms[name].cpu() for name in names)])
        values = self.group.mean(values)
        if self.group.is_first:
            losses = dict(zip(("loss", *names), values.tolist(), strict=True))
            speed = {"samples_per_second": samples / seconds, "learning_rate": learning_rate}
            self._record_metrics(state.total + 1, {**losses, **speed, "stage": state.stage})
            self.watch(state.total + 1, losses, False)

    def _record_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.add(step, metrics)
        self.export(step, metrics)

    def validate(self, stage: Stage, state: TrainState) -> tuple[TrainState, dict[str, float]]:
        """Validate, and save the model if it is the best of its stage so far."""
        validation_metrics = compute_validation_metrics(
            self.variant, stage, self.valid, self.group, tokens_per_word=self.tokens_per_word
        )
        if self.group.is_first:
            self._record_metrics(state.total, validation_metrics)
        value = validation_metrics[stage.metric]
        value = -value if "accuracy" in stage.metric else value
        if state.best is not None and not value < state.best:
            return dataclasses.replace(
                state, validations_without_improvement=state.validations_without_improvement + 1
            ), validation_metrics
        with gather_engine_weights(self.variant, self.record.zero):
            if self.group.is_first:
                best = self.best_model_folder(state.stage)
                _replace_model_folder(best, lambda folder: save_model(self.model, folder))
        state = dataclasses.replace(
            state,
            best=value,
            best_step=state.total,
            best_metrics=validation_metrics,
            validations_without_improvement=0,
        )
        return state, validation_metrics

    def best_model_folder(self, number: int) -> Path:
        """Return the folder of a stage's best model; that of the last stage is the run's model."""
        if number + 1 == len(self.stages):
            return self.record.model
        return self.record.stage_model(self.stages[number].name)

    def _load_best_of_stage(self, number: int) -> None:
        self.group.barrier()
        load_weights(self.variant, self.best_model_folder(number) / MODEL_WEIGHTS)

    def _build_loop_engines(
        self, stage: Stage, state: TrainState, checkpoint: Path | None
    ) -> dict[str, Engine]:
        folder, universal = None, False
        if checkpoint is not None and state.step:
            folder = checkpoint / checkpoints.ENGINES
            # A partitioned optimizer state must be converted for another number of workers.
            universal = state.zero > 0 and state.workers != self.group.world_size
        if universal and folder is not None:
            folder = self._convert_to_universal(stage, folder)
        engines = {}
        for player, parts in stage.players.items():
            engine = Engine(
                Player(self.variant, parts, self.settings.precision),
                self.settings,
                zero=self.record.zero,
                universal=universal,
                extra=self.deepspeed,
            )
            if folder is not None:
                engine.load(folder, player)
            engines[player] = engine
        return engines

    def _convert_to_universal(self, stage: Stage, folder: Path) -> Path:
        into = self.record.folder / "universal"
        if self.group.is_first:
            shutil.rmtree(into, ignore_errors=True)
            for player in stage.players:
                convert_engine_to_universal(folder, player, into)
        self.group.barrier()
        return into

    def load_last_checkpoint(self) -> tuple[TrainState, Path | None]:
        """Load the newest valid checkpoint; return its state and folder, or (new, None)."""
        checkpoint = checkpoints.find_valid_checkpoint(self.record.checkpoints, self._log_message)
        if checkpoint is None:
            return TrainState(workers=self.group.world_size, zero=self.record.zero), None
        load_weights(self.variant, checkpoint / checkpoints.WEIGHTS)
        state = checkpoints.read_checkpoint_state(checkpoint)
        self._log_message(f"resuming from step {state.total:,}")
        return state, checkpoint

    def _save_checkpoint(self, state: TrainState, engines: Mapping[str, Engine]) -> None:
        def save_engines(folder: Path) -> None:
            for player, engine in engines.items():
                engine.save(folder, player)

        def write_weights(path: Path) -> None:
            with gather_engine_weights(self.variant, self.record.zero):
                if self.group.is_first:
                    save_weights(self.variant, path)

        here = dataclasses.replace(state, workers=self.group.world_size, zero=self.record.zero)
        checkpoints.require_checkpoint_space(self.record, self.weights_bytes)
        checkpoints.write_checkpoint(
            self.record.checkpoints,
            here,
            save_engines=save_engines,
            save_weights=write_weights,
            first=self.group.is_first,
            barrier=self.group.barrier,
        )

    def _write_result(self, state: TrainState) -> None:
        if not self.group.is_first:
            return
        result = {
            "steps": state.total,
            "seconds": state.total_seconds,
            "best_step": state.best_step,
            "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "metrics": state.best_metrics,
            "samples": {name: len(stream.tokens) for name, stream in self.streams.items()},
            "stage_steps": self._plan_steps(state),
        }
        _write_json(self.record.folder / RESULT, result)

    def _write_plan(self, state: TrainState) -> None:
        plan = {"steps": self._plan_steps(state), "done": state.total}
        _write_json(self.record.folder / PLAN, plan)

    def _plan_steps(self, state: TrainState) -> dict[str, int]:
        return {stage.name: self.stage_steps(n, state) for n, stage in enumerate(self.stages)}

    def _log_message(self, message: str) -> None:
        if self.group.is_first:
            write_log(self.record, message)


def _batches_per_round(stage: Stage) -> int:
    return sum(update.repeat for update in stage.updates)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(path)


def _replace_model_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a new folder beside the old one, then replace the old one by it."""
    new = folder.with_name(f".{folder.name}.new")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(new, ignore_errors=True)
    write(new)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    new.replace(folder)
    shutil.rmtree(old, ignore_errors=True)
