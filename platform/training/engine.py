"""One optimizer's share of the work: a DeepSpeed engine. The only file that imports DeepSpeed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from attune.models.base import Batches, Losses, Progress, Variant
from attune.platform.errors import DataError
from attune.platform.training.settings import TrainingConfig

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")


class Player(nn.Module):
    """What one optimizer owns: some parts of a variant. Calling it computes loss terms."""

    def __init__(self, variant: Variant, parts: tuple[str, ...], precision: str = "fp32"):
        super().__init__()
        self.parts = nn.ModuleDict({name: getattr(variant, name) for name in parts})
        self._variant = [variant]  # in a list, so that it is no sub-module
        self.narrow = precision == "bf16"

    def forward(self, losses: str, batches: Batches, progress: Progress) -> Losses:
        """The terms that a method of the variant computes.

        With bf16 only what is computed is half as wide: weights, gradients and Adam stay in fp32.
        """
        device = next(self.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self.narrow):
            terms: Losses = getattr(self._variant[0], losses)(batches, progress)
        return terms


class Engine:
    """A player with its optimizer, gradients averaged over the workers."""

    def __init__(self, player: Player, training: TrainingConfig, *, zero: int, universal: bool):
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
            config=settings(training, zero=zero, universal=universal),
        )
        self.zero = zero
        if zero == 0 and self.engine.dp_world_size == 1:
            # There is nobody to average with, and DeepSpeed would still copy every gradient to and
            # fro: a fifth of a step.
            self.engine.enable_backward_allreduce = False

    def __call__(self, losses: str, batches: Batches, progress: Progress) -> Losses:
        """Loss terms, with gradients."""
        terms: Losses = self.engine(losses, batches, progress)
        return terms

    def backward(self, loss: Tensor) -> None:
        """Add this part's gradient; DeepSpeed divides it by the number of parts."""
        self.engine.backward(loss)

    def step(self, rate: float, *, measure: bool = False) -> Tensor:
        """Count a part; after the last one, move the weights. Returns the norm of the gradient
        before it is clipped, where that is to be measured, else 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm: Any = 0.0
        if measure and not self.zero:
            grads = [p.grad for p in self.engine.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
        self.engine.step()
        if measure and self.zero:  # only DeepSpeed has it, and only after the step
            norm = self.engine.get_global_grad_norm() or 0.0
        return torch.as_tensor(norm, dtype=torch.float32)

    def save(self, folder: Path, player: str) -> None:
        """Write optimizer and weights; every worker calls this."""
        self.engine.save_checkpoint(str(folder), tag=player, save_latest=False)

    def load(self, folder: Path, player: str) -> None:
        """Go on from what `save` wrote."""
        path, _ = self.engine.load_checkpoint(str(folder), tag=player)
        if path is None:
            raise DataError(f"DeepSpeed finds no checkpoint in {folder / player}")

    def close(self) -> None:
        """Let go of hooks and buffers, so that another stage's engine can own the parts."""
        self.engine.destroy()


def settings(training: TrainingConfig, *, zero: int, universal: bool = False) -> dict[str, Any]:
    """DeepSpeed's: what never changes is in infra/deepspeed.json."""
    text = resources.files("attune.infra").joinpath("deepspeed.json").read_text(encoding="utf-8")
    base: dict[str, Any] = json.loads(text)
    return {
        **base,
        # A formality: batches are ours. DeepSpeed only needs the number of parts right.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": training.accumulation,
        # Written always: what DeepSpeed takes for an absent key has changed between releases.
        "gradient_clipping": training.gradient_clipping,
        "zero_optimization": {**base["zero_optimization"], "stage": zero},
        "checkpoint": {"load_universal": universal},
    }


def to_universal(folder: Path, player: str, into: Path) -> None:
    """Rewrite a partitioned checkpoint so that any number of workers can load it."""
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
def gathered(variant: Variant, zero: int) -> Iterator[None]:
    """Within, the weights are whole on every worker, also where ZeRO 3 has spread them."""
    if zero < 3:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(list(variant.parameters())):
        yield


def join_workers() -> None:
    """Let DeepSpeed use the process group that Ray made; a lone process makes its own."""
    if not torch.distributed.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed looks for it
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
