"""Decoding: batched, cached decoding equals decoding each sample without cache."""

import itertools

import pytest
import torch

from attune.models.base import Batch
from attune.models.decoding import Decoding, decode, sample_categorical, stream
from tests.contract import select_rows, train_on_batches

METHODS = [
    Decoding(),
    Decoding(block_ngrams=2),
    Decoding(method="beam", beams=3),
    Decoding(method="beam", beams=4, block_ngrams=2, length_penalty=0.5),
    Decoding(method="topk", top_k=5, seed=3),
    Decoding(method="nucleus", top_p=0.8, temperature=1.3, seed=3),
]


@pytest.fixture(scope="module")
def model(build, batch):
    """A briefly trained model, whose answers end and differ."""
    model = build("multi-trs")
    train_on_batches(model.variant, [batch], steps=60)
    model.variant.eval()
    return model


def decode_greedily_without_cache(variant, batch, max_tokens):
    """Decode one sample at a time, computing the whole prefix again at each step."""
    answers = []
    for row in range(len(batch)):
        one = select_rows(batch, [row])
        answer: list[int] = []
        while len(answer) < max_tokens:
            logits, state = None, variant.encode(one)
            for token in (variant.data_info.specials["<sos>"], *answer):
                logits, state = variant.next_logits(torch.tensor([token]), state)
            for name, number in variant.data_info.specials.items():
                if name != "<eos>":
                    logits[0, number] = -float("inf")
            token = int(logits.argmax())
            if token == variant.data_info.specials["<eos>"]:
                break
            answer.append(token)
        answers.append(answer)
    return answers


@torch.no_grad()
def test_greedy_decoding_equals_decoding_without_cache(model, batch):
    expected = decode_greedily_without_cache(model.variant, batch, 12)
    assert decode(model.variant, batch, Decoding(max_tokens=12)) == expected
    assert len({tuple(answer) for answer in expected}) > 3
    assert len({len(answer) for answer in expected}) > 1


def test_one_beam_is_greedy(model, batch):
    for n in (0, 2):
        greedy = Decoding(block_ngrams=n)
        beam = Decoding(method="beam", beams=1, block_ngrams=n)
        assert decode(model.variant, batch, beam) == decode(model.variant, batch, greedy)


@pytest.mark.parametrize("decoding", METHODS)
def test_answers_do_not_depend_on_the_batch(model, batch, decoding):
    batched = decode(model.variant, batch, decoding)
    single = [
        decode(model.variant, select_rows(batch, [row]), decoding)[0] for row in range(len(batch))
    ]
    assert batched == single


@pytest.mark.parametrize("decoding", METHODS)
def test_streaming_equals_decoding(model, batch, decoding):
    one = select_rows(batch, [4])
    assert list(stream(model.variant, one, decoding)) == decode(model.variant, one, decoding)[0]


@torch.no_grad()
def compute_log_probability(variant, batch, row, answer):
    end = variant.data_info.specials["<eos>"]
    response = torch.tensor([[*answer, end]])
    one = select_rows(batch, [row])
    scored = Batch(tensors={**one.tensors, "response": response}, samples=1, tokens=len(answer) + 1)
    return float(variant.log_likelihood(scored).sum())


def test_beam_search_increases_the_probability(model, batch):
    greedy = decode(model.variant, batch)
    beam = decode(model.variant, batch, Decoding(method="beam", beams=8, length_penalty=0.0))
    gains = [
        compute_log_probability(model.variant, batch, row, b)
        - compute_log_probability(model.variant, batch, row, g)
        for row, (b, g) in enumerate(zip(beam, greedy, strict=True))
        if len(b) < 30 > len(g)
    ]
    assert min(gains) > -1e-3
    assert max(gains) > 0


def test_many_beams_return_the_most_likely_answer(build, batch):
    """With a vocabulary of five words, all answers of up to two words can be scored."""
    variant = build("dummy").variant
    words = list(range(20, 25))
    allowed = {*words, variant.data_info.specials["<eos>"]}
    with torch.no_grad():
        for number in range(len(variant.output.bias)):
            if number not in allowed:
                variant.output.bias[number] = -100.0
    decoding = Decoding(method="beam", beams=36, max_tokens=2, length_penalty=0.0)
    answers = decode(variant, batch, decoding)
    candidates = [list(t) for n in range(3) for t in itertools.product(words, repeat=n)]

    def score(row, answer):  # the search may stop at two words without <eos>
        full = compute_log_probability(variant, batch, row, answer)
        if len(answer) < 2:
            return full
        one = select_rows(batch, [row])
        state = variant.encode(one)
        logits, _ = variant.next_logits(torch.tensor([answer[-1]]), state)
        end = variant.data_info.specials["<eos>"]
        return full - logits.detach().log_softmax(-1)[0, end].item()

    for row in range(3):
        best = max(candidates, key=lambda answer, row=row: score(row, answer))
        assert answers[row] == best


def test_blocked_ngrams_do_not_repeat(model, batch):
    for method in ("greedy", "beam", "nucleus"):
        decoding = Decoding(method=method, block_ngrams=2, temperature=2.0)
        for answer in decode(model.variant, batch, decoding):
            pairs = list(itertools.pairwise(answer))
            assert len(set(pairs)) == len(pairs)


def test_samples_are_determined_by_the_seed(model, batch):
    def sample(**options):
        return decode(model.variant, batch, Decoding(method="nucleus", temperature=2.0, **options))

    assert sample(seed=1) == sample(seed=1)
    assert sample(seed=1) != sample(seed=2)
    greedy = decode(model.variant, batch)
    assert decode(model.variant, batch, Decoding(method="topk", top_k=1)) == greedy
    assert decode(model.variant, batch, Decoding(method="nucleus", top_p=1e-9)) == greedy


def test_sampling_follows_the_probabilities():
    from attune.models.decoding import _draw_uniform_numbers, _sample_tokens

    logits = torch.tensor([[0.5, 0.3, 0.2, 0.0]]).log().repeat(20_000, 1)
    draws = _draw_uniform_numbers(torch.arange(20_000), Decoding(max_tokens=1))[:, 0]
    for decoding, expected in (
        (Decoding(method="topk", top_k=2), [0.625, 0.375, 0, 0]),
        (Decoding(method="nucleus", top_p=0.6), [0.625, 0.375, 0, 0]),
        (Decoding(method="nucleus", top_p=1.0), [0.5, 0.3, 0.2, 0]),
    ):
        shares = torch.bincount(_sample_tokens(logits, draws, decoding), minlength=4) / 20_000
        assert torch.allclose(shares, torch.tensor(expected), atol=0.015)


def test_no_answer_is_longer_than_allowed(model, batch):
    for method in ("greedy", "beam", "topk"):
        answers = decode(model.variant, batch, Decoding(method=method, max_tokens=3))
        assert max(map(len, answers)) <= 3


def test_sample_categorical_follows_the_weights():
    weights = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    indices = sample_categorical(weights.repeat(20_000, 1), torch.rand(20_000))
    frequencies = torch.bincount(indices, minlength=len(weights)) / len(indices)
    assert torch.allclose(frequencies, weights, atol=0.02)
    assert not frequencies[weights == 0].any()
