"""Metrics against manual calculation, and a whole evaluation."""

import dataclasses
import math

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F

from attune.models import all_variants, layers, output_layer, published
from attune.models.base import DialogueVariant
from attune.models.decoding import Decoding
from attune.platform.core.errors import DataError, UsageError
from attune.platform.evaluation import metrics
from attune.platform.evaluation.evaluate import evaluate, score
from attune.platform.evaluation.profiles import select_samples
from attune.platform.runs.model import load_model, save_model
from attune.platform.serving.responder import Responder
from attune.platform.text.detokenizing import detokenize


def test_perplexity():
    actual = metrics.perplexity(np.log([0.5**4, 0.25]), np.array([4, 1]))
    assert actual["perplexity"] == pytest.approx(math.exp((4 * math.log(2) + math.log(4)) / 5))
    assert actual["perplexity_sample_mean"] == pytest.approx(
        math.exp((math.log(2) + math.log(4)) / 2)
    )


def test_accuracy_at():
    scores = np.log([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]])
    assert metrics.accuracy_at(scores, np.array([1, 1]), (1, 2, 3)) == {1: 0.5, 2: 1.0, 3: 1.0}


def test_distinct():
    answers = [["i", "am", "i", "am"], ["i"], []]
    assert metrics.distinct(answers, 1) == 2 / 5
    assert metrics.distinct(answers, 2) == 2 / 3
    assert metrics.distinct([], 1) == 0.0


