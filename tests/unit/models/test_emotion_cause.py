"""Emotion cause: what the reasoner marks, what gates let pass, and what ablations leave out."""

import dataclasses
import json

import numpy as np
import polars as pl
import pytest
import torch

from attune.models import all_variants
from attune.models.base import PAIRED, Batch, Progress
from attune.models.emotion_cause import GatedAttention, GatedDecoderLayer, drawn
from attune.platform.batching.encoding import Layout, Ragged, encode
from attune.platform.core.errors import DataError, UsageError
from attune.platform.data import bundled
from attune.platform.data.dataset_folder import read_samples
from attune.platform.data.prepare import prepare
from attune.platform.runs.model import load_model, save_model
from attune.platform.serving.responder import Responder
from attune.platform.text.lexicons import Lexicon
from attune.platform.training import settings, setup
from attune.platform.training.process_group import ProcessGroup
from attune.platform.training.updates import total_loss, trainable_only
from attune.platform.training.validation import compute_validation_metrics
from tests.contract import check_steps_equal_all_at_once, outputs

SOFT, HARD = "emotion-cause-soft", "emotion-cause-hard"
NAMES = sorted(name for name in all_variants() if name.startswith("emotion-cause"))


def stages_of(variant):
    return {stage.name: stage for stage in variant.stages()}


def joint(variant, batch, **progress):
    return variant.losses({PAIRED: batch}, Progress(**progress))


def changed(batch, **tensors):
    return dataclasses.replace(batch, tensors={**batch.tensors, **tensors})


def biased(variant, towards):
    """A reasoner that holds every word for the cause (or none)."""
    with torch.no_grad():
        variant.reasoner.cause.weight.zero_()
        variant.reasoner.cause.bias.copy_(torch.tensor([-towards, towards]))
    return variant


def test_the_names_are_those_of_the_paper():
    ablations = ("-lexicon", "-no-emotion", "-no-multitask")
    expected = {SOFT, HARD, "emotion-cause-no-cause"}
    expected |= {name + ablation for name in (SOFT, HARD) for ablation in ablations}
    assert set(NAMES) == expected


def test_marks_are_of_words_and_of_the_separators_behind_them(test_samples, vocabulary):
    layout = Layout(separators=True)
    columns = encode(test_samples, vocabulary, layout=layout, causes=True)
    separator = vocabulary.numbers["<sep>"]
    for row in range(0, test_samples.height, 97):
        marks = columns["context_causes"].pad([row])[0].tolist()
        context = columns["context"].pad([row])[0].tolist()
        turns = columns["context_turns"].pad([row])[0].tolist()
        causes = test_samples["context_causes"][row].to_list()
        assert marks[0] == 1
        assert marks[1:] == [int(causes[turn - 1]) for turn in turns[1:]]
        assert context.count(separator) == len(causes)
        assert context[-1] == separator
    assert {0, 1} == set(np.unique(columns["context_causes"].values))


def test_what_is_not_marked_is_unknown(test_samples, vocabulary):
    marked = pl.int_range(pl.len()) > 0
    some = test_samples.head(3).with_columns(pl.when(marked).then("context_causes"))
    columns = encode(some, vocabulary, layout=Layout(max_context=4), causes=True)
    marks = columns["context_causes"]
    assert marks.lengths.tolist() == columns["context"].lengths.tolist()
    assert set(marks.pad([0])[0, 1:].tolist()) == {-1}
    assert -1 not in marks.pad([1, 2])[:, 1:]
    assert "context_causes" not in encode(some, vocabulary)


@torch.no_grad()
def test_the_reasoner_knows_no_positions(build, batch):
    """One layer, one head; words in another order are the same words (appendix A)."""
    variant = build(SOFT, preset="paper", width=32, key_depth=64).variant.eval()
    assert len(variant.reasoner.encoder.layers) == 1
    assert variant.reasoner.encoder.layers[0].attention.num_heads == 1
    context, roles = batch["context"][:1], batch["context_roles"][:1]
    length = int((context != 0).sum())
    order = torch.cat([torch.tensor([0]), torch.arange(1, length).flip(0)])
    one = variant.reasoner(context[:, :length], roles[:, :length])
    other = variant.reasoner(context[:, order], roles[:, order])
    assert torch.allclose(one.emotion, other.emotion, atol=1e-5)
    assert torch.allclose(one.causes[:, order], other.causes, atol=1e-5)
    assert variant.reasoner.embedding.table.weight is not variant.embedding.table.weight


