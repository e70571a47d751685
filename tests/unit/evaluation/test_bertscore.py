"""BERTScore against manual calculation, with an encoder of four words."""

import json
from types import SimpleNamespace

import polars as pl
import pytest
import torch
from torch import nn

from attune.platform.core.errors import UsageError
from attune.platform.data.dataset_folder import read_dataset_manifest
from attune.platform.evaluation import bertscore
from attune.platform.evaluation.bertscore import BertScore
from tests.commands import error_of, json_output

WORDS = {"[CLS]": 1, "[SEP]": 2, "east": 3, "north": 4, "northeast": 5, "west": 6}
STATES = {  # 0 is padding; lengths are not 1, to see that they do not matter
    "[CLS]": (0.0, 0.0, 2.0), "[SEP]": (0.0, 0.0, 1.0), "east": (3.0, 0.0, 0.0),
    "north": (0.0, 0.5, 0.0), "northeast": (1.0, 1.0, 0.0), "west": (-1.0, 0.0, 0.0),
}  # fmt: skip
HALF = 0.5**0.5  # the cosine of northeast with north or east


class Module(nn.Module):
    num_layers = 1

    def __init__(self):
        super().__init__()
        self.table = torch.tensor([(9.0, 9.0, 9.0), *STATES.values()])

    def forward(self, subwords, layer=None):
        assert layer == 1
        return self.table[subwords]


@pytest.fixture
def metric():
    encoder = SimpleNamespace(
        name="four",
        module=Module(),
        cls_token=1,
        separator=2,
        max_length=6,
        subwords=lambda texts: [[WORDS[word] for word in text.split()] for text in texts],
    )
    return BertScore(encoder=encoder, layer=1)


def test_scores_equal_manual_calculation(metric):
    answers = ["east north", "northeast", "north", "west", "", "east", ""]
    references = ["east north", "east north north", "northeast east", "east", "east", "", ""]
    expected = [
        (1.0, 1.0),
        (HALF, HALF),
        (HALF, (HALF + 0.0) / 2),
        # -1 is the cosine of west with east, but [CLS] and [SEP] may be matched, at 0.
        (0.0, 0.0),
        (0.0, 0.0),
        (0.0, 0.0),
        (0.0, 0.0),
    ]
    actual = metric.pairs(answers, references)
    for row, (precision, recall) in zip(actual.tolist(), expected, strict=True):
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        assert row == pytest.approx([precision, recall, f1], abs=1e-6)


def test_scores_do_not_depend_on_batches_and_padding(metric, monkeypatch):
    answers = ["east", "north east west", "northeast", "west west", ""] * 3
    references = ["north", "east", "west north northeast", "east", "north"] * 3
    together = metric.pairs(answers, references)
    done = []
    monkeypatch.setattr(bertscore, "PAIRS_AT_A_TIME", 1)
    alone = metric.pairs(answers, references, done.append)
    assert torch.allclose(together, alone)
    assert sum(done) == 15


def test_long_texts_are_truncated(metric):
    [cut] = metric.pairs(["east east east east north"], ["north"]).tolist()
    assert cut[0] == pytest.approx(0.0)  # four fit between [CLS] and [SEP]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The parts of prepared data that the baseline reads."""
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setattr(bertscore, "checksum", lambda _: "0123456789")
    monkeypatch.setattr(bertscore, "read_dataset_manifest", lambda _: {"hash": "h"})
    responses = pl.DataFrame({"response_tokens": ["east", "north", "north", None]})
    monkeypatch.setattr(bertscore, "read_dataset_samples", lambda *_: responses)
    return tmp_path


