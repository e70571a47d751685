"""EmpDG: emotion words, the two contexts, and critics that really teach the generator."""

import dataclasses

import polars as pl
import pytest
import torch

from attune.models.base import FOLLOWED, PAIRED, Batch, Progress
from attune.models.critics import Critic, Spoken, Surroundings
from attune.platform.batching.encoding import Ragged, followed
from attune.platform.core.errors import UsageError
from attune.platform.text.emotion_words import EmotionWords
from attune.platform.text.lexicons import Lexicon
from attune.platform.training import settings
from attune.platform.training.updates import total_loss, trainable_only
from tests.contract import parameters_of, rows_of

LEXICON = Lexicon(words=frozenset({"job", "excited"}))


def stages_of(variant):
    return {stage.name: stage for stage in variant.stages()}


def adversarial(variant, batch):
    return variant.adversarial_losses({FOLLOWED: batch}, Progress())


def generator_parts(variant):
    return stages_of(variant)["adversarial"].players["generator"]


def test_emotion_words_are_the_lexicons_and_adjectives_in_order():
    texts = ["i am so excited , what a wonderful job !", "the table is there .", None]
    found = EmotionWords(LEXICON).find(pl.Series(texts))
    assert found.to_list() == ["excited wonderful job", "", None]


def test_emotion_words_stand_behind_lab(test_samples, encode_samples, vocabulary):
    columns = encode_samples(test_samples)
    tokens = vocabulary.tokens
    for row in range(0, test_samples.height, 97):
        found = columns["emotion_words"].padded([row])[0].tolist()
        context = [tokens[n] for n in columns["context"].padded([row])[0].tolist()]
        assert tokens[found[0]] == "<lab>"
        words = [tokens[n] for n in found[1:]]
        remaining = iter(context)
        assert all(word in remaining for word in words), "in the order of the text"
    replies = columns["next_turn"].lengths > 0
    assert ((columns["next_turn_emotion_words"].lengths > 0) == replies).all()
    assert (columns["response_emotion_words"].lengths >= 1).all()
    assert (columns["emotion_words"].lengths > 1).mean() > 0.5


def test_only_answered_samples_are_followed(test_columns):
    answered = followed(test_columns)
    count = int((test_columns["next_turn"].lengths > 0).sum())
    assert 0 < len(answered["index"]) == count < len(test_columns["index"])
    rows = answered["index"][:5]
    for name, column in answered.items():
        if isinstance(column, Ragged):
            assert column.padded([0, 1, 2, 3, 4]).equal(test_columns[name].padded(rows)), name


def test_the_generator_is_taught_by_the_critics(build, batch):
    """The fault of the public code: there the critics' loss is a number, without a gradient."""
    variant = build("empdg").variant
    with trainable_only(variant, generator_parts(variant)):
        adversarial(variant, batch)["adversarial"].backward()
    for part in ("decoder", "output", "encoder", "emotional_encoder", "signal"):
        grads = [p.grad for p in getattr(variant, part).parameters() if p.grad is not None]
        assert any(grad.abs().sum() > 0 for grad in grads), part
    assert all(p.grad is None for p in variant.critics.parameters())


def test_each_critic_teaches(build, batch):
    variant = build("empdg").variant
    for silenced in ("semantic", "emotional"):
        heard = [name for name in variant.critics if name != silenced]
        for name, critic in variant.critics.items():
            critic.verdict.weight.data.fill_(0.0 if name == silenced else 0.5)
        variant.zero_grad()
        torch.manual_seed(0)
        adversarial(variant, batch)["adversarial"].backward()
        assert variant.output.bias.grad.abs().sum() > 0, heard


def test_without_the_critics_the_update_is_another(build, batch):
    """One step of the generator, with what critics say in its loss and without."""
    moved = {}
    for weight in (1.0, 0.0):
        variant = build("empdg", adversarial_weight=weight).variant
        update = stages_of(variant)["adversarial"].updates[1]
        mine = parameters_of(variant, generator_parts(variant))
        optimizer = torch.optim.SGD(mine, lr=0.1)
        with trainable_only(variant, generator_parts(variant)):
            torch.manual_seed(0)
            total_loss(update, adversarial(variant, batch)).backward()
            optimizer.step()
        moved[weight] = variant.decoder.layers[0].feed_forward[0].weight.detach().clone()
    assert not torch.equal(moved[1.0], moved[0.0])