def test_the_reasoners_loss(build, batch):
    """Eq. 3-4 word by word: `<cls>`, padding and unknown marks do not count."""
    variant = build(SOFT).variant.eval()
    marks = batch["context_causes"].clone()
    marks[0, 1:4] = -1
    marks[1, 1:] = -1
    marked = changed(batch, context_causes=marks)
    terms = variant.reasoner_losses({PAIRED: marked}, Progress())
    reasoned = variant.reasoner(batch["context"], batch["context_roles"])
    causes, emotions = reasoned.causes.log_softmax(-1), reasoned.emotion.log_softmax(-1)
    cause = emotion = right = 0.0
    for row in range(len(batch)):
        emotion -= emotions[row, batch["emotion"][row]].item() / len(batch)
        known = [
            (causes[row, place, mark].item(), causes[row, place].argmax().item() == mark)
            for place, mark in enumerate(marks[row].tolist())
            if place > 0 and mark >= 0 and batch["context"][row, place] != 0
        ]
        if known:
            cause -= sum(value for value, _ in known) / len(known) / len(batch)
            right += sum(is_right for _, is_right in known) / len(known) / len(batch)
    assert terms["cause"].item() == pytest.approx(cause, rel=1e-4)
    assert terms["emotion"].item() == pytest.approx(emotion, rel=1e-4)
    assert terms["cause_accuracy"].item() == pytest.approx(right, rel=1e-4)


def test_joint_loss_is_the_sum_of_all_terms(build, batch):
    variant = build(SOFT, emotion_weight=2.0, cause_weight=3.0, response_weight=0.5).variant.eval()
    [update] = stages_of(variant)["joint"].updates
    terms = joint(variant, batch)
    expected = 0.5 * terms["nll"] + 2 * terms["emotion"] + 3 * terms["cause"]  # eq. 7
    assert torch.allclose(total_loss(update, terms), expected)
    [update] = stages_of(variant)["reasoner"].updates
    assert update.weights == {"emotion": 2.0, "cause": 3.0}
    assert all(weight == 1.0 for weight in build(SOFT).variant.loss_weights().values())


def test_gated_attention_is_equation_5():
    torch.manual_seed(0)
    attention = GatedAttention(12, 2, 8).double().eval()
    query, source = torch.randn(1, 3, 12).double(), torch.randn(1, 5, 12).double()
    gates = torch.tensor([[1.0, 0.0, 0.3, 1.0, 0.7]]).double()
    mask = torch.tensor([True, True, True, True, False])[None, None, None, :]
    keys, values = attention.project_kv(source)
    found = attention.through(query, keys, values, gates, mask)
    queries = attention._split_heads(attention.queries(query))
    for place in range(3):
        mixed = []
        for head in range(2):
            scores = [queries[0, head, place] @ keys[0, head, i] / 2.0 for i in range(4)]
            opened = torch.stack([gates[0, i] * scores[i].exp() for i in range(4)])
            weights = opened / opened.sum()
            assert weights[1] == 0.0
            mixed.append(sum(weights[i] * values[0, head, i] for i in range(4)))
        assert torch.allclose(found[0, place], attention.out(torch.cat(mixed)))


def test_a_share_that_rounds_to_nothing_is_no_division_by_it():
    attention = GatedAttention(4, 1, 4)
    for layer in (attention.queries, attention.keys):
        layer.weight.data.copy_(torch.eye(4))
    query, gates = torch.full((1, 1, 4), 30.0), torch.tensor([[1.0, 0.0]], requires_grad=True)
    source = torch.stack([torch.full((4,), -30.0), torch.full((4,), 30.0)])[None]
    mask = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    found = attention.through(query, *attention.project_kv(source), gates, mask)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(gates.grad).all()


@torch.no_grad()
def test_gated_attention_stands_above_the_cross_attention():
    """Its queries are what the cross attention gives."""
    torch.manual_seed(0)
    layer = GatedDecoderLayer(12, 2, 8, 16, 0.0).eval()
    hidden, source = torch.randn(2, 3, 12), torch.randn(2, 5, 12)
    mask, gates = torch.ones(2, 1, 1, 5, dtype=torch.bool), torch.rand(2, 5)
    remembered = layer.project_kv(source, gates)
    found, _ = layer(hidden, remembered, mask)
    after_self, _ = layer._self_attend(hidden, None)
    cross = layer.cross_attention
    crossed = after_self + cross.cross_attend(
        layer.cross_norm(after_self), *cross.project_kv(source), mask
    )
    gated = layer.gated_attention
    passed = crossed + gated.through(
        layer.gated_norm(crossed), *gated.project_kv(source), gates, mask
    )
    expected = passed + layer.feed_forward(layer.feed_forward_norm(passed))
    assert torch.allclose(found, expected, atol=1e-6)


