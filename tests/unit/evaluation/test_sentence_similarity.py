"""Sentence-embedding similarity, and its independence of batches."""

import json

import pytest
import torch

from attune.platform.evaluation import sentences
from attune.platform.text import encoders
from tests.commands import error_of, json_output

ANSWERS = ["i am sad", "it is late , is it not ?", "", "so it goes", "i am sad"]
MEANT = ["i am sad", "she is sad", "nothing", "it is late", "so it goes on and on and on"]


@pytest.fixture(scope="module")
def encoder(tiny_encoder):
    return encoders.load_encoder(str(tiny_encoder))


@torch.no_grad()
def test_similarity_is_the_cosine_of_mean_states(encoder):
    actual = sentences.similarities(encoder, ANSWERS, MEANT)
    for place in (0, 1, 3, 4):
        means = []
        for text in (ANSWERS[place], MEANT[place]):
            [numbers] = encoder.subwords([text])
            row = torch.tensor([[encoder.cls_token, *numbers, encoder.separator]])
            means.append(encoder.module(row)[0].mean(dim=0))
        assert float(actual[place]) == pytest.approx(
            float(torch.cosine_similarity(*means, dim=0)), abs=1e-5
        )
    assert float(actual[0]) == pytest.approx(1.0)
    assert float(actual[2]) == 0.0


def test_scores_do_not_depend_on_batches_and_padding(encoder, monkeypatch):
    whole, done = sentences.similarities(encoder, ANSWERS, MEANT), []
    monkeypatch.setattr(sentences, "PAIRS_AT_A_TIME", 2)
    cut = sentences.similarities(encoder, ANSWERS, MEANT, done.append)
    assert torch.allclose(whole, cut, atol=1e-6)
    assert sum(done) == 5
    long = sentences.similarities(encoder, ["so " * 500], ["so " * 500])
    assert float(long[0]) == pytest.approx(1.0)


def test_evaluate_with_sentence_similarity(call, tmp_path, monkeypatch, tiny_encoder):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    rows = [("i am sorry", "i am sorry"), ("", "that is great")]
    text = "\n".join(json.dumps({"answer": a, "response": r}) for a, r in rows)
    (tmp_path / "said.jsonl").write_text(text)
    command = ("evaluate", "--answers", tmp_path / "said.jsonl", "--sentence-similarity")
    actual = json_output(call(*command, tiny_encoder, "--json"))
    assert actual["metrics"]["sentence_similarity"] == pytest.approx(0.5)  # 1 and 0
    assert f"sentence.encoder:{tiny_encoder}@" in actual["signature"]
    assert "no encoder in 'nowhere'" in error_of(call(*command, "nowhere"))
