"""DeepSpeed engines, one per optimizer, and their settings. Only this file imports DeepSpeed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor, nn

from attune.models.base import Batches, Losses, Progress, Variant
from attune.models.precision import has_native_bf16
from attune.platform.core.errors import DataError, UsageError, unknown_choice_error
from attune.platform.training.settings import TrainingConfig

BASE_SETTINGS, SETTINGS_FOLDER = "deepspeed.json", "deepspeed"
"""In `infra`: the file of settings common to all runs, and the folder of settings by scale."""
ZERO = "zero_optimization"
ALLOWED_KEYS = (ZERO, "aio", "communication_data_type", "comms_logger", "flops_profiler")
"""Keys allowed in a settings file. Other keys are determined by the settings of the run, have no
effect on these models, or are unknown to DeepSpeed, which ignores them silently."""
RUN_SETTING_FOR = {
    "gradient_clipping": "--set gradient_clipping=...",
    "gradient_accumulation_steps": "--set accumulation=...",
    "train_batch_size": "--set batch_size=...",
    "train_micro_batch_size_per_gpu": "--set batch_size=... and --set accumulation=...",
    "bf16": "--set precision=bf16",
    "fp16": "--set precision=bf16",
    "optimizer": "--set learning_rate=..., weight_decay=... and adam_...",
    "scheduler": "--set schedule=... and warmup_steps=...",
}
"""DeepSpeed's keys that are rejected in a settings file, with the options to use instead."""

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


def resolve_precision(precision: Literal["fp32", "bf16", "auto"]) -> Literal["fp32", "bf16"]:
    """Return the given precision; for `auto`, bf16 if this machine computes it natively."""
    if precision != "auto":
        return precision
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return "bf16" if has_native_bf16(device_type) else "fp32"


class Player(nn.Module):
    """The parts of a variant that one optimizer trains. Calling it computes loss terms."""

    def __init__(self, variant: Variant, parts: tuple[str, ...], precision: str = "fp32"):
        super().__init__()
        assert precision in ("fp32", "bf16"), f"precision={precision} is not resolved"
        self.parts = nn.ModuleDict({name: getattr(variant, name) for name in parts})
        self._variant = [variant]  # in a list, so that torch does not register it
        self.use_bf16 = precision == "bf16"

    def forward(self, losses: str, batches: Batches, progress: Progress) -> Losses:
        """Return the loss terms that a method of the variant computes.

        With bf16 only activations are in bf16: weights, gradients and Adam's state stay in fp32.
        """
        device = next(self.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.use_bf16):
            terms: Losses = getattr(self._variant[0], losses)(batches, progress)
        return terms