def test_bleu_is_the_unsmoothed_corpus_formula():
    answers, references = ["a b c d e f"], ["a b c d x f"]
    precisions = [5 / 6, 3 / 5, 2 / 4, 1 / 3]
    expected = 100 * math.prod(precisions) ** 0.25
    value, signature = metrics.bleu(answers, references)
    assert value == pytest.approx(expected)
    assert "tok:none" in signature
    assert "smooth:none" in signature
    short, _ = metrics.bleu(["a b c d"], ["a b c d e f"])
    assert short == pytest.approx(100 * math.exp(1 - 6 / 4))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_loss_is_cross_entropy(monkeypatch, smoothing, chunk):
    torch.manual_seed(0)
    embedding = layers.WordEmbedding(50, 8)
    output = output_layer.OutputLayer(embedding, 8, tied=False)
    hidden = torch.randn(20, 8, requires_grad=True)
    targets = torch.randint(50, (20,))
    monkeypatch.setattr(output_layer, "CHUNK_BYTES", chunk * 4 * 50)

    def gradients(loss):
        parameters = [hidden, output.weight, output.bias]
        return torch.autograd.grad(3 * loss, parameters)

    plain = F.cross_entropy(
        output.logits(hidden), targets, reduction="sum", label_smoothing=smoothing
    )
    ours = output.loss_sum(hidden, targets, smoothing)
    assert torch.allclose(plain, ours, rtol=1e-5)
    for one, other in zip(gradients(plain), gradients(ours), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(output.loss_sum(hidden, targets, smoothing), ours)
    nothing = output.loss_sum(hidden[:0], targets[:0], smoothing)
    assert not any(grad.any() for grad in gradients(nothing))
    log_likelihood = output.log_likelihood(hidden, targets)
    expected = -F.cross_entropy(output.logits(hidden), targets, reduction="none")
    assert torch.allclose(log_likelihood, expected, atol=1e-5)


def test_tied_output_shares_the_embedding(build):
    tied, free = build("transformer", tied=True).variant, build("transformer", tied=False).variant
    assert tied.output.weight is tied.embedding.table.weight
    assert free.output.weight is not free.embedding.table.weight


def test_position_embeddings_cover_long_texts():
    positions = layers.Positions(6)
    assert torch.equal(positions(700)[650:], positions(50, 650))
    assert torch.equal(positions(3), layers.Positions(6)(3))


@torch.no_grad()
def test_packed_output_layer_follows_its_weights():
    layer = output_layer.OutputLayer(layers.WordEmbedding(50, 8), 8, tied=False).eval()
    hidden = torch.randn(3, 8)

    def follows():
        expected = torch.nn.functional.linear(hidden, layer.weight, layer.bias)
        return torch.allclose(layer.logits(hidden), expected, atol=1e-5)

    assert follows()
    layer.weight.add_(1.0)
    assert follows()
    layer.weight.data.add_(1.0)  # as ZeRO does, unnoticed ...
    layer.train().eval()  # ... between training and looking
    assert follows()


def test_evaluate(build, test_samples, test_columns):
    model = build("multi-trs")
    result = evaluate(
        model.variant, test_samples, test_columns, model.vocabulary, Decoding(max_tokens=5)
    )
    assert set(result.metrics) == {
        "perplexity", "perplexity_sample_mean", "unknown_share", "emotion_accuracy",
        "emotion_accuracy_top2", "emotion_accuracy_top5", "bleu", "distinct_1", "distinct_2",
        "different_answers", "parameters",
    }  # fmt: skip
    # An untrained model knows nothing: it is as unsure as a die with a face for each token.
    assert len(model.vocabulary) < result.metrics["perplexity"] < 3 * len(model.vocabulary)
    assert result.metrics["emotion_accuracy"] < result.metrics["emotion_accuracy_top5"] < 0.5
    assert 0.005 < result.metrics["unknown_share"] < 0.05
    answers = result.answers
    assert answers["conversation_id"].to_list() == test_samples["conversation_id"].to_list()
    assert answers["answer"].str.split(" ").list.len().max() <= 5
    assert answers["predicted_emotion"].null_count() == 0
    again = evaluate(
        model.variant, test_samples, test_columns, model.vocabulary, Decoding(max_tokens=5)
    )
    assert again.metrics == result.metrics
    assert again.answers.equals(answers)


def test_scores_are_in_row_order(build, columns, batch):
    model = build("transformer")
    model.variant.eval()
    scores = score(model.variant, columns)
    rows = batch["index"].numpy()
    with torch.no_grad():
        expected = model.variant.log_likelihood(batch).double().sum(dim=1).numpy()
    assert np.allclose(scores["log_likelihood"][rows], expected, atol=1e-3)


def test_model_without_emotions_has_no_accuracy(build, test_samples, test_columns):
    model = build("transformer")
    result = evaluate(
        model.variant, test_samples, test_columns, model.vocabulary, Decoding(max_tokens=2)
    )
    assert result.metrics["emotion_accuracy"] is None
    assert result.answers["predicted_emotion"].null_count() == result.answers.height


@pytest.fixture
def responder(build, tmp_path):
    save_model(build("multi-trs"), tmp_path / "model")
    return Responder(tmp_path / "model")


def test_responder(responder):
    conversations = [["My dog ran away."], ["Hello.", "Hi, how are you?", "I lost my job today!"]]
    answers = responder.respond(conversations, Decoding(max_tokens=6))
    assert len(answers) == 2
    for answer, conversation in zip(answers, conversations, strict=True):
        [alone] = responder.respond([conversation], Decoding(max_tokens=6))
        assert alone.text == answer.text
        assert sum(answer.explanation.emotion.values()) == pytest.approx(1.0)
        assert set(answer.explanation.emotion) == set(responder.variant.data_info.emotions)
        *_, streamed = responder.stream(conversation, Decoding(max_tokens=6))
        assert streamed == answer.text


def test_responder_rejects_invalid_input(responder, tmp_path):
    with pytest.raises(UsageError, match="conversation 1 has 2 turns"):
        responder.respond([["Hello.", "Hi."]])
    with pytest.raises(UsageError, match="none is empty"):
        responder.respond([[" "]])
    with pytest.raises(UsageError, match="control 'intent': multi-trs has no controls"):
        responder.respond([["Hello."]], controls={"intent": "agreeing"})
    with pytest.raises(UsageError, match=r"model.json is missing"):
        Responder(tmp_path)


def test_weights_must_match_the_model_description(build, tmp_path):
    model = build("multi-trs")
    save_model(model, tmp_path)
    other = dataclasses.replace(model, variant=build("multi-trs", num_layers=2).variant)
    save_model(other, tmp_path / "other")
    (tmp_path / "other" / "model.json").write_bytes((tmp_path / "model.json").read_bytes())
    with pytest.raises(DataError, match="does not fit"):
        load_model(tmp_path / "other")


def test_detokenized_text_is_readable():
    tokens = "i am sorry , do n't worry . it 's `` fine '' ( really ) ! i can not stop ."
    expected = """I am sorry, don't worry. It's "fine" (really)! I cannot stop."""
    assert detokenize(tokens.split()) == expected
    assert detokenize([]) == ""


def test_published_figures_have_sources_and_our_units():
    figures = published.figures()
    known = {"parameters", "bleu", "perplexity_sample_mean", "distinct_1", "distinct_2"}
    for figure in figures:
        assert figure.paper, figure
        assert figure.source, figure
        accuracy = figure.metric.startswith(("emotion_accuracy", "response_label_weighted_"))
        assert accuracy or figure.metric in known, figure
        if accuracy or figure.metric.startswith("distinct"):
            assert 0 < figure.value < 1, figure
    answering = {n for n, (v, _) in all_variants().items() if issubclass(v, DialogueVariant)}
    ours = answering - {"dummy"}
    without = {"mime-no-stochasticity", "meed2-joint"}
    assert ours - {figure.variant for figure in figures} == without
    actual = published.find_figures("mime", "perplexity_sample_mean")
    assert [(f.value, f.paper, f.source) for f in actual] == [(37.53, "Dual-Emp", "Table 1")]


def test_profile_leaves_out_last_turns():
    rows = [("a", "x"), ("a", "x"), ("b", "x"), ("c", "y"), ("c", "y"), ("d", "z"), ("d", "z")]
    samples = pl.DataFrame(rows, schema=["conversation_id", "situation"], orient="row")
    samples = samples.with_row_index("row")
    # Neighbours of one situation are one conversation; the last conversation is lost.
    assert select_samples("empdg", samples)["row"].to_list() == [0, 1, 3]
    assert select_samples("attune", samples).equals(samples)
    with pytest.raises(UsageError, match="did you mean 'empdg'"):
        select_samples("emp-dg", samples)
