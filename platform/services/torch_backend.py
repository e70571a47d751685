"""The process group of a run's workers; on one machine, nothing listens beyond loopback."""

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import ray.train.torch
import torch.distributed
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from attune.platform.services.stack_processes import HOST


def torch_config(backend: str, folder: Path) -> TorchConfig:
    """Return the configuration of the process group for the cluster that is connected.

    The workers of a cluster on the loopback interface meet at a file in the folder: torch's own
    store would listen on every interface.
    """
    if ray.get_runtime_context().gcs_address.startswith(f"{HOST}:"):
        return LoopbackConfig(backend=backend, folder=str(folder))
    return TorchConfig(backend=backend)


@dataclass
class LoopbackConfig(TorchConfig):
    """Torch's process group over the loopback interface."""

    folder: str = ""
    """The folder of the file at which the workers meet."""

    @property
    def backend_cls(self) -> type["LoopbackBackend"]:
        """The class that sets up the process group."""
        return LoopbackBackend


class LoopbackBackend(Backend):
    """Set up the process group when the workers have started, and after each restart."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Join the workers into one process group."""
        file = Path(backend_config.folder) / f"workers-{uuid.uuid4().hex}"
        ray.get(
            [
                worker_group.execute_single_async(
                    rank, _join, backend_config.backend, str(file), rank, len(worker_group)
                )
                for rank in range(len(worker_group))
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Leave the process group."""
        worker_group.execute_async(_leave)


def _join(backend: str, file: str, rank: int, world_size: int) -> None:
    """Join the process group of a run, in a worker."""
    interface = _loopback_interface()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(ray.train.get_context().get_local_rank()),
        "WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
    if torch.cuda.is_available():
        torch.cuda.set_device(ray.train.torch.get_device())
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    torch.distributed.init_process_group(
        backend, init_method=Path(file).as_uri(), rank=rank, world_size=world_size
    )


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _loopback_interface() -> str:
    """Return the name of the loopback interface, such as `lo`."""
    return next(
        str(name)
        for name, addresses in psutil.net_if_addrs().items()
        if any(each.address == HOST for each in addresses)
    )
