"""The references that the bench compares with do the same work, only more slowly."""

import pytest
import torch

from attune.jobs.bench import generation, training
from attune.models.decoding import Decoding
from attune.platform.batches import encode
from attune.platform.evaluation.evaluate import answer


@pytest.fixture
def variant(build):
    return build("multi-trs", label_smoothing=training.SMOOTHING, dropout=0.0).variant


def test_all_loops_learn_from_the_same_loss(variant, batch):
    variant.train()
    ours = training._our_loss(variant, batch)
    assert torch.allclose(training._good_loss(variant, batch), ours, rtol=1e-5)

    def gradient(loss):
        [found] = torch.autograd.grad(loss, [variant.output.bias])
        return found

    # The papers' target gives padding nothing; its own entropy, left out here, teaches nothing.
    papers, expected = gradient(training._papers_loss(variant, batch)), gradient(ours)
    assert torch.allclose(papers / batch.tokens, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("slow", "method"), [(generation._greedy, "greedy"), (generation._beams, "beam")]
)
def test_slow_decoding_gives_the_same_answers(build, test_samples, vocabulary, slow, method):
    variant = build("transformer").variant.eval()
    columns = encode(test_samples.head(6), vocabulary)
    decoding = Decoding(method=method, max_tokens=8, beams=3)
    ours = answer(variant, columns, decoding)
    assert generation._one_by_one(variant, columns, decoding, slow) == ours
    assert any(ours)