def test_drawn_words_are_read_as_they_are_and_learned_as_chances(build):
    """Straight-through: forward the drawn word's vector, backward the softmax's."""
    variant = build("empdg", gumbel_temperature=0.5).variant.eval()
    hidden = torch.randn(5, variant.config.width, requires_grad=True)
    drawn, vectors = variant._drawn(hidden)
    table = variant.embedding.table.weight.detach()
    logits = variant.output.logits(hidden)
    assert drawn.equal(logits.argmax(dim=1))
    assert torch.allclose(vectors, table[drawn], atol=1e-6)
    direction = torch.randn_like(vectors)
    [found] = torch.autograd.grad((vectors * direction).sum(), hidden)
    soft = (logits / 0.5).softmax(dim=1) @ table
    [expected] = torch.autograd.grad((soft * direction).sum(), hidden)
    assert torch.allclose(found, expected, atol=1e-6)


def test_words_are_drawn_as_often_as_they_are_likely(build):
    variant = build("empdg").variant.train()
    hidden = torch.randn(1, variant.config.width).expand(4000, -1)
    with torch.no_grad():
        variant.output.bias[20:23] += 8.0
        drawn, _ = variant._drawn(hidden)
        expected = variant.output.logits(hidden[:1]).softmax(dim=1)[0, 20:23]
    found = torch.stack([(drawn == number).float().mean() for number in range(20, 23)])
    assert torch.allclose(found, expected, atol=0.03)


def test_critics_learn_to_tell_people_from_the_generator(build, batch):
    """And keep their slope near 1, where the penalty weighs enough."""
    torch.manual_seed(0)
    variant = build("empdg", penalty_weight=100.0).variant.train()
    update = stages_of(variant)["critics"].updates[0]
    optimizer = torch.optim.Adam(variant.critics.parameters(), lr=3e-3)
    found = []
    for _ in range(60):
        with trainable_only(variant, ("critics",)):
            terms = variant.critic_losses({FOLLOWED: batch}, Progress())
            optimizer.zero_grad()
            total_loss(update, terms).backward()
            optimizer.step()
        found.append({name: float(term.detach()) for name, term in terms.items()})
    for name in variant.critics:
        assert found[-1][f"wasserstein_{name}"] > found[0][f"wasserstein_{name}"] + 0.05, name
        assert found[-1][f"penalty_{name}"] < 0.3 < found[0][f"penalty_{name}"], name
    both = sum(found[-1][f"wasserstein_{name}"] for name in variant.critics)
    assert both / 1.6 < found[-1]["wasserstein"] <= both * 1.00001  # a slope of 1.55 at most


def test_the_penalty_is_of_the_slope_between_both():
    """Against the slope by differences, a state at a time."""
    torch.manual_seed(0)
    critic = Critic(6, 8).double().eval()
    person, generated, reply = (
        Spoken(words=torch.randn(1, n, 6).double(), real=torch.ones(1, n, dtype=torch.bool))
        for n in (4, 3, 2)
    )
    around = Surroundings(feedback=reply, context=torch.randn(1, 8).double())
    _, steepness = critic.compare(person, generated, around)
    with torch.no_grad():
        longer = Spoken(
            words=torch.cat([generated.words, torch.zeros(1, 1, 6).double()], dim=1),
            real=torch.tensor([[True, True, True, False]]),
        )
        middle = (critic._read(person) + critic._read(longer)) / 2
        feedback, step = critic._last(reply), 1e-6
        slope = torch.zeros_like(middle)
        for place in range(4):
            for number in range(8):
                moved = middle.clone()
                moved[0, place, number] += step
                scores = [
                    critic._score(states, person.real, feedback, around.context)
                    for states in (moved, middle)
                ]
                slope[0, place, number] = (scores[0] - scores[1]) / step
    assert float(steepness) == pytest.approx(slope.norm().item(), rel=1e-4)


def test_the_generator_hears_no_more_of_a_critic_that_shouts():
    """However steep a critic is, what it says weighs as if it were of steepness 1."""
    critic = Critic(6, 8).double().train()
    reply = Spoken(words=torch.randn(2, 3, 6).double(), real=torch.ones(2, 3, dtype=torch.bool))
    around = Surroundings(feedback=reply, context=torch.randn(2, 8).double())
    words = torch.randn(2, 4, 6).double().requires_grad_()
    said = Spoken(words=words, real=torch.ones(2, 4, dtype=torch.bool))

    def heard(factor):
        with torch.no_grad():
            critic.verdict.weight.mul_(factor)
        score = critic.judged(said, around)
        return score.detach(), torch.autograd.grad(score.sum(), words)[0]

    assert torch.equal(heard(1e-3)[0], critic(said, around))  # gentle enough
    (loud, moved), (louder, moved_more) = heard(1e6), heard(10.0)
    assert torch.allclose(loud, louder)
    assert torch.allclose(moved, moved_more)


