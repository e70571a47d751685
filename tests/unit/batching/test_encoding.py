"""Encoding: the layout of contexts, options, unpaired text, unknown emotions, padding."""

import numpy as np
import polars as pl
import pytest

from attune.platform.batching.encoding import Layout, Ragged, encode
from attune.platform.core.errors import DataError
from attune.platform.data.dataset_folder import read_dataset_samples
from attune.platform.data.labels import EMOTIONS
from attune.platform.data.samples import SAMPLES
from attune.platform.text.vocabulary import Vocabulary


def one_sample(**fields):
    row = {
        "conversation_id": "x",
        "context_tokens": ["hello there", "what happened ?"],
        "context_roles": ["speaker", "listener"],
        "response_tokens": "oh no",
        "emotion": "sad",
    }
    return pl.DataFrame([{**dict.fromkeys(SAMPLES), **row, **fields}], schema=SAMPLES)


def words(vocabulary, ragged):
    return [vocabulary.tokens[number] for number in ragged.values]


@pytest.fixture(scope="module")
def small():
    tokens = ["hello", "there", "what", "happened", "?", "oh", "no"]
    return Vocabulary.build(pl.DataFrame({"token": tokens, "train": [1] * len(tokens)}))


def test_encoding_lays_out_the_context(small):
    encoded = encode(one_sample(), small, emotions=["proud", "sad"])
    assert words(small, encoded["context"]) == ["<cls>", "hello", "there", "what", "happened", "?"]
    roles = ["<cls>", *["<speaker>"] * 2, *["<listener>"] * 3]
    assert words(small, encoded["context_roles"]) == roles
    assert encoded["context_turns"].values.tolist() == [0, 1, 1, 2, 2, 2]
    assert words(small, encoded["response"]) == ["oh", "no", "<eos>"]
    assert encoded["next_turn"].lengths.tolist() == [0]
    assert encoded["emotion"].tolist() == [1]


def test_encoding_options(small):
    layout = Layout(separators=True, max_context=5)
    encoded = encode(one_sample(next_turn_tokens="no"), small, layout=layout)
    assert words(small, encoded["context"]) == ["<cls>", "<sep>", "what", "happened", "?", "<sep>"]
    assert encoded["context_turns"].values.tolist() == [0, 1, 2, 2, 2, 2]
    assert words(small, encoded["next_turn"]) == ["no", "<eos>"]
    assert encoded["emotion"].tolist() == [-1]


def test_encoding_takes_unpaired_text(prepared, vocabulary):
    contexts = encode(
        read_dataset_samples(prepared, "unpaired_contexts"), vocabulary, emotions=EMOTIONS
    )
    assert contexts["response"].lengths.sum() == 0
    responses = encode(
        read_dataset_samples(prepared, "unpaired_responses"), vocabulary, emotions=EMOTIONS
    )
    assert set(responses["context"].lengths) == {1}
    assert responses["response"].lengths.min() > 1


def test_an_emotion_outside_the_labels_is_an_error(small):
    with pytest.raises(DataError, match="unknown emotion 'sad'"):
        encode(one_sample(), small, emotions=["proud"])


def test_encoding_gives_back_every_text(prepared, vocabulary, columns):
    samples = read_dataset_samples(prepared, "train")
    rows = np.arange(samples.height)
    table = columns["response"].pad(rows)
    for row in (0, 17, samples.height - 1):
        assert " ".join(vocabulary.decode(table[row].tolist())) == samples["response_tokens"][row]
        context = columns["context"].pad(np.array([row]))[0].tolist()
        joined = " ".join(samples["context_tokens"][row])
        assert " ".join(vocabulary.decode(context)) == joined


def test_padding():
    ragged = Ragged(np.array([1, 2, 3, 4]), np.array([1, 0, 3]))
    assert ragged.pad(np.array([2, 0, 1])).tolist() == [[2, 3, 4], [1, 0, 0], [0, 0, 0]]