class Engine:
    """DeepSpeed's engine of one player: its optimizer, with gradients averaged over the workers."""

    def __init__(
        self,
        player: Player,
        training: TrainingConfig,
        *,
        zero: int,
        universal: bool,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ):
        import deepspeed

        optimizer = torch.optim.AdamW(
            player.parameters(),
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            eps=training.adam_epsilon,
            weight_decay=training.weight_decay,
            fused=True,
        )
        self.engine, self.optimizer, *_ = deepspeed.initialize(
            model=player,
            optimizer=optimizer,
            config=deepspeed_settings(training, zero=zero, universal=universal, extra=extra),
        )
        self.zero = zero
        if zero == 0 and self.engine.dp_world_size == 1:
            # One worker has nothing to average, but DeepSpeed would still copy every gradient back
            # and forth, which takes a fifth of a step.
            self.engine.enable_backward_allreduce = False

    def __call__(self, losses: str, batches: Batches, progress: Progress) -> Losses:
        """Return loss terms with gradients."""
        terms: Losses = self.engine(losses, batches, progress)
        return terms

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a part; DeepSpeed divides it by the number of parts."""
        self.engine.backward(loss)

    def step(self, rate: float, *, return_norm: bool = False) -> Tensor:
        """Count a part; after the last one, update the weights. Return the norm of the gradient
        before clipping if `return_norm`, else 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm: Any = 0.0
        if return_norm and not self.zero:
            grads = [p.grad for p in self.engine.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        self.engine.step()
        if return_norm and self.zero:  # only DeepSpeed computes it, during the step
            norm = self.engine.get_global_grad_norm() or 0.0
        return torch.as_tensor(norm, dtype=torch.float32)

    def save(self, folder: Path, player: str) -> None:
        """Save the state of the optimizer and the weights; every worker must call this."""
        self.engine.save_checkpoint(str(folder), tag=player, save_latest=False)

    def load(self, folder: Path, player: str) -> None:
        """Load what `save` wrote."""
        path, _ = self.engine.load_checkpoint(str(folder), tag=player)
        if path is None:
            raise DataError(f"DeepSpeed found no checkpoint in {folder / player}")

    def close(self) -> None:
        """Release hooks and buffers, so that the next stage can build an engine from the parts."""
        self.engine.destroy()


def deepspeed_settings(
    training: TrainingConfig,
    *,
    zero: int,
    universal: bool = False,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return DeepSpeed's settings: the common ones, those of a file (`extra`), those of the run."""
    text = resources.files("attune.infra").joinpath(BASE_SETTINGS).read_text(encoding="utf-8")
    base: dict[str, Any] = json.loads(text)
    return {
        **base,
        **extra,
        # Required, but unused: the streams make the batches. Only the number of parts matters.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": training.accumulation,
        # Always set: DeepSpeed's default has changed between releases.
        "gradient_clipping": training.gradient_clipping,
        ZERO: {**base[ZERO], **extra.get(ZERO, {}), "stage": zero},
        "checkpoint": {"load_universal": universal},
    }


def read_deepspeed_settings(name_or_path: str) -> dict[str, Any]:
    """Read and check the settings file that `deepspeed=` selects: the name of one in
    infra/deepspeed, or a path."""
    folder = resources.files("attune.infra").joinpath(SETTINGS_FOLDER)
    names = sorted(file.name.removesuffix(".json") for file in folder.iterdir())
    if name_or_path in names:
        return _parse_deepspeed_settings(
            name_or_path, folder.joinpath(f"{name_or_path}.json").read_text(encoding="utf-8")
        )
    if not Path(name_or_path).is_file():
        what = unknown_choice_error("settings of DeepSpeed", name_or_path, names)
        raise UsageError(f"deepspeed={name_or_path}: {what}, or give the path of a JSON file")
    return _parse_deepspeed_settings(name_or_path, Path(name_or_path).read_text(encoding="utf-8"))


def save_deepspeed_settings(content: Mapping[str, Any], folder: Path) -> None:
    """Save the settings in a run's folder, so that a resumed run uses the same ones."""
    text = json.dumps(dict(content), indent=2)
    (folder / BASE_SETTINGS).write_text(f"{text}\n", encoding="utf-8")


def load_deepspeed_settings(folder: Path) -> dict[str, Any]:
    """Load the settings saved in a run's folder, if any."""
    path = folder / BASE_SETTINGS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _parse_deepspeed_settings(name_or_path: str, text: str) -> dict[str, Any]:
    import_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        content = json.loads(text)
    except ValueError as error:
        raise UsageError(f"deepspeed={name_or_path} is not readable as JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get(ZERO, {}), dict):
        raise UsageError(f"deepspeed={name_or_path}: expected a JSON object with '{ZERO}'")
    for key in content:
        if key in RUN_SETTING_FOR:
            raise UsageError(
                f"deepspeed={name_or_path}: remove '{key}' and use {RUN_SETTING_FOR[key]}"
            )
        if key not in ALLOWED_KEYS:
            raise UsageError(
                f"deepspeed={name_or_path}: {unknown_choice_error('key', key, ALLOWED_KEYS)}"
            )
    try:
        DeepSpeedZeroConfig(**content.get(ZERO, {}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([ZERO, *map(str, first["loc"])])
        raise UsageError(f"deepspeed={name_or_path}: '{key}': {first['msg']}") from None
    return content


def convert_engine_to_universal(folder: Path, player: str, into: Path) -> None:
    """Convert a partitioned checkpoint so that any number of workers can load it."""
    command = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
        *("--input_folder", str(folder / player), "--output_folder", str(into / player)),
        *("--inject_missing_state", "--num_extract_workers", "1", "--num_merge_workers", "1"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(
            f"{folder / player} cannot be converted for another number of workers:\n{done.stderr}"
        )


@contextmanager
def gather_engine_weights(variant: Variant, zero: int) -> Iterator[None]:
    """Gather the weights that ZeRO 3 has partitioned, on every worker, within the context."""
    if zero < 3:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(variant.parameters())):
        yield


def import_deepspeed() -> None:
    """Import DeepSpeed without MLflow. Only the autotuner, which is not used here, imports it, and
    that takes most of the time."""
    if "mlflow" in sys.modules:
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # makes its import fail, which DeepSpeed handles
    try:
        import deepspeed  # noqa: F401
    finally:
        del sys.modules["mlflow"]


def init_deepspeed() -> None:
    """Import DeepSpeed and use Ray's process group; a single process creates its own."""
    if not torch.distributed.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    import_deepspeed()
    import deepspeed.ops

    # Only inference uses the shared-memory all-reduce, but DeepSpeed would compile it here. That
    # takes half a minute, and again after another environment, such as a job's, has compiled it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