def test_critics_listen_to_what_the_speaker_says_next(build, batch):
    variant = build("empdg").variant.eval()
    other = {**batch.tensors, "next_turn": batch["next_turn"].flip(0)}
    swapped = dataclasses.replace(batch, tensors=other)
    one, two = (variant.critic_losses({FOLLOWED: b}, Progress()) for b in (batch, swapped))
    assert one["wasserstein_semantic"] != two["wasserstein_semantic"]
    assert one["wasserstein_emotional"] == two["wasserstein_emotional"]


def test_the_emotional_critic_reads_marked_words_alone(build):
    variant = build("empdg").variant
    marked = variant.marked.nonzero().flatten()
    plain = (~variant.marked).nonzero().flatten()[20:]
    drawn = torch.stack([plain[0], marked[0], plain[1], marked[1], plain[2]])
    real = torch.tensor([[True, True, True, True], [True, False, False, False]])
    table = variant._word_vectors()
    said = variant._generated(real, drawn, table[drawn], "emotional")
    label = table[variant.data_info.specials["<lab>"]]
    assert said.real.tolist() == [[True, True, True], [True, False, False]]
    assert said.words[0].equal(torch.stack([label, table[marked[0]], table[marked[1]]]))
    assert said.words[1, 0].equal(label)
    assert not said.words[1, 1:].any()


@torch.no_grad()
def test_both_contexts_are_heard(build, batch):
    variant = build("empdg").variant.eval()
    for name in ("context", "emotion_words"):
        flipped = dataclasses.replace(batch, tensors={**batch.tensors, name: batch[name].flip(0)})
        if name == "context":
            roles = {"context_roles": batch["context_roles"].flip(0)}
            flipped = dataclasses.replace(flipped, tensors={**flipped.tensors, **roles})
        assert not torch.equal(variant.log_likelihood(batch), variant.log_likelihood(flipped)), name
        one, other = (variant.predict(b)["emotion"] for b in (batch, flipped))
        assert not torch.equal(one, other), name


def test_ablations_leave_out_what_they_say(build, batch):
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


def test_steps_of_the_game(build):
    stage = stages_of(build("empdg", critic_steps=2, generator_steps=3).variant)["adversarial"]
    assert [(u.player, u.repeat) for u in stage.updates] == [("critics", 2), ("generator", 3)]
    assert stages_of(build("empdg").variant)["adversarial"].updates[1].repeat == 5
    for overrides in ({"critic_steps": "0"}, {"gumbel_temperature": "0"}):
        with pytest.raises(UsageError, match="expected"):
            settings.configure("empdg", "tiny", overrides)


@torch.no_grad()
def test_explanations(build, batch):
    variant = build("empdg").variant.eval()
    explanations = variant.explain(batch)
    for row, explanation in enumerate(explanations):
        alone = variant.explain(rows_of(batch, [row]))[0]
        words = int((batch["context"][row] != 0).sum()) - 1
        found = int((batch["emotion_words"][row] != 0).sum()) - 1
        said = int((batch["response"][row] != 0).sum()) - 1
        looked = explanation.attention
        assert [len(r) for r in looked["context"]] == [words] * said
        assert [len(r) for r in looked["emotion words"]] == [found] * said
        for one, two in zip(looked["context"], looked["emotion words"], strict=True):
            assert 0 < sum(one) + sum(two) <= 1 + 1e-5  # <cls> and <lab> have the rest
        assert explanation.scores == pytest.approx(alone.scores, abs=1e-4)
    silent = {n: t[:, :0] if n.startswith("next_turn") else t for n, t in batch.tensors.items()}
    nobody = Batch(tensors=silent, samples=batch.samples, tokens=batch.tokens)
    assert all(e.scores is None for e in variant.explain(nobody))


def test_likelihood_is_learned_from_all_and_the_rest_from_answered(build):
    streams = {name: stage.streams for name, stage in stages_of(build("empdg").variant).items()}
    expected = {"generator": (PAIRED,), "critics": (FOLLOWED,), "adversarial": (FOLLOWED,)}
    assert streams == expected
    [first, *_] = build("empdg", all_samples=False).variant.stages()
    assert first.streams == (FOLLOWED,)
