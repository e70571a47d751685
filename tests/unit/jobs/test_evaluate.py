"""`attune evaluate` on runs and on files of answers."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

from attune.platform.data.prepare import prepare
from attune.platform.evaluation import answers
from attune.platform.runs.model import load_model, save_model
from attune.platform.runs.record import find_run
from attune.platform.text.tokenizing import tokenize
from tests.commands import error_of, json_output

METRICS = {
    "perplexity", "perplexity_sample_mean", "unknown_share", "emotion_accuracy",
    "emotion_accuracy_top2", "emotion_accuracy_top5", "bleu", "distinct_1", "distinct_2",
    "different_answers",
    "parameters",
}  # fmt: skip
FEW = ("--set", "max_tokens=3")


def test_a_run_is_evaluated(call, home, data):
    done = call("evaluate", "second", *FEW, "--json")
    result = json_output(done)
    assert set(result) == {"run_id", "split", "decode", "answers", "signature", "metrics"}
    assert (result["run_id"], result["split"], result["decode"]) == (None, "test", "greedy")
    assert set(result["metrics"]) == METRICS
    assert None not in result["metrics"].values()
    assert "max_tokens:3" in result["signature"]
    kept = Path(result["answers"])
    assert kept.parent == home / "runs" / "second" / "answers"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    frame = pl.read_parquet(kept)
    expected = pl.read_parquet(data / "test.parquet")
    assert frame["response"].to_list() == expected["response"].to_list()
    assert frame["answer"].str.split(" ").list.len().max() <= 3
    assert frame["answer_tokens"].equals(frame["answer"])
    assert "emotion accuracy" in done.stderr
    # The written answer file gives the same metrics, also for answers with quotation marks.
    again = json_output(call("evaluate", "--answers", kept, "--json"))
    assert (again["run_id"], again["split"], again["decode"]) == (None, None, None)
    assert again["answers"] == str(kept)
    of_the_model = {
        "unknown_share", "emotion_accuracy_top2", "emotion_accuracy_top5", "parameters",
    }  # fmt: skip
    for name in METRICS - of_the_model:
        assert again["metrics"][name] == pytest.approx(result["metrics"][name]), name
    assert all(again["metrics"][name] is None for name in of_the_model)


@pytest.mark.usefixtures("home")
def test_different_settings_write_different_answer_files(call, data, tmp_path):
    def kept(*arguments):
        return Path(json_output(call("evaluate", "first", *arguments, "--json"))["answers"])

    plain = kept()
    assert plain.name == "test-greedy.parquet"
    assert kept("--set", "max_tokens=30") == plain  # the default
    assert kept("--data", str(data)) == plain  # the data of the run
    conversation = {
        "id": 1,
        "split": "test",
        "utterances": [{"role": "speaker", "text": "Hi."}, {"role": "listener", "text": "Oh."}],
    }
    (tmp_path / "other.jsonl").write_text(json.dumps(conversation))
    prepare(str(tmp_path / "other.jsonl"), tmp_path / "other")
    others = [
        kept("--set", "max_tokens=3"),
        kept("--set", "max_tokens=4"),
        kept("--decode", "beam"),
        kept("--decode", "topk", "--set", "seed=3"),
        kept("--split", "valid"),
        kept("--data", str(tmp_path / "other")),
    ]
    assert len({plain, *others}) == 7
    assert pl.read_parquet(others[-1]).height == 1
    assert pl.read_parquet(plain).height == 6


@pytest.mark.usefixtures("home")
def test_data_without_emotions_gives_no_emotion_accuracy(call, tmp_path):
    utterances = [{"role": "speaker", "text": "Hi."}, {"role": "listener", "text": "Oh."}]
    conversation = {"id": 1, "split": "test", "utterances": utterances}
    (tmp_path / "mine.jsonl").write_text(json.dumps(conversation))
    prepare(str(tmp_path / "mine.jsonl"), tmp_path / "mine")
    done = call("evaluate", "second", "--data", "mine", "--json")
    assert json_output(done)["metrics"]["emotion_accuracy"] is None


@pytest.mark.usefixtures("home")
def test_evaluation_truncates_contexts_as_training_does(call):
    def perplexity():
        done = call("evaluate", "second", *FEW, "--json")
        return json_output(done)["metrics"]["perplexity"]

    whole = perplexity()
    folder = find_run("second").model
    save_model(dataclasses.replace(load_model(folder), max_context=1), folder)
    assert perplexity() != whole


@pytest.mark.usefixtures("home")
def test_evaluation_of_a_tracked_run_is_logged(call, monkeypatch):
    logged = []
    tracking = ModuleType("attune.platform.tracking")
    tracking.log_evaluation = lambda *arguments: logged.append(arguments)
    monkeypatch.setitem(sys.modules, "attune.platform.tracking", tracking)
    json_output(call("evaluate", "first", *FEW, "--json"))
    assert not logged
    find_run("first").update(run_id="abc123")
    result = json_output(call("evaluate", "abc123", "--split", "valid", *FEW, "--json"))
    assert result["run_id"] == "abc123"
    [(run, split, decode, metrics, path)] = logged
    assert (run.name, split, decode) == ("first", "valid", "greedy")
    assert metrics == result["metrics"]
    assert str(path) == result["answers"]
    assert path.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("frst",), "did you mean 'first'"),
        (("third",), "run 'third' has no model yet"),
        (("first", "--split", "tset"), "did you mean 'test'"),
        (("first", "--split", "train"), "has no samples"),
        (("first", "--split", "unpaired_contexts"), "unknown split"),
        (("first", "--decode", "beams"), "did you mean 'beam'"),
        (("first", "--set", "topk=3"), "did you mean 'top_k'"),
        (("first", "--data", "nowhere"), "not a prepared folder"),
        (("first", "--profile", "emp-dg"), "unknown profile 'emp-dg': did you mean 'empdg'"),
        (("first", "--stage", "generator"), "'first' has no earlier stages"),
        ((), "either a RUN or --answers"),
        (("first", "--answers", "file.jsonl"), "either a RUN or --answers"),
        (("--answers", "nowhere.jsonl"), "no such file of answers"),
        (("--answers", "nowhere.jsonl", "--decode", "beam"), "--decode is for a RUN"),
    ],
)
def test_invalid_options_are_rejected(call, home, arguments, message):
    assert message in error_of(call("evaluate", *arguments, "--json"))
    assert not list(home.glob("runs/*/answers"))


def test_the_model_of_an_earlier_stage_is_evaluated(call, home):
    last = json_output(call("evaluate", "first", "--split", "valid", "--json"))
    shutil.copytree(home / "runs/second/model", home / "runs/first/best-pretraining")
    first = ("evaluate", "first", "--split", "valid", "--stage")
    earlier = json_output(call(*first, "pretraining", "--json"))
    other = json_output(call("evaluate", "second", "--split", "valid", "--json"))
    assert earlier["metrics"] == other["metrics"] != last["metrics"]
    assert earlier["answers"] != last["answers"]
    assert "did you mean 'pretraining'" in error_of(call(*first, "pretrainin"))


def test_answers_in_files_are_tokenized_like_generated_answers(call, tmp_path):
    rows = [
        {"answer": "I'm so sorry, that's sad!", "response": "I am so sorry , that is sad !"},
        {"answer": "It's fine.", "response": "it is fine .", "other": [1]},
    ]
    (tmp_path / "raw.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    done = call("evaluate", "--answers", "raw.jsonl", "--json")
    result = json_output(done)
    assert set(result["metrics"]) == METRICS
    assert result["metrics"]["bleu"] == pytest.approx(100.0)
    assert result["metrics"]["distinct_1"] == 12 / 13  # "is" occurs in both
    unknown = METRICS - {"bleu", "distinct_1", "distinct_2", "different_answers"}
    assert {result["metrics"][name] for name in unknown} == {None}
    assert "smooth:none" in result["signature"]


def test_perplexity_and_emotion_accuracy_of_answers_in_a_file(tmp_path):
    frame = pl.DataFrame(
        {
            "answer": ["yes", "no", "no"],
            "response": ["a b c", "d", "e"],
            "log_likelihood": [-4, -2, -2],
            "emotion": ["sad", None, "angry"],
            "predicted_emotion": ["sad", "sad", None],
        }
    )
    frame.write_parquet(tmp_path / "a.parquet")
    metrics, _ = answers.score(answers.read(tmp_path / "a.parquet"))
    assert metrics["perplexity"] == pytest.approx(2.718281828)  # 8 nats over 4 + 2 + 2 tokens
    assert metrics["emotion_accuracy"] == 0.5
    silent = frame.with_columns(predicted_emotion=None, log_likelihood=None)
    silent.write_parquet(tmp_path / "silent.parquet")
    metrics, _ = answers.score(answers.read(tmp_path / "silent.parquet"))
    assert metrics["emotion_accuracy"] is None
    assert metrics["perplexity"] is None


def test_token_columns_are_not_tokenized_again():
    """Tokenizing twice would change closing quotation marks into opening ones."""
    tokens = "he said `` no '' today ."
    assert tokenize(pl.Series([tokens]))[0] != tokens
    frame = pl.DataFrame(
        {
            "answer": [tokens],
            "answer_tokens": [tokens],
            "response": ['He said "no" today.'],
        }
    )
    metrics, _ = answers.score(frame)
    assert metrics["bleu"] == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"answer": "a"}', "file.jsonl: column 'response' is missing; it has answer"),
        ('{"text": "a"}', "file.jsonl: column 'answer' is missing"),
        ('{"answer": "a", "response": "b"}\n\n{"answer": "a"}', "row 3: 'response' is missing"),
        ('{"answer": 1, "response": "b"}', "row 1: 'answer' must be text"),
        ('{"answer": "a", "response": "b", "log_likelihood": "x"}', "'log_likelihood' must be a"),
        ('{"answer": "a", "response": "b", "log_likelihood": NaN}', "row 1: 'log_likelihood' is"),
        ('{"answer": "a", "resp', "row 1: not readable as JSON"),
        ("[1]", "row 1: a line must be a JSON object"),
        ("", "is empty"),
        (b'{"answer": "a\xff", "response": "b"}', "row 1: not UTF-8"),
    ],
)
def test_a_damaged_answer_file_is_an_error(call, tmp_path, content, message):
    file = tmp_path / "file.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = call("evaluate", "--answers", file, "--json")
    assert message in error_of(done, code=1)
    assert str(file) in done.stderr


def test_a_damaged_parquet_answer_file_is_an_error(call, tmp_path):
    def refusal(name):
        return error_of(call("evaluate", "--answers", name), code=1)

    (tmp_path / "text.parquet").write_text("not at all")
    assert "text.parquet is not readable as Parquet" in refusal("text.parquet")
    pl.DataFrame({"answer": ["a"]}).write_parquet(tmp_path / "half.parquet")
    assert "half.parquet: column 'response' is missing" in refusal("half.parquet")
    numbers = pl.DataFrame({"answer": ["a"], "response": [1]})
    numbers.write_parquet(tmp_path / "numbers.parquet")
    assert "column 'response' is Int64" in refusal("numbers.parquet")
    holes = pl.DataFrame({"answer": ["a", None], "response": ["a", "b"]})
    holes.write_parquet(tmp_path / "holes.parquet")
    assert "holes.parquet, row 2: 'answer' is missing" in refusal("holes.parquet")
    holes.clear().write_parquet(tmp_path / "none.parquet")
    assert "none.parquet holds no answers" in refusal("none.parquet")


def test_answers_are_written_atomically(tmp_path, monkeypatch):
    frame = pl.DataFrame({"answer": ["a"]})
    answers.write(frame, tmp_path / "made" / "a.parquet")

    def broken(_, path):
        Path(path).write_text("half of it")
        raise OSError("disk full")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", broken)
    with pytest.raises(OSError, match="disk full"):
        answers.write(frame, tmp_path / "made" / "a.parquet")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["a.parquet"]
    assert pl.read_parquet(tmp_path / "made" / "a.parquet").equals(frame)