@torch.no_grad()
def test_soft_gates_are_probabilities_and_hard_ones_labels(build, batch):
    soft = build(SOFT).variant.eval()
    words = soft.embed(batch)
    expected = words.reasoned.causes.softmax(dim=-1)[..., 1]
    assert torch.allclose(words.gates[:, 1:], expected[:, 1:], atol=1e-6)
    assert words.gates[:, 0].eq(1).all()
    middle = expected[:, 1:][batch["context"][:, 1:] != 0].median().item()
    hard = build(HARD, hard_threshold=middle).variant.eval()
    words = hard.embed(batch)
    expected = (words.reasoned.causes.softmax(dim=-1)[..., 1] >= middle).float()
    assert 0 < expected[:, 1:].mean() < 1
    assert words.gates[:, 1:].equal(expected[:, 1:])
    assert words.gates[:, 0].eq(1).all()


@torch.no_grad()
def test_closed_gates_leave_cls(build, batch):
    """No cause at all is no 0 / 0, and what lies behind closed gates is not seen."""
    variant = biased(build(HARD).variant.eval(), -20.0)
    values = variant.log_likelihood(batch)
    assert torch.isfinite(values).all()
    layer = variant.decoder.layers[0].gated_attention
    source = torch.randn(1, 4, variant.config.width)
    other = torch.cat([source[:, :1], torch.randn_like(source[:, 1:])], dim=1)
    mask, gates = torch.ones(1, 1, 1, 4, dtype=torch.bool), torch.tensor([[1.0, 0, 0, 0]])
    query = torch.randn(1, 2, variant.config.width)
    one, two = (layer.through(query, *layer.project_kv(s), gates, mask) for s in (source, other))
    assert torch.allclose(one, two)
    opened = biased(variant, 20.0).log_likelihood(batch)
    assert not torch.allclose(values, opened)


def test_hard_gates_are_drawn_as_often_as_they_are_likely():
    torch.manual_seed(0)
    logits = torch.tensor([-2.0, 0.0, 1.0]).expand(8000, 3).clone().requires_grad_()
    gates = drawn(logits, 0.5)
    assert set(gates.unique().tolist()) == {0.0, 1.0}
    assert torch.allclose(gates.mean(dim=0), logits[0].sigmoid(), atol=0.02)
    torch.manual_seed(1)
    [found] = torch.autograd.grad(drawn(logits, 0.5).sum(), logits)
    torch.manual_seed(1)
    chance = torch.rand_like(logits)
    soft = ((logits + chance.logit()) / 0.5).sigmoid()
    [expected] = torch.autograd.grad(soft.sum(), logits)
    assert torch.allclose(found, expected, atol=1e-5)
    assert (found[gates == 0].abs().sum() > 0).all()


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_the_response_teaches_the_reasoner_through_the_gates(build, batch, name):
    variant = build(name).variant.train()
    joint(variant, batch, fraction=0.5)["nll"].backward()
    assert variant.reasoner.cause.weight.grad.abs().sum() > 0
    assert variant.reasoner.embedding.table.weight.grad.abs().sum() > 0
    assert torch.isfinite(variant.reasoner.cause.weight.grad).all()
    assert variant.reasoner.emotion.weight.grad is None  # there is no gradient through a choice


def test_a_closed_gate_can_be_told_to_open(build, batch):
    """As a logarithm added to the scores a gate of 0 would get no gradient, or none that is one."""
    variant = build(HARD).variant.train()
    words = variant.embed(batch)
    closed = torch.zeros_like(words.gates).requires_grad_()
    gates = torch.cat([torch.ones_like(closed[:, :1]), closed[:, 1:]], dim=1)
    hidden = variant.decoder(
        words.decoder_inputs, variant.encode_context(words), words.attention_mask, gates
    )
    variant.compute_nll(batch, hidden, words).backward()
    real = batch["context"] != 0
    assert torch.isfinite(closed.grad).all()
    assert (closed.grad[:, 1:][real[:, 1:]] != 0).float().mean() > 0.9


