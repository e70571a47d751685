"""The layers that a variant builds in place of the Transformer's."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from attune.models.base import PAIRED
from attune.models.dual_emp import ConsensusDecoderLayer
from attune.models.emotion_cause import GatedDecoderLayer
from attune.models.layers import Decoder, DecoderLayer, Encoder
from attune.models.output_layer import OutputLayer
from tests.contract import EARLY


def replace_layers(shape, count, layer_type):
    """Build a plain decoder and replace its layers one by one."""
    decoder = Decoder(shape, [DecoderLayer] * count)
    for index in range(count):
        decoder.layers[index] = layer_type(shape)
    return decoder


def build_gated_modules(variant):
    config = variant.config
    return {
        "decoder": replace_layers(config.layer_shape, config.num_layers, GatedDecoderLayer),
        "encoder": Encoder(config.layer_shape, config.num_layers),
    }


def build_gelu_modules(variant):
    config = variant.config
    shape = replace(config.layer_shape, activation=nn.GELU)
    return {
        "encoder": Encoder(shape, config.num_layers),
        "decoder": Decoder(shape, [DecoderLayer] * config.num_layers),
    }


def build_directions(variant):
    config = variant.config
    directions = {}
    for name in ("forward_model", "backward_model"):
        direction = copy.deepcopy(getattr(variant, name))
        direction.encoder = Encoder(config.layer_shape, config.num_layers)
        direction.decoder = replace_layers(
            config.layer_shape, config.num_layers, ConsensusDecoderLayer
        )
        direction.output = OutputLayer(variant.embedding, config.width, tied=config.tied)
        directions[name] = direction
    return directions


@pytest.mark.parametrize(
    ("name", "build_modules"),
    [
        ("emotion-cause-soft", build_gated_modules),
        ("emotion-cause-hard", build_gated_modules),
        ("meed2", build_gelu_modules),
        ("dual-emp", build_directions),
    ],
)
def test_layers_built_one_by_one_give_equal_losses_and_gradients(build, batch, name, build_modules):
    """The weights of modules built from plain layers fit, by name, those that the variant builds,
    with equal losses and gradients."""
    variant = build(name, num_layers=2).variant.train()
    separate = copy.deepcopy(variant)
    for part, module in build_modules(separate).items():
        module.load_state_dict(getattr(variant, part).state_dict())
        setattr(separate, part, module)
    losses, gradients = [], []
    for each in (variant, separate):
        torch.manual_seed(0)
        streams = dict.fromkeys(each.stages()[-1].streams, batch)
        terms = each.losses(streams | {PAIRED: batch}, EARLY)
        torch.stack([term for term in terms.values() if term.requires_grad]).sum().backward()
        losses.append({term: value.item() for term, value in terms.items()})
        gradients.append({key: p.grad for key, p in each.named_parameters()})
    assert losses[0] == losses[1]
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        other = gradients[1][key]
        assert (gradient is None) == (other is None), key
        assert gradient is None or torch.allclose(gradient, other), key
