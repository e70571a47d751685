"""EmpDG: emotion words, both encoders, and the gradient from the critics to the generator."""

import dataclasses

import polars as pl
import pytest
import torch

from attune.models.base import FOLLOWED, PAIRED, Batch, Progress
from attune.models.critics import Critic, CriticCondition, EmbeddedUtterance
from attune.platform.batching.encoding import Ragged, encoded_with_next_turn
from attune.platform.core.errors import UsageError
from attune.platform.text.emotion_words import EmotionWords
from attune.platform.text.lexicons import Lexicon
from attune.platform.training import settings
from attune.platform.training.updates import train_only_updated, update_loss
from tests.contract import list_parameters, select_rows

LEXICON = Lexicon(words=frozenset({"job", "excited"}))


def stages_by_name(variant):
    return {stage.name: stage for stage in variant.stages()}


def adversarial_losses(variant, batch):
    return variant.empdg_adversarial_losses({FOLLOWED: batch}, Progress())


def generator_parts(variant):
    return stages_by_name(variant)["adversarial"].players["generator"]


def test_emotion_words_are_lexicon_words_and_adjectives_in_order():
    texts = ["i am so excited , what a wonderful job !", "the table is there .", None]
    emotion_words = EmotionWords(LEXICON).find_emotion_words(pl.Series(texts))
    assert emotion_words.to_list() == ["excited wonderful job", "", None]


def test_emotion_words_follow_lab(test_samples, encode_samples, vocabulary):
    columns = encode_samples(test_samples)
    tokens = vocabulary.tokens
    for row in range(0, test_samples.height, 97):
        emotion_words = columns["emotion_words"].pad([row])[0].tolist()
        context = [tokens[n] for n in columns["context"].pad([row])[0].tolist()]
        assert tokens[emotion_words[0]] == "<lab>"
        words = [tokens[n] for n in emotion_words[1:]]
        remaining = iter(context)
        assert all(word in remaining for word in words), "they are in the order of the text"
    replies = columns["next_turn"].lengths > 0
    assert ((columns["next_turn_emotion_words"].lengths > 0) == replies).all()
    assert (columns["response_emotion_words"].lengths >= 1).all()
    assert (columns["emotion_words"].lengths > 1).mean() > 0.5


def test_followed_samples_have_a_next_turn(test_columns):
    answered = encoded_with_next_turn(test_columns)
    count = int((test_columns["next_turn"].lengths > 0).sum())
    assert 0 < len(answered["index"]) == count < len(test_columns["index"])
    rows = answered["index"][:5]
    for name, column in answered.items():
        if isinstance(column, Ragged):
            assert column.pad([0, 1, 2, 3, 4]).equal(test_columns[name].pad(rows)), name


def test_the_generator_gets_a_gradient_from_the_critics(build, batch):
    """In the public code the adversarial loss is a Python number, without a gradient."""
    variant = build("empdg").variant
    with train_only_updated(variant, generator_parts(variant)):
        adversarial_losses(variant, batch)["adversarial"].backward()
    for part in ("decoder", "output", "encoder", "emotional_encoder", "signal"):
        grads = [p.grad for p in getattr(variant, part).parameters() if p.grad is not None]
        assert any(grad.abs().sum() > 0 for grad in grads), part
    assert all(p.grad is None for p in variant.critics.parameters())


def test_each_critic_gives_a_gradient(build, batch):
    variant = build("empdg").variant
    for silenced in ("semantic", "emotional"):
        for name, critic in variant.critics.items():
            critic.score_head.weight.data.fill_(0.0 if name == silenced else 0.5)
        variant.zero_grad()
        torch.manual_seed(0)
        adversarial_losses(variant, batch)["adversarial"].backward()
        assert variant.output.bias.grad.abs().sum() > 0, silenced


def test_the_adversarial_loss_changes_the_update(build, batch):
    """One step of the generator, with and without the adversarial loss."""
    weights = {}
    for weight in (1.0, 0.0):
        variant = build("empdg", adversarial_weight=weight).variant
        update = stages_by_name(variant)["adversarial"].updates[1]
        parameters = list_parameters(variant, generator_parts(variant))
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        with train_only_updated(variant, generator_parts(variant)):
            torch.manual_seed(0)
            update_loss(update, adversarial_losses(variant, batch)).backward()
            optimizer.step()
        weights[weight] = variant.decoder.layers[0].feed_forward[0].weight.detach().clone()
    assert not torch.equal(weights[1.0], weights[0.0])


def test_sampled_words_have_straight_through_gradients(build):
    """The value is the vector of the sampled word, the gradient that of the softmax."""
    variant = build("empdg", gumbel_temperature=0.5).variant.eval()
    hidden = torch.randn(5, variant.config.width, requires_grad=True)
    tokens, vectors = variant._sample_words(hidden)
    table = variant.embedding.table.weight.detach()
    logits = variant.output.logits(hidden)
    assert tokens.equal(logits.argmax(dim=1))
    assert torch.allclose(vectors, table[tokens], atol=1e-6)
    direction = torch.randn_like(vectors)
    [gradient] = torch.autograd.grad((vectors * direction).sum(), hidden)
    soft = (logits / 0.5).softmax(dim=1) @ table
    [expected] = torch.autograd.grad((soft * direction).sum(), hidden)
    assert torch.allclose(gradient, expected, atol=1e-6)