def test_gates_cool_down(build, batch):
    variant = build(SOFT, gate_temperature=4.0, final_gate_temperature=1.0).variant.train()
    found = [variant._temperature(Progress(fraction=share)) for share in (0.0, 0.5, 1.0)]
    assert found == pytest.approx([4.0, 2.0, 1.0])
    warm, cold = (variant.embed(batch, Progress(fraction=share)).gates for share in (0.0, 1.0))
    assert ((warm - 0.5).abs() <= (cold - 0.5).abs() + 1e-6).all()
    assert variant.eval()._temperature(Progress(fraction=0.0)) == pytest.approx(1.0)
    wrong = ({"gate_temperature": "0"}, {"final_gate_temperature": "-1"}, {"hard_threshold": "1"})
    for overrides in wrong:
        with pytest.raises(UsageError, match="expected"):
            settings.configure(SOFT, "tiny", overrides)


@pytest.mark.parametrize(
    ("gated_layers", "expected"), [("all", [0, 1, 2]), ("first", [0]), ("last", [2])]
)
def test_where_gates_are(build, batch, gated_layers, expected):
    variant = build(SOFT, num_layers=3, gated_layers=gated_layers).variant
    layers = enumerate(variant.decoder.layers)
    assert [number for number, at in layers if isinstance(at, GatedDecoderLayer)] == expected
    check_steps_equal_all_at_once(variant, batch)


@torch.no_grad()
def test_the_generator_is_given_the_predicted_emotion(build, batch):
    """At every place of the encoder and of the decoder, in training too."""
    variant = build(SOFT, dropout=0.0).variant.train()
    predicted = variant.predict(batch)["emotion"].argmax(dim=-1)
    before = variant.embed(batch)
    assert before.emotion[:, 0].equal(variant.emotions(predicted))
    other = changed(batch, emotion=(batch["emotion"] + 1) % 32)
    assert variant.embed(other).context.equal(before.context)
    variant.emotions.weight[predicted.unique()] += 1.0
    after = variant.embed(batch)
    for one, two in (
        (before.context, after.context),
        (before.decoder_inputs, after.decoder_inputs),
    ):
        assert torch.allclose(two - one, torch.ones_like(one), atol=1e-5)
    kept = variant.log_likelihood(batch)
    untold = [number for number in range(32) if number not in predicted.tolist()]
    variant.emotions.weight[untold] += 1.0
    assert variant.log_likelihood(batch).equal(kept)


@pytest.mark.parametrize("name", NAMES)
def test_marks_are_not_used_in_evaluation(build, batch, name):
    variant = build(name).variant.eval()
    other = changed(batch, context_causes=1 - batch["context_causes"])
    for one, two in zip(outputs(variant, batch), outputs(variant, other), strict=True):
        assert one.equal(two)


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_without_multitask_the_reasoner_rests(build, batch, name):
    variant = build(f"{name}-no-multitask", dropout=0.5, word_dropout=0.5).variant.train()
    stages = stages_of(variant)
    assert stages["reasoner"].players == {"reasoner": ("reasoner",)}
    [update] = stages["joint"].updates
    parts = stages["joint"].players[update.player]
    assert "reasoner" not in parts
    assert update.weights == {"nll": 1.0}
    words = variant.embed(batch)
    assert words.gates.equal(variant.embed(batch).gates), "nothing is dropped out or drawn"
    assert variant.reasoner.training
    total_loss(update, joint(variant, batch)).backward()
    assert all(p.grad is None for p in variant.reasoner.parameters())
    assert "reasoner" in stages_of(build(name).variant)["joint"].players["model"]


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_without_emotion_the_generator_gets_none(build, batch, name):
    variant = build(f"{name}-no-emotion").variant.eval()
    whole = {n for n, _ in build(name).variant.named_parameters()}
    assert whole - {n for n, _ in variant.named_parameters()} == {"emotions.weight"}
    assert not variant.embed(batch).emotion.any()
    assert "emotion" in variant.loss_weights(), "it is still predicted"


