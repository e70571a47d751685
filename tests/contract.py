"""What every variant must keep to, as functions that raise AssertionError where one does not.

`test_variants.py` runs them over all variants; `test_contract.py` over variants with a planted
fault, to show that each function notices the fault it is there for.
"""

import dataclasses
from pathlib import Path

import torch
from torch import nn

from attune.models.base import (
    FOLLOWED,
    Annotator,
    Batch,
    DialogueVariant,
    Progress,
    Stage,
    TextClassifier,
    Variant,
)
from attune.models.decoding import Decoding, decode
from attune.models.labels import LABELS
from attune.platform.runs.model import Model, load_model, save_model
from attune.platform.training.updates import total_loss, trainable_only

EARLY = Progress(step=1, fraction=0.1)
"""Not the first step, at which annealed terms still have the weight 0."""


def stage_losses(variant: Variant, batch: Batch):
    """Each update of each stage, with its loss terms."""
    for stage in variant.stages():
        for update in stage.updates:
            with trainable_only(variant, stage.players[update.player]):
                method = getattr(variant, update.losses)
                yield stage, update, method(streams(stage, batch), EARLY)


def streams(stage: Stage, batch: Batch):
    """The batch as each of the streams that a stage asks for."""
    return dict.fromkeys(stage.streams, batch)


def parameters_of(variant: Variant, parts):
    parameters = {id(p): p for part in parts for p in getattr(variant, part).parameters()}
    return list(parameters.values())


def rows_of(batch: Batch, rows) -> Batch:
    """Some rows of a batch, without the padding that only the others need."""
    tensors = {}
    for name, tensor in batch.tensors.items():
        part = tensor[rows]
        if part.dim() > 1:
            part = part[:, : max(int((part != 0).sum(dim=1).max()), 0)]
        tensors[name] = part
    for name in ("context_turns", "context_causes"):  # 0 is not padding alone there
        tensors[name] = batch[name][rows][:, : tensors["context"].shape[1]]
    tokens = float((tensors["response"] != 0).sum())
    return Batch(tensors=tensors, samples=float(len(rows)), tokens=tokens)


def check_terms_are_tensors_that_learn(variant, batch):
    for stage, update, losses in stage_losses(variant, batch):
        assert set(update.weights) <= set(losses), f"{stage.name}: {set(update.weights)}"
        for name, term in losses.items():
            assert isinstance(term, torch.Tensor), f"{name} is a {type(term).__name__}"
            assert term.dim() == 0, name
            assert torch.isfinite(term), name
            if name in update.weights:
                assert term.requires_grad, f"{name} gives no gradient"


def check_no_module_is_built_in_a_forward(variant, batch):
    built = []
    real = nn.Module.__init__

    def noticed(self, *arguments, **named):
        built.append(type(self).__name__)
        real(self, *arguments, **named)

    nn.Module.__init__ = noticed
    try:
        for _ in stage_losses(variant, batch):
            pass
    finally:
        nn.Module.__init__ = real
    assert not built, built


def check_each_player_moves_itself_and_nobody_else(variant, batch):
    covered = set()
    for stage in variant.stages():
        for update in stage.updates:
            parts = stage.players[update.player]
            nn.ModuleDict({part: getattr(variant, part) for part in parts})  # as engines hold them
            mine = parameters_of(variant, parts)
            covered.update(id(p) for p in mine)
            before = {name: p.detach().clone() for name, p in variant.named_parameters()}
            optimizer = torch.optim.SGD(mine, lr=0.1)
            with trainable_only(variant, parts):
                losses = getattr(variant, update.losses)(streams(stage, batch), EARLY)
                variant.zero_grad()
                total_loss(update, losses).backward()
                for name, p in variant.named_parameters():
                    if any(p is q for q in mine):
                        assert p.grad is not None, f"{name} gets no gradient"
                        assert p.grad.any(), f"{name} gets a gradient of zeros"
                optimizer.step()
            own = {id(p) for p in mine}
            for name, p in variant.named_parameters():
                if id(p) not in own:
                    assert torch.equal(p, before[name]), f"{name} is not {update.player}'s"
                assert p.requires_grad, f"{name} stays frozen"
    missed = [name for name, p in variant.named_parameters() if id(p) not in covered]
    assert not missed, f"nobody trains {missed}"


def check_parts_add_up(variant, batch):
    """Two ranks' gradients, averaged, are the whole batch's: terms divide by the global counts.

    The parts are of unequal size, or a mean over a rank's own would be the same by chance.
    """
    variant.eval()
    third = len(batch) // 3
    ranks = [rows_of(batch, rows) for rows in (range(third), range(third, len(batch)))]
    tokens = sum(rank.tokens for rank in ranks) / 2
    ranks = [dataclasses.replace(r, samples=len(batch) / 2, tokens=tokens) for r in ranks]
    whole = [losses for _, _, losses in stage_losses(variant, batch)]
    parts = [[losses for _, _, losses in stage_losses(variant, rank)] for rank in ranks]
    for one, (first, second) in zip(whole, zip(*parts, strict=True), strict=True):
        for name, term in one.items():
            mean = (first[name] + second[name]) / 2
            assert torch.allclose(term, mean, rtol=1e-4, atol=1e-5), name


def switch_off_dropout(variant):
    """Set the rate of all dropout to 0, as the trainer does at the end of a stage."""
    for module in variant.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def check_dropout_can_be_switched_off(noisy, plain, batch):
    """A variant whose dropout is switched off trains like the same one built without dropout."""

    def training_losses(variant):
        torch.manual_seed(0)
        return [
            float(term.detach())
            for _, _, losses in stage_losses(variant.train(), batch)
            for term in losses.values()
        ]

    switch_off_dropout(plain)  # that of a pretrained encoder is not a setting
    expected = training_losses(plain)
    assert training_losses(noisy) != expected or noisy.config == plain.config
    switch_off_dropout(noisy)
    assert training_losses(noisy) == expected


