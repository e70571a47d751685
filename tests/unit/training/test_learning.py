"""The systems learn the bundled corpus in a plain loop in this process, without the trainer.

The baselines take a second to fit: naive Bayes on a bag of words for the emotion, and word
frequencies for the response. The weights of the last epoch are evaluated, on test only once.
"""

import math

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB
from torch import nn

from attune.models.base import PAIRED, Progress
from attune.platform.batching.streams import Stream
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.data.labels import EMOTIONS
from attune.platform.evaluation import metrics
from attune.platform.evaluation.evaluate import score
from attune.platform.training import settings
from attune.platform.training.schedules import rate
from attune.platform.training.updates import train_only_updated, update_loss
from tests.contract import list_parameters, select_likelihood_stages

CHANCE = 1 / len(EMOTIONS)


@pytest.fixture(scope="module")
def valid_columns(prepared, encode_samples):
    return encode_samples(read_dataset_samples(prepared, "valid"))


def train_stage(variant, stage, columns, training, *, seed=0):
    """Train a stage with a single player, with the given training settings."""
    [update] = stage.updates
    parts = stage.players[update.player]
    parameters = list_parameters(variant, parts)
    optimizer = torch.optim.AdamW(parameters, weight_decay=training.weight_decay)
    stream = Stream(columns, size=training.batch_size, seed=seed)
    steps = training.max_epochs * len(stream.plan(0))
    step = 0
    with torch.random.fork_rng(), train_only_updated(variant, parts):
        torch.manual_seed(seed)
        variant.train()
        for epoch in range(training.max_epochs):
            for batch in stream.epoch(epoch):
                optimizer.param_groups[0]["lr"] = rate(training, stage, step, steps)
                progress = Progress(step=step, fraction=step / steps)
                losses = getattr(variant, update.losses)({PAIRED: batch}, progress)
                optimizer.zero_grad()
                update_loss(update, losses).backward()
                nn.utils.clip_grad_norm_(parameters, training.gradient_clipping)
                optimizer.step()
                step += 1


def evaluate_variant(variant, columns):
    """Return the perplexity and the emotion accuracy, None if the variant predicts no emotion."""
    scores = score(variant, columns)
    perplexity = metrics.perplexity(scores["log_likelihood"], columns["response"].lengths)
    accuracy = None
    if "emotion" in scores:
        accuracy = float((scores["emotion"].argmax(axis=1) == columns["emotion"]).mean())
    return perplexity["perplexity"], accuracy


def unigram_perplexity(train, held_out, num_tokens):
    """Return the perplexity of word frequencies in train's responses, with add-one smoothing."""
    counts = np.bincount(train["response"].values, minlength=num_tokens) + 1.0
    return math.exp(-np.log(counts / counts.sum())[held_out["response"].values].mean())


def bag_of_words(train, held_out):
    """Return the emotion accuracy of naive Bayes on the words of the held-out contexts.

    It is more accurate here than logistic regression, and much faster.
    """

    def read(samples):
        return samples["context_tokens"].list.join(" ").to_list(), samples["emotion"].to_list()

    words = CountVectorizer(token_pattern=r"\S+")
    contexts, emotions = read(train)
    counts = words.fit_transform(contexts)
    unseen, truth = read(held_out)
    return MultinomialNB().fit(counts, emotions).score(words.transform(unseen), truth)


def test_multi_trs_beats_a_bag_of_words(
    build, columns, test_columns, prepared, test_samples, vocabulary
):
    variant = build("multi-trs", "small").variant
    _, training = settings.configure("multi-trs", "small", {"max_epochs": 5})
    [stage] = variant.stages()
    train_stage(variant, stage, columns, training)
    perplexity, accuracy = evaluate_variant(variant, test_columns)
    unigram = unigram_perplexity(columns, test_columns, len(vocabulary))
    bag = bag_of_words(read_dataset_samples(prepared, "train"), test_samples)
    print(f"\ntest perplexity {perplexity:.1f}, of unigrams {unigram:.1f}")
    print(f"test emotion accuracy {accuracy:.1%}, of a bag of words {bag:.1%}")
    assert accuracy > 10 * CHANCE
    assert accuracy > bag
    assert perplexity < 2 / 3 * unigram


@pytest.mark.parametrize("name", ["transformer", "emoprepend-1", "moel", "mime", "empdg"])
def test_the_other_systems_learn(name, build, columns, valid_columns, vocabulary):
    variant = build(name).variant
    _, training = settings.configure(name, "tiny", {"max_epochs": 2, "learning_rate": 3e-3})
    for stage in select_likelihood_stages(variant):
        train_stage(variant, stage, columns, training)
    perplexity, accuracy = evaluate_variant(variant, valid_columns)
    unigram = unigram_perplexity(columns, valid_columns, len(vocabulary))
    assert perplexity < 2 / 3 * unigram
    if name == "transformer":
        assert accuracy is None
    else:
        assert accuracy > 10 * CHANCE