def test_words_are_sampled_with_their_probabilities(build):
    variant = build("empdg").variant.train()
    hidden = torch.randn(1, variant.config.width).expand(4000, -1)
    with torch.no_grad():
        variant.output.bias[20:23] += 8.0
        tokens, _ = variant._sample_words(hidden)
        expected = variant.output.logits(hidden[:1]).softmax(dim=1)[0, 20:23]
    frequencies = torch.stack([(tokens == number).float().mean() for number in range(20, 23)])
    assert torch.allclose(frequencies, expected, atol=0.03)


def test_critics_learn_to_separate_gold_from_generated(build, batch):
    """With a large penalty weight, their gradient norms stay close to 1."""
    torch.manual_seed(0)
    variant = build("empdg", penalty_weight=100.0).variant.train()
    update = stages_by_name(variant)["critics"].updates[0]
    optimizer = torch.optim.Adam(variant.critics.parameters(), lr=3e-3)
    history = []
    for _ in range(60):
        with train_only_updated(variant, ("critics",)):
            terms = variant.empdg_critic_losses({FOLLOWED: batch}, Progress())
            optimizer.zero_grad()
            update_loss(update, terms).backward()
            optimizer.step()
        history.append({name: float(term.detach()) for name, term in terms.items()})
    for name in variant.critics:
        assert history[-1][f"wasserstein_{name}"] > history[0][f"wasserstein_{name}"] + 0.05, name
        assert history[-1][f"penalty_{name}"] < 0.3 < history[0][f"penalty_{name}"], name
    both = sum(history[-1][f"wasserstein_{name}"] for name in variant.critics)
    assert (
        both / 1.6 < history[-1]["wasserstein"] <= both * 1.00001
    )  # a gradient norm of 1.55 at most


def test_the_gradient_norm_at_the_interpolation():
    """It equals the norm of finite differences."""
    torch.manual_seed(0)
    critic = Critic(6, 8).double().eval()
    gold, generated, reply = (
        EmbeddedUtterance(
            vectors=torch.randn(1, n, 6).double(), mask=torch.ones(1, n, dtype=torch.bool)
        )
        for n in (4, 3, 2)
    )
    condition = CriticCondition(feedback=reply, context=torch.randn(1, 8).double())
    _, gradient_norm = critic.compare(gold, generated, condition)
    with torch.no_grad():
        longer = EmbeddedUtterance(
            vectors=torch.cat([generated.vectors, torch.zeros(1, 1, 6).double()], dim=1),
            mask=torch.tensor([[True, True, True, False]]),
        )
        middle = (critic._encode_words(gold) + critic._encode_words(longer)) / 2
        feedback, step = critic._encode_feedback(reply), 1e-6
        gradient = torch.zeros_like(middle)
        for place in range(4):
            for number in range(8):
                moved = middle.clone()
                moved[0, place, number] += step
                scores = [
                    critic._score_states(states, gold.mask, feedback, condition.context)
                    for states in (moved, middle)
                ]
                gradient[0, place, number] = (scores[0] - scores[1]) / step
    assert float(gradient_norm) == pytest.approx(gradient.norm().item(), rel=1e-4)


def test_the_normalised_score_does_not_depend_on_the_scale_of_a_critic():
    """A gradient norm above 1 is normalised to 1."""
    critic = Critic(6, 8).double().train()
    reply = EmbeddedUtterance(
        vectors=torch.randn(2, 3, 6).double(), mask=torch.ones(2, 3, dtype=torch.bool)
    )
    condition = CriticCondition(feedback=reply, context=torch.randn(2, 8).double())
    vectors = torch.randn(2, 4, 6).double().requires_grad_()
    response = EmbeddedUtterance(vectors=vectors, mask=torch.ones(2, 4, dtype=torch.bool))

    def scale_and_score(factor):
        with torch.no_grad():
            critic.score_head.weight.mul_(factor)
        score = critic.normalised_score(response, condition)
        return score.detach(), torch.autograd.grad(score.sum(), vectors)[0]

    assert torch.equal(
        scale_and_score(1e-3)[0], critic(response, condition)
    )  # a gradient norm below 1
    (score, gradient), (larger_score, larger_gradient) = scale_and_score(1e6), scale_and_score(10.0)
    assert torch.allclose(score, larger_score)
    assert torch.allclose(gradient, larger_gradient)