def test_scores_are_rescaled_by_random_training_pairs(metric, folder, monkeypatch):
    # Of two different responses only one pair can be drawn: east and north, whose cosine is 0.
    assert metric.baseline(folder) == (0.0, 0.0, 0.0)
    [kept] = (folder / "bertscore").iterdir()
    stored = json.loads(kept.read_text())
    assert stored["encoder"] == "four"
    assert stored["layer"] == 1
    kept.write_text(json.dumps({**stored, "baseline": [0.5, 0.25, 0.4]}))  # it is not made again
    actual, signature = bertscore.score(metric, ["northeast"], ["north"], folder)
    assert actual["bertscore_f1"] == pytest.approx(HALF)
    assert actual["bertscore_precision_rescaled"] == pytest.approx((HALF - 0.5) / 0.5)
    assert actual["bertscore_recall_rescaled"] == pytest.approx((HALF - 0.25) / 0.75)
    assert actual["bertscore_f1_rescaled"] == pytest.approx((HALF - 0.4) / 0.6)
    assert signature == (
        "bertscore.encoder:four@01234567 bertscore.layer:1 bertscore.idf:no bertscore.text:tokens "
        "bertscore.baseline:2000-random-train-pairs(0.5000,0.2500,0.4000)"
    )
    monkeypatch.setattr(bertscore, "BASELINE_PAIRS", 10)  # another definition is another baseline
    assert metric.baseline(folder) == (0.0, 0.0, 0.0)


def test_scores_are_not_rescaled_without_training_responses(metric, folder, monkeypatch):
    nothing = pl.DataFrame({"response_tokens": []}, schema={"response_tokens": pl.String})
    monkeypatch.setattr(bertscore, "read_dataset_samples", lambda *_: nothing)
    for where in (folder, None):
        actual, signature = bertscore.score(metric, ["east"], ["east"], where)
        assert actual["bertscore_f1"] == pytest.approx(1.0)
        assert actual["bertscore_f1_rescaled"] is None
        assert signature.endswith("bertscore.baseline:none")


def test_layer_is_selected_by_number(tiny_encoder):
    assert bertscore.load(str(tiny_encoder)).layer == 2
    first = bertscore.load(f"{tiny_encoder}:1")
    assert first.layer == 1
    last = bertscore.load(f"{tiny_encoder}:2")
    texts = ["i am sad", "so it goes"], ["she is sad", "it is late"]
    assert not torch.allclose(first.pairs(*texts), last.pairs(*texts))
    with pytest.raises(UsageError, match=r"layers of '.*' are 0 to 2"):
        bertscore.load(f"{tiny_encoder}:3")
    with pytest.raises(UsageError, match="no encoder in 'nowhere'"):
        bertscore.load("nowhere:1")


def test_evaluate_with_bertscore(call, tmp_path, monkeypatch, prepared, tiny_encoder):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setattr(bertscore, "BASELINE_PAIRS", 20)
    rows = [("i am sorry", "i am sorry"), ("", "that is great")]
    text = "\n".join(json.dumps({"answer": a, "response": r}) for a, r in rows)
    (tmp_path / "said.jsonl").write_text(text)
    command = ("evaluate", "--answers", tmp_path / "said.jsonl", "--bertscore", tiny_encoder)
    plain = json_output(call(*command, "--json"))["metrics"]
    assert plain["bertscore_f1"] == pytest.approx(0.5)  # 1 and 0
    assert plain["bertscore_f1_rescaled"] is None
    actual = json_output(call(*command, "--data", prepared, "--json"))
    assert actual["metrics"]["bertscore_f1"] == pytest.approx(0.5)
    assert actual["metrics"]["bertscore_f1_rescaled"] < 0.5
    assert f"bertscore.encoder:{tiny_encoder}@" in actual["signature"]
    [kept] = (tmp_path / "bertscore").iterdir()
    assert json.loads(kept.read_text())["data"] == read_dataset_manifest(prepared)["hash"]
    assert "--data is for a RUN" in error_of(call(*command[:3], "--data", prepared))
    assert "no encoder in 'nowhere'" in error_of(call(*command[:3], "--bertscore", "nowhere"))