def check_saved_is_loaded(model: Model, batch, folder: Path):
    model.variant.eval()
    save_model(model, folder)
    loaded = load_model(folder)
    assert loaded.name == model.name
    assert loaded.vocabulary.tokens == model.vocabulary.tokens
    assert loaded.variant.config == model.variant.config
    for one, other in zip(
        outputs(model.variant, batch), outputs(loaded.variant, batch), strict=True
    ):
        assert torch.equal(one, other)


@torch.no_grad()
def outputs(variant, batch):
    tensors = list(variant.predict(batch).values())
    if isinstance(variant, DialogueVariant):
        tensors.append(variant.log_likelihood(batch))
    if isinstance(variant, Annotator):
        tensors.append(variant.predict_causes(batch))
    if isinstance(variant, TextClassifier):
        tensors.extend(variant.predict_response(batch).values())
    return tensors


def check_truth_is_not_used(variant, batch):
    variant.eval()
    other = {
        **batch.tensors,
        "emotion": (batch["emotion"] + 1) % len(variant.data_info.emotions),
        "response_label": (batch["response_label"] + 1) % len(LABELS),
    }
    changed = dataclasses.replace(batch, tensors=other)
    for one, two in zip(outputs(variant, batch), outputs(variant, changed), strict=True):
        assert torch.equal(one, two), "the true label is looked at"


def check_a_batch_gives_what_its_samples_give(variant, batch):
    variant.eval()
    together = outputs(variant, batch)
    for row in range(len(batch)):
        alone = outputs(variant, rows_of(batch, [row]))
        for one, many in zip(alone, together, strict=True):
            assert torch.allclose(one[0], many[row, : one.shape[1]], atol=1e-4)


@torch.no_grad()
def check_steps_equal_all_at_once(variant, batch):
    """Feeding the response token by token, with caches, gives its log-likelihood."""
    variant.eval()
    response = batch["response"]
    state = variant.encode(batch)
    rows = torch.arange(len(response))
    newest = response.new_full((len(response),), variant.data_info.specials["<sos>"])
    stepwise = torch.zeros(response.shape)
    for place in range(response.shape[1]):
        logits, state = variant.next_logits(newest, state)
        newest = response[rows, place]
        chosen = logits.log_softmax(dim=-1).gather(1, newest[:, None]).squeeze(1)
        stepwise[rows, place] = chosen.masked_fill(newest == 0, 0.0)
        if place == 2:  # rows that change places go on as if nothing had happened
            order = torch.arange(len(response)).flip(0)
            state, rows, newest = variant.select(state, order), rows[order], newest[order]
    assert torch.allclose(stepwise, variant.log_likelihood(batch), atol=1e-4)


@torch.no_grad()
def check_likelihood_term(variant, batch):
    """Perplexity may be read off the loss term that is said to be the likelihood."""
    variant.eval()
    terms = {
        name: term for _, _, terms in stage_losses(variant, batch) for name, term in terms.items()
    }
    if variant.likelihood_term is not None:
        expected = -variant.log_likelihood(batch).sum() / batch.tokens
        assert torch.allclose(terms[variant.likelihood_term], expected, rtol=1e-5)


def check_answers_are_text(model: Model, batch):
    model.variant.eval()
    for method in ("greedy", "beam", "topk", "nucleus"):
        answers = decode(model.variant, batch, Decoding(method=method, max_tokens=8))
        assert len(answers) == len(batch)
        for answer in answers:
            assert len(answer) <= 8
            assert "<" not in " ".join(model.vocabulary.tokens[token] for token in answer)


def likelihood_stages(variant: Variant):
    """The stages that learn from data alone: against critics nothing is learned by heart."""
    return [stage for stage in variant.stages() if FOLLOWED not in stage.streams]


def train(
    variant: Variant, batches, *, steps: int, rate: float = 3e-3, enough: float = 0.0
) -> dict[str, float]:
    """A plain loop that follows the stages; `batches` are taken in turn. The last losses. A stage
    is over when all that it learns is below `enough`."""
    last: dict[str, float] = {}
    variant.train()
    for stage in likelihood_stages(variant):
        optimizers = {
            player: torch.optim.AdamW(parameters_of(variant, parts), lr=rate, weight_decay=0.01)
            for player, parts in stage.players.items()
        }
        for step in range(steps):
            progress = Progress(step=step, fraction=step / steps)
            for update in stage.updates:
                optimizer = optimizers[update.player]
                with trainable_only(variant, stage.players[update.player]):
                    batch = batches[step % len(batches)]
                    losses = getattr(variant, update.losses)(streams(stage, batch), progress)
                    optimizer.zero_grad()
                    total_loss(update, losses).backward()
                    nn.utils.clip_grad_norm_(
                        parameters_of(variant, stage.players[update.player]), 1.0
                    )
                    optimizer.step()
                last.update({name: float(term.detach()) for name, term in losses.items()})
            if all(last[name] < enough for name in learned(stage)):
                break
    return last


def learned(stage: Stage) -> set[str]:
    """The terms that are to become small; a divergence is the price of knowing something."""
    names = {name for update in stage.updates for name in update.weights}
    return {name for name in names if not name.startswith("divergence")}


def check_learns_by_heart(variant, batch, *, steps=250):
    few = rows_of(batch, range(6))
    losses = train(variant, [few], steps=steps, enough=0.3)
    for stage in likelihood_stages(variant):
        for name in learned(stage):
            assert losses[name] < 0.3, f"{name} is still {losses[name]:.2f}"