def test_critics_depend_on_the_next_turn(build, batch):
    variant = build("empdg").variant.eval()
    other = {**batch.tensors, "next_turn": batch["next_turn"].flip(0)}
    swapped = dataclasses.replace(batch, tensors=other)
    one, two = (variant.empdg_critic_losses({FOLLOWED: b}, Progress()) for b in (batch, swapped))
    assert one["wasserstein_semantic"] != two["wasserstein_semantic"]
    assert one["wasserstein_emotional"] == two["wasserstein_emotional"]


def test_the_emotional_critic_reads_emotion_words_only(build):
    variant = build("empdg").variant
    emotional = variant.is_emotion_word.nonzero().flatten()
    plain = (~variant.is_emotion_word).nonzero().flatten()[20:]
    tokens = torch.stack([plain[0], emotional[0], plain[1], emotional[1], plain[2]])
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    table = variant._word_vectors()
    critic_input = variant._build_critic_input(mask, tokens, table[tokens], "emotional")
    label = table[variant.data_info.specials["<lab>"]]
    assert critic_input.mask.tolist() == [[True, True, True], [True, False, False]]
    assert critic_input.vectors[0].equal(
        torch.stack([label, table[emotional[0]], table[emotional[1]]])
    )
    assert critic_input.vectors[1, 0].equal(label)
    assert not critic_input.vectors[1, 1:].any()


@torch.no_grad()
def test_context_and_emotion_words_are_used(build, batch):
    variant = build("empdg").variant.eval()
    for name in ("context", "emotion_words"):
        flipped = dataclasses.replace(batch, tensors={**batch.tensors, name: batch[name].flip(0)})
        if name == "context":
            roles = {"context_roles": batch["context_roles"].flip(0)}
            flipped = dataclasses.replace(flipped, tensors={**flipped.tensors, **roles})
        assert not torch.equal(variant.log_likelihood(batch), variant.log_likelihood(flipped)), name
        one, other = (variant.predict(b)["emotion"] for b in (batch, flipped))
        assert not torch.equal(one, other), name


def test_ablations_lack_their_modules(build, batch):
    whole = dict(build("empdg").variant.named_parameters())
    no_critics = build("empdg-no-discriminators").variant
    assert [stage.name for stage in no_critics.stages()] == ["generator"]
    assert {n for n in whole if not n.startswith("critics")} == {
        name for name, _ in no_critics.named_parameters()
    }
    coarse = build("empdg-no-multiresolution").variant.eval()
    assert list(coarse.critics) == ["semantic"]
    assert not any("emotional" in name for name, _ in coarse.named_parameters())
    other = {**batch.tensors, "emotion_words": batch["emotion_words"].flip(0)}
    with torch.no_grad():
        one, two = (
            coarse.log_likelihood(b)
            for b in (batch, Batch(tensors=other, samples=batch.samples, tokens=batch.tokens))
        )
    assert torch.equal(one, two)


def test_updates_of_the_adversarial_stage(build):
    stage = stages_by_name(build("empdg", critic_steps=2, generator_steps=3).variant)["adversarial"]
    assert [(u.player, u.repeat) for u in stage.updates] == [("critics", 2), ("generator", 3)]
    assert stages_by_name(build("empdg").variant)["adversarial"].updates[1].repeat == 5
    for overrides in ({"critic_steps": "0"}, {"gumbel_temperature": "0"}):
        with pytest.raises(UsageError, match="expected"):
            settings.configure("empdg", "tiny", overrides)


@torch.no_grad()
def test_explanations(build, batch):
    variant = build("empdg").variant.eval()
    explanations = variant.explain(batch)
    for row, explanation in enumerate(explanations):
        alone = variant.explain(select_rows(batch, [row]))[0]
        num_words = int((batch["context"][row] != 0).sum()) - 1
        num_emotion_words = int((batch["emotion_words"][row] != 0).sum()) - 1
        num_answer_words = int((batch["response"][row] != 0).sum()) - 1
        attention = explanation.attention
        assert [len(r) for r in attention["context"]] == [num_words] * num_answer_words
        assert [len(r) for r in attention["emotion words"]] == [
            num_emotion_words
        ] * num_answer_words
        for one, two in zip(attention["context"], attention["emotion words"], strict=True):
            assert 0 < sum(one) + sum(two) <= 1 + 1e-5  # the remainder is on <cls> and <lab>
        assert explanation.scores == pytest.approx(alone.scores, abs=1e-4)
    without_next_turn = {
        n: t[:, :0] if n.startswith("next_turn") else t for n, t in batch.tensors.items()
    }
    unanswered = Batch(tensors=without_next_turn, samples=batch.samples, tokens=batch.tokens)
    assert all(e.scores is None for e in variant.explain(unanswered))


def test_only_the_likelihood_stage_uses_all_samples(build):
    streams = {
        name: stage.streams for name, stage in stages_by_name(build("empdg").variant).items()
    }
    expected = {"generator": (PAIRED,), "critics": (FOLLOWED,), "adversarial": (FOLLOWED,)}
    assert streams == expected
    [first, *_] = build("empdg", all_samples=False).variant.stages()
    assert first.streams == (FOLLOWED,)
