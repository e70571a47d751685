"""DeepSpeed engines of several players against the same steps in plain torch, in one process."""

import pytest
import torch
from torch import nn

from attune.models.base import PAIRED, Stage, Update, Variant
from attune.platform.training import engine
from attune.platform.training.engine import Engine, Player
from attune.platform.training.settings import TrainingConfig
from attune.platform.training.updates import train_only_updated, update_loss

pytestmark = pytest.mark.xdist_group("training")


@pytest.fixture(autouse=True)
def deepspeed_in_this_process():
    engine.init_deepspeed()


class TwoPlayers(Variant):
    """A generator that a critic judges: the shape that is wrong on engines without freezing."""

    system = paper = "toy"

    def __init__(self):
        nn.Module.__init__(self)
        self.generator = nn.Linear(6, 6)
        self.critic = nn.Linear(6, 1)

    def stages(self):
        critic = Update(player="critic", losses="critic_losses", weights={"judged": 1.0})
        generator = Update(
            player="generator", losses="generator_losses", weights={"error": 1.0, "fool": 0.5}
        )
        players = {"generator": ("generator",), "critic": ("critic",)}
        return [Stage(name="play", players=players, updates=(critic, generator))]

    def critic_losses(self, batches, progress):
        inputs, targets = batches[PAIRED]
        outputs = self.generator(inputs).detach()
        return {"judged": (self.critic(outputs) - self.critic(targets)).tanh().mean()}

    def generator_losses(self, batches, progress):
        inputs, targets = batches[PAIRED]
        outputs = self.generator(inputs)
        return {
            "error": (outputs - targets).square().mean(),
            "fool": -self.critic(outputs).tanh().mean(),
        }


def play_rounds(step_of):
    """The losses of a few rounds, with whatever makes the steps."""
    torch.manual_seed(0)
    variant = TwoPlayers()
    [stage] = variant.stages()
    step = step_of(variant, stage)
    losses = []
    for number in range(8):
        draw = torch.Generator().manual_seed(number)
        inputs = torch.randn(4, 6, generator=draw)
        for update in stage.updates:
            with train_only_updated(variant, stage.players[update.player]):
                losses.append(step(update, {PAIRED: (inputs, inputs.flip(1))}))
    return torch.tensor(losses)


TOY = TrainingConfig(learning_rate=0.05, gradient_clipping=0.3)


def plain_torch(variant, stage):
    optimizers = {
        player: torch.optim.AdamW(
            [p for part in parts for p in getattr(variant, part).parameters()],
            lr=TOY.learning_rate,
            weight_decay=TOY.weight_decay,
        )
        for player, parts in stage.players.items()
    }

    def step(update, batches):
        optimizer = optimizers[update.player]
        total = update_loss(update, getattr(variant, update.losses)(batches, None))
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], TOY.gradient_clipping)
        optimizer.step()
        return total.item()

    return step


def deepspeed(zero):
    def make(variant, stage):
        engines = {
            player: Engine(Player(variant, parts), TOY, zero=zero, universal=False)
            for player, parts in stage.players.items()
        }

        def step(update, batches):
            total = update_loss(update, engines[update.player](update.losses, batches, None))
            engines[update.player].backward(total)
            engines[update.player].step(TOY.learning_rate)
            return total.item()

        return step

    return make


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_players_give_the_same_under_zero_as_in_plain_torch(zero):
    expected = play_rounds(plain_torch)
    assert torch.allclose(play_rounds(deepspeed(zero)), expected, rtol=1e-4, atol=1e-5)
    assert expected[0] != expected[-2]