def test_without_cause_there_are_no_gates_and_no_marks(build, batch):
    variant = build("emotion-cause-no-cause").variant.eval()
    names = [name for name, _ in variant.named_parameters()]
    assert not any("gated" in name or "cause" in name for name in names)
    assert variant.embed(batch).gates is None
    assert set(variant.loss_weights()) == {"nll", "emotion"}
    blind = {name: t for name, t in batch.tensors.items() if name != "context_causes"}
    unmarked = Batch(tensors=blind, samples=batch.samples, tokens=batch.tokens)
    assert set(joint(variant, unmarked)) == {"nll", "emotion"}
    assert variant.explain(unmarked)[0].by_word is None


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_with_a_lexicon_intense_words_are_marked(build, batch, vocabulary, name):
    model = build(f"{name}-lexicon", lexicon_threshold=0.9)
    variant = model.variant
    blind = {n: t for n, t in batch.tensors.items() if n != "context_causes"}
    unmarked = Batch(tensors=blind, samples=batch.samples, tokens=batch.tokens)
    marks = variant._marks(unmarked)
    values = bundled.lexicon().valence_arousal
    for tokens, row in zip(batch["context"].tolist(), marks.tolist(), strict=True):
        for token, mark in zip(tokens, row, strict=True):
            word = vocabulary.tokens[token]
            valence, arousal = values.get(word, (0.5, 0.0))
            expected = int(abs(valence - 0.5) + arousal > 0.9) if token else -1
            assert mark == expected, word
    assert (marks == 1).any()
    assert torch.isfinite(joint(variant, unmarked)["cause"])
    assert variant.explain(unmarked)[0].by_word.keys() == {"lexicon", "gate"}


def test_needs_follow_the_settings(build, test_samples):
    few = test_samples.head(4)
    for name, reads, intensity in (
        (SOFT, True, False),
        (f"{HARD}-no-emotion", True, False),
        (f"{SOFT}-lexicon", False, True),
        ("emotion-cause-no-cause", False, False),
    ):
        model = build(name)
        columns = model.columns(few)
        assert ("context_causes" in columns) == reads
        assert (model.variant.data_info.intensity is not None) == intensity
        assert "emotion_words" not in columns, "nobody reads them: no tagger need run"
        separator = model.vocabulary.numbers["<sep>"]
        assert (columns["context"].pad(np.arange(4)) == separator).any()


def test_the_papers_sizes(build):
    config, training = settings.configure(HARD, "paper")
    assert (config.width, config.num_layers, config.num_heads) == (300, 6, 8)
    assert config.key_depth == 8 * 64
    assert (training.batch_by, training.batch_size) == ("tokens", 8192)
    assert training.learning_rate == 5e-4
    assert (config.gate, settings.configure(SOFT, "paper")[0].gate) == ("hard", "soft")
    layer = build(SOFT, preset="paper").variant.decoder.layers[5].gated_attention
    assert layer.queries.weight.shape == (512, 300)
    assert layer.out.weight.shape == (300, 512)


@pytest.mark.parametrize("name", [SOFT, HARD])
def test_explanations_are_of_the_words_that_are_shown(build, tmp_path, name):
    """`<cls>` and `<sep>` are no words; `<unk>` is one."""
    save_model(build(name), tmp_path)
    responder = Responder(tmp_path)
    turns = ["My dog ran away.", "Oh no!", "He is zzyzx old."]
    [answer] = responder.respond([turns])
    found = answer.explanation
    assert " ".join(found.words) == "my dog ran away . oh no ! he is <unk> old ."
    assert set(found.by_word) == {"cause", "gate"}
    assert all(len(values) == len(found.words) for values in found.by_word.values())
    assert all(0 <= value <= 1 for values in found.by_word.values() for value in values)
    assert sum(found.emotion.values()) == pytest.approx(1.0, abs=1e-4)
    if name == SOFT:
        assert found.by_word["gate"] == pytest.approx(found.by_word["cause"], abs=1e-5)
    else:
        opened = [float(cause >= 0.5) for cause in found.by_word["cause"]]
        assert found.by_word["gate"] == opened
    batch = responder._batch([turns, ["I am so proud !"]])
    with torch.no_grad():
        [alone] = responder.variant.explain(rows_of_context(batch, 1))
        together = responder.variant.explain(batch)[1]
    for key, values in alone.by_word.items():
        assert values == pytest.approx(together.by_word[key], abs=1e-5)


def rows_of_context(batch, row):
    """One row of a batch without responses."""
    length = int((batch["context"][row] != 0).sum())
    parts = {
        name: tensor[[row]][:, :length] if tensor.dim() > 1 else tensor[[row]]
        for name, tensor in batch.tensors.items()
    }
    return Batch(tensors=parts, samples=1.0, tokens=1.0)


