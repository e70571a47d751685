"""The contract of all variants, as functions that raise AssertionError if it is violated.

`test_variants.py` applies them to all variants. `test_contract.py` applies them to variants with a
fault each, to show that each function detects its fault.
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
from attune.platform.training.updates import train_only_updated, update_loss

EARLY = Progress(step=1, fraction=0.1)
"""After the first step, at which annealed terms have the weight 0."""


def compute_stage_losses(variant: Variant, batch: Batch):
    """Yield each update of each stage, with its loss terms."""
    for stage in variant.stages():
        for update in stage.updates:
            with train_only_updated(variant, stage.players[update.player]):
                method = getattr(variant, update.losses)
                yield stage, update, method(repeat_for_streams(stage, batch), EARLY)


def repeat_for_streams(stage: Stage, batch: Batch):
    """Return the same batch for each stream of a stage."""
    return dict.fromkeys(stage.streams, batch)


def list_parameters(variant: Variant, parts):
    """Return the parameters of some modules of a variant, each once."""
    parameters = {id(p): p for part in parts for p in getattr(variant, part).parameters()}
    return list(parameters.values())


def select_rows(batch: Batch, rows) -> Batch:
    """Return some rows of a batch, without padding that only other rows need."""
    tensors = {}
    for name, tensor in batch.tensors.items():
        part = tensor[rows]
        if part.dim() > 1:
            part = part[:, : max(int((part != 0).sum(dim=1).max()), 0)]
        tensors[name] = part
    for name in ("context_turns", "context_causes"):  # in these columns 0 is not only padding
        tensors[name] = batch[name][rows][:, : tensors["context"].shape[1]]
    tokens = float((tensors["response"] != 0).sum())
    return Batch(tensors=tensors, samples=float(len(rows)), tokens=tokens)


def check_loss_terms_have_gradients(variant, batch):
    for stage, update, losses in compute_stage_losses(variant, batch):
        assert set(update.weights) <= set(losses), f"{stage.name}: {set(update.weights)}"
        for name, term in losses.items():
            assert isinstance(term, torch.Tensor), f"{name} is a {type(term).__name__}"
            assert term.dim() == 0, name
            assert torch.isfinite(term), name
            if name in update.weights:
                assert term.requires_grad, f"{name} has no gradient"


def check_losses_build_no_modules(variant, batch):
    built = []
    original_init = nn.Module.__init__

    def recording_init(self, *arguments, **named):
        built.append(type(self).__name__)
        original_init(self, *arguments, **named)

    nn.Module.__init__ = recording_init
    try:
        for _ in compute_stage_losses(variant, batch):
            pass
    finally:
        nn.Module.__init__ = original_init
    assert not built, built


def check_updates_change_only_their_player(variant, batch):
    covered = set()
    for stage in variant.stages():
        for update in stage.updates:
            parts = stage.players[update.player]
            nn.ModuleDict({part: getattr(variant, part) for part in parts})  # as in the engines
            parameters = list_parameters(variant, parts)
            own = {id(p) for p in parameters}
            covered |= own
            before = {name: p.detach().clone() for name, p in variant.named_parameters()}
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            with train_only_updated(variant, parts):
                losses = getattr(variant, update.losses)(repeat_for_streams(stage, batch), EARLY)
                variant.zero_grad()
                update_loss(update, losses).backward()
                for name, p in variant.named_parameters():
                    if id(p) in own:
                        assert p.grad is not None, f"{name} gets no gradient"
                        assert p.grad.any(), f"{name} gets a gradient of zeros"
                optimizer.step()
            for name, p in variant.named_parameters():
                if id(p) not in own:
                    assert torch.equal(p, before[name]), f"{name} is not {update.player}'s"
                assert p.requires_grad, f"{name} is still frozen"
    untrained = [name for name, p in variant.named_parameters() if id(p) not in covered]
    assert not untrained, f"no player has {untrained}"


def check_losses_of_ranks_average_to_the_whole(variant, batch):
    """The mean of two ranks' losses is the loss of the whole batch: terms use the batch's divisors.

    The ranks have different numbers of samples; otherwise means over the samples of a rank would
    pass as well.
    """
    variant.eval()
    third = len(batch) // 3
    ranks = [select_rows(batch, rows) for rows in (range(third), range(third, len(batch)))]
    tokens = sum(rank.tokens for rank in ranks) / 2
    ranks = [dataclasses.replace(r, samples=len(batch) / 2, tokens=tokens) for r in ranks]
    whole = [losses for _, _, losses in compute_stage_losses(variant, batch)]
    by_rank = [[losses for _, _, losses in compute_stage_losses(variant, rank)] for rank in ranks]
    for losses, (first, second) in zip(whole, zip(*by_rank, strict=True), strict=True):
        for name, term in losses.items():
            mean = (first[name] + second[name]) / 2
            assert torch.allclose(term, mean, rtol=1e-4, atol=1e-5), name


def switch_off_dropout(variant):
    """Set the rate of all dropout to 0, as the trainer does at the end of a stage."""
    for module in variant.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def check_dropout_can_be_switched_off(noisy, plain, batch):
    """A variant whose dropout is switched off has the losses of one that is built without it."""

    def training_losses(variant):
        torch.manual_seed(0)
        return [
            float(term.detach())
            for _, _, losses in compute_stage_losses(variant.train(), batch)
            for term in losses.values()
        ]

    switch_off_dropout(plain)  # the dropout of a pretrained encoder is not a setting
    expected = training_losses(plain)
    assert training_losses(noisy) != expected or noisy.config == plain.config
    switch_off_dropout(noisy)
    assert training_losses(noisy) == expected


def check_saved_model_is_restored(model: Model, batch, folder: Path):
    model.variant.eval()
    save_model(model, folder)
    loaded = load_model(folder)
    assert loaded.name == model.name
    assert loaded.vocabulary.tokens == model.vocabulary.tokens
    assert loaded.variant.config == model.variant.config
    for saved, restored in zip(
        compute_outputs(model.variant, batch), compute_outputs(loaded.variant, batch), strict=True
    ):
        assert torch.equal(saved, restored)


@torch.no_grad()
def compute_outputs(variant, batch):
    """Return the predictions of a variant, and log-likelihoods if it has any."""
    tensors = list(variant.predict(batch).values())
    if isinstance(variant, DialogueVariant):
        tensors.append(variant.log_likelihood(batch))
    if isinstance(variant, Annotator):
        tensors.append(variant.predict_causes(batch))
    if isinstance(variant, TextClassifier):
        tensors.extend(variant.predict_response(batch).values())
    return tensors


def check_true_labels_are_not_used(variant, batch):
    variant.eval()
    relabelled = {
        **batch.tensors,
        "emotion": (batch["emotion"] + 1) % len(variant.data_info.emotions),
        "response_label": (batch["response_label"] + 1) % len(LABELS),
    }
    changed = dataclasses.replace(batch, tensors=relabelled)
    for before, after in zip(
        compute_outputs(variant, batch), compute_outputs(variant, changed), strict=True
    ):
        assert torch.equal(before, after), "a true label is read"


def check_outputs_do_not_depend_on_the_batch(variant, batch):
    variant.eval()
    batched = compute_outputs(variant, batch)
    for row in range(len(batch)):
        single = compute_outputs(variant, select_rows(batch, [row]))
        for expected, actual in zip(single, batched, strict=True):
            assert torch.allclose(expected[0], actual[row, : expected.shape[1]], atol=1e-4)


@torch.no_grad()
def check_stepwise_decoding_gives_the_likelihood(variant, batch):
    """Decoding the response token by token, with caches, gives its log-likelihood."""
    variant.eval()
    response = batch["response"]
    state = variant.encode(batch)
    rows = torch.arange(len(response))
    newest = response.new_full((len(response),), variant.data_info.specials["<sos>"])
    stepwise = torch.zeros(response.shape)
    for position in range(response.shape[1]):
        logits, state = variant.next_logits(newest, state)
        newest = response[rows, position]
        log_probs = logits.log_softmax(dim=-1).gather(1, newest[:, None]).squeeze(1)
        stepwise[rows, position] = log_probs.masked_fill(newest == 0, 0.0)
        if position == 2:  # reordering the rows has no effect on the results
            order = torch.arange(len(response)).flip(0)
            state, rows, newest = variant.select(state, order), rows[order], newest[order]
    assert torch.allclose(stepwise, variant.log_likelihood(batch), atol=1e-4)


@torch.no_grad()
def check_likelihood_term(variant, batch):
    """The declared likelihood term equals the mean negative log-likelihood."""
    variant.eval()
    terms = {
        name: term
        for _, _, terms in compute_stage_losses(variant, batch)
        for name, term in terms.items()
    }
    if variant.likelihood_term is not None:
        expected = -variant.log_likelihood(batch).sum() / batch.tokens
        assert torch.allclose(terms[variant.likelihood_term], expected, rtol=1e-5)


def check_answers_have_no_special_tokens(model: Model, batch):
    model.variant.eval()
    for method in ("greedy", "beam", "topk", "nucleus"):
        answers = decode(model.variant, batch, Decoding(method=method, max_tokens=8))
        assert len(answers) == len(batch)
        for answer in answers:
            assert len(answer) <= 8
            assert "<" not in " ".join(model.vocabulary.tokens[token] for token in answer)


def select_likelihood_stages(variant: Variant):
    """Return the stages without critics, in which samples can be memorised."""
    return [stage for stage in variant.stages() if FOLLOWED not in stage.streams]


def train_on_batches(
    variant: Variant, batches, *, steps: int, rate: float = 3e-3, target: float = 0.0
) -> dict[str, float]:
    """Train a variant in a plain loop over its stages, with the batches in turn.

    Returns the last losses. A stage ends when all terms that it minimises are below the target.
    """
    last_losses: dict[str, float] = {}
    variant.train()
    for stage in select_likelihood_stages(variant):
        optimizers = {
            player: torch.optim.AdamW(list_parameters(variant, parts), lr=rate, weight_decay=0.01)
            for player, parts in stage.players.items()
        }
        for step in range(steps):
            progress = Progress(step=step, fraction=step / steps)
            for update in stage.updates:
                optimizer = optimizers[update.player]
                with train_only_updated(variant, stage.players[update.player]):
                    batch = batches[step % len(batches)]
                    losses = getattr(variant, update.losses)(
                        repeat_for_streams(stage, batch), progress
                    )
                    optimizer.zero_grad()
                    update_loss(update, losses).backward()
                    nn.utils.clip_grad_norm_(
                        list_parameters(variant, stage.players[update.player]), 1.0
                    )
                    optimizer.step()
                last_losses |= {name: float(term.detach()) for name, term in losses.items()}
            if all(last_losses[name] < target for name in minimised_terms(stage)):
                break
    return last_losses


def minimised_terms(stage: Stage) -> set[str]:
    """Return the loss terms that become small in training: all but KL divergences."""
    names = {name for update in stage.updates for name in update.weights}
    return {name for name in names if not name.startswith("divergence")}


def check_samples_are_memorised(variant, batch, *, steps=250):
    few = select_rows(batch, range(6))
    losses = train_on_batches(variant, [few], steps=steps, target=0.3)
    for stage in select_likelihood_stages(variant):
        for name in minimised_terms(stage):
            assert losses[name] < 0.3, f"{name} is still {losses[name]:.2f}"
