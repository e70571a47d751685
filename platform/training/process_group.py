"""The group of processes that train one run."""

from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ProcessGroup:
    """The rank of this process among the workers of a run, their number, and its device."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def is_first(self) -> bool:
        """Whether this is the worker that logs and writes files."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all workers."""
        if self.world_size > 1:
            torch.distributed.barrier()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the workers."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
            values = values / self.world_size
        return values

    def agree_on_flag(self, flag: bool) -> bool:
        """Return the first worker's flag on every worker, so that all stop at the same step."""
        if self.world_size == 1:
            return flag
        decision = torch.tensor([float(flag)], device=self.device)
        torch.distributed.broadcast(decision, src=0)
        return bool(decision.item())