def unmarked_source(folder):
    roles = ("speaker", "listener")
    lines = [
        {
            "id": f"{split} {number}",
            "emotion": "sad",
            "split": split,
            "utterances": [{"role": roles[t % 2], "text": f"Text {t} here ."} for t in range(4)],
        }
        for split in ("train", "valid", "test")
        for number in range(3)
    ]
    path = folder / "dialogues.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def unmarked(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    prepare(str(unmarked_source(tmp_path)), tmp_path / "data", form="dialogues")
    return tmp_path / "data"


def test_data_without_marks_are_refused_before_the_run(unmarked, tmp_path):
    for name in (SOFT, HARD, f"{SOFT}-no-multitask", f"{HARD}-no-emotion"):
        with pytest.raises(DataError, match=f"attune annotate cause RUN --data {unmarked}"):
            setup.new_run(name, data=str(unmarked), preset="tiny")
    assert not (tmp_path / "home" / "runs").exists()
    run = setup.new_run("emotion-cause-no-cause", data=str(unmarked), preset="tiny")
    assert run.folder.is_dir()


def test_a_run_keeps_valence_and_arousal(unmarked, tmp_path):
    name = f"{SOFT}-lexicon"
    run = setup.new_run(name, data=str(unmarked), preset="tiny")
    assert "valence_arousal=FILE" in run.notice
    (tmp_path / "vad.txt").write_text("text\t0.9\t0.8\t0.1\nhere\t0.5\t0.1\t0.1\n")
    overrides = {"valence_arousal": str(tmp_path / "vad.txt")}
    run = setup.new_run(name, data=str(unmarked), preset="tiny", overrides=overrides)
    assert not run.notice
    model = setup.build_run_model(run)
    numbers = model.vocabulary.numbers
    intensity = model.variant.data_info.intensity
    assert intensity[numbers["text"]].item() == pytest.approx(1.2)
    assert intensity[numbers["here"]].item() == pytest.approx(0.1)
    assert intensity[numbers["<unk>"]].item() == 0.0
    save_model(model, tmp_path / "model")
    assert load_model(tmp_path / "model").variant.data_info.intensity.equal(intensity)
    (tmp_path / "words.txt").write_text("text\n")
    overrides = {"lexicon": str(tmp_path / "words.txt")}
    with pytest.raises(UsageError, match="no valence and arousal"):
        setup.new_run(name, data=str(unmarked), preset="tiny", overrides=overrides)


def test_intensity_is_of_either_side():
    lexicon = Lexicon(
        words=frozenset(), valence_arousal={"joy": (0.9, 0.6), "grief": (0.1, 0.6), "mud": (0.5, 0)}
    )
    found = [lexicon.intensity(word) for word in ("joy", "grief", "mud", "table")]
    assert found == pytest.approx([1.0, 1.0, 0.0, 0.0])


def test_the_reasoner_learns_causes_it_has_not_seen(build, prepared):
    """After a few steps it marks valid better than the commoner label would."""
    model = build(SOFT)
    variant = model.variant
    train, valid = (model.columns(read_samples(prepared, s).head(600)) for s in ("train", "valid"))
    stage = stages_of(variant)["reasoner"]
    optimizer = torch.optim.Adam(variant.reasoner.parameters(), lr=3e-3)
    torch.manual_seed(0)
    variant.train()
    for step in range(60):
        rows = np.random.default_rng(step).choice(600, 32, replace=False)
        tensors = {
            name: c.pad(rows) if isinstance(c, Ragged) else torch.from_numpy(c[rows])
            for name, c in train.items()
        }
        batch = Batch(tensors=tensors, samples=32, tokens=1.0)
        with trainable_only(variant, ("reasoner",)):
            terms = variant.reasoner_losses({PAIRED: batch}, Progress())
            optimizer.zero_grad()
            total_loss(stage.updates[0], terms).backward()
            optimizer.step()
    found = compute_validation_metrics(variant, stage, valid, ProcessGroup())
    marks = valid["context_causes"].values
    commoner = max((marks == 0).mean(), (marks == 1).mean())
    assert found["valid_cause_accuracy"] > commoner + 0.05


def test_perplexity_begins_with_the_stage_that_teaches_to_speak(build, prepared):
    model = build(SOFT)
    valid = model.columns(read_samples(prepared, "valid").head(20))
    reasoner, generator = stages_of(model.variant).values()
    assert "valid_perplexity" not in compute_validation_metrics(
        model.variant, reasoner, valid, ProcessGroup()
    )
    assert (
        compute_validation_metrics(model.variant, generator, valid, ProcessGroup())[
            "valid_perplexity"
        ]
        > 1
    )
