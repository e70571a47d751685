"""`attune variants`, `runs`, `respond` and `evaluate`, as people and scripts meet them."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import polars as pl
import pytest
import torch

from attune.jobs import cli, options
from attune.jobs.variants import field_help
from attune.models import all_variants
from attune.models.base import Between, Choice
from attune.models.decoding import Decoding
from attune.platform import runs, store
from attune.platform.corpora import prepare as preparing
from attune.platform.corpora.prepare import find_data, prepare, read_manifest
from attune.platform.errors import UsageError
from attune.platform.evaluation import answers
from attune.platform.text.tokenizing import tokenize
from tests.unit.test_cli import attune

METRICS = {
    "perplexity", "perplexity_sample_mean", "unknown_share", "emotion_accuracy",
    "emotion_accuracy_top2", "emotion_accuracy_top5", "bleu", "distinct_1", "distinct_2",
    "different_answers",
    "parameters",
}  # fmt: skip
FEW = ("--set", "max_tokens=3")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six conversations, so that a split is answered in a moment; train is left empty."""
    folder = tmp_path_factory.mktemp("few")
    conversations = [
        {
            "id": f"c{number}",
            "emotion": emotion,
            "split": split,
            "utterances": [
                {"role": "speaker", "text": f'I feel {emotion} today, and I said "no".'},
                {"role": "listener", "text": 'You said "why", and it\'s fine. I am sorry!'},
                {"role": "speaker", "text": "Thank you."},
                {"role": "listener", "text": f"Number {number} is not a problem."},
            ],
        }
        for number, (emotion, split) in enumerate(
            [("sad", "test"), ("joyful", "test"), ("angry", "test"), ("proud", "valid")]
        )
    ]
    (folder / "few.jsonl").write_text("\n".join(json.dumps(c) for c in conversations))
    prepare(str(folder / "few.jsonl"), folder / "data")
    return folder / "data"


@pytest.fixture
def home(tmp_path, monkeypatch, build, data):
    """A home with three runs: two that answer, and one that has no model yet."""
    home = tmp_path / "home"
    monkeypatch.setenv("ATTUNE_HOME", str(home))
    given = {"name": "few", "folder": str(data), "hash": read_manifest(data)["hash"]}
    for name, variant, status in (
        ("first", "dummy", "finished"),
        ("second", "multi-trs", "stopped"),
        ("third", "dummy", "running"),
    ):
        run = store.Run(
            name=name,
            folder=home / "runs" / name,
            variant=variant,
            preset="tiny",
            config={},
            training={},
            data=given,
            seed=len(name),
            created=f"2026-01-01T00:00:0{len(list(home.glob('runs/*')))}",
            status=status,
        )
        run.write()
        if status != "running":
            runs.save(build(variant), run.model)
    metrics = {"valid_loss": 2.0, "valid_perplexity": 7.4, "valid_emotion_accuracy": 0.5}
    store.find("second").changed(result={"metrics": metrics})
    return home


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """The whole command line, errors and exit codes too, without a process of its own."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["attune", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        return SimpleNamespace(returncode=end.value.code or 0, stdout=shown.out, stderr=shown.err)

    yield called
    signal.signal(signal.SIGTERM, handler)


def spoken(done):
    """The one JSON object of a command, which must be all of stdout."""
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    return json.loads(line)


def refused(done, code=2):
    assert done.returncode == code, done.stderr
    assert not done.stdout
    assert len(done.stderr.splitlines()) <= 2
    assert "Traceback" not in done.stderr
    return done.stderr


def test_variants(call):
    found = spoken(call("variants", "--json"))["variants"]
    assert [one["name"] for one in found] == list(all_variants())
    for one in found:
        assert set(one) == {"name", "system", "paper", "ablation_of", "kind", "search_spaces"}
        assert one["kind"] in ("dialogue", "classifier")
        for key in (key for group in one["search_spaces"].values() for key in group.values()):
            assert set(key) in ({"type", "values"}, {"type", "low", "high"})
    multi = next(one for one in found if one["name"] == "multi-trs")
    assert (multi["system"], multi["ablation_of"]) == ("Multi-TRS", None)
    spaces = multi["search_spaces"]
    assert spaces["architecture"]["num_layers"] == {"type": "choice", "values": [1, 2, 4]}
    weight = {"type": "loguniform", "low": 0.1, "high": 10.0}
    assert spaces["loss-weights"]["emotion_weight"] == weight
    assert "learning_rate" in spaces["optimizer"]


def test_an_ablation_names_what_it_is_of(call, monkeypatch):
    from attune.models.dummy import Dummy

    monkeypatch.setattr(Dummy, "ablations", {"dummy-narrow": {"width": 2}})
    space = {"size": {"width": Between(low=1, high=8, scale="int"), "a": Choice(values=(1, "b"))}}
    monkeypatch.setattr(Dummy, "search_spaces", space)
    [one] = spoken(call("variants", "dummy-narrow", "--json"))["variants"]
    assert one["ablation_of"] == "dummy"
    assert one["search_spaces"]["size"] == {
        "width": {"type": "int", "low": 1, "high": 8},
        "a": {"type": "choice", "values": [1, "b"]},
    }
    [width] = [setting for setting in one["settings"] if setting["name"] == "width"]
    assert width["default"] == 32
    assert set(width["presets"].values()) == {2}


def test_settings_of_a_variant_carry_their_help(call):
    done = call("variants", "multi-trs", "--json")
    settings = {one["name"]: one for one in spoken(done)["variants"][0]["settings"]}
    assert settings["emotion_weight"]["help"].startswith("Weight of the emotion's cross-entropy")
    assert settings["width"]["help"] == "Width of embeddings and hidden states."  # inherited
    assert settings["width"]["presets"] == {"tiny": 32, "small": 128, "paper": 300}
    assert settings["learning_rate"]["of"] == "training"
    assert "Weight of the emotion's" in done.stderr
    assert "did you mean 'multi-trs'" in refused(call("variants", "multi-tsr"))


def test_every_setting_has_a_help_text():
    for variant, _ in all_variants().values():
        assert set(field_help(variant.Config)) == {
            field.name for field in dataclasses.fields(variant.Config)
        }


@pytest.mark.usefixtures("home")
def test_runs(call):
    found = spoken(call("runs", "--json"))["runs"]
    assert [run["name"] for run in found] == ["first", "second", "third"]
    assert found[1] == {
        "name": "second",
        "run_id": None,
        "variant": "multi-trs",
        "status": "stopped",
        "data": "few",
        "alias": None,
        "job": None,
        "dashboard": None,
        "seed": 6,
        "metrics": {"valid_loss": 2.0, "valid_perplexity": 7.4, "valid_emotion_accuracy": 0.5},
    }
    assert found[0]["metrics"] == {}
    only = spoken(call("runs", "--variant", "dummy", "--json"))["runs"]
    assert [run["name"] for run in only] == ["first", "third"]
    none = spoken(call("runs", "--variant", "transformer", "--json"))
    assert none == {"runs": []}
    shown = call("runs").stdout
    assert "50.00%" in shown
    assert "…" not in shown  # no terminal, no edge: a job's log has whole names
    assert "emotion accuracy" in shown
    wrong = call("runs", "--variant", "dumy")
    assert "did you mean 'dummy'" in refused(wrong)


@pytest.mark.usefixtures("home")
def test_respond(call, tmp_path):
    turns = ("I lost [my] job.", "Oh no!", "It's sad.")
    context = [part for turn in turns for part in ("--context", turn)]
    command = ("respond", "first", "multi-trs@latest", *context, *FEW, "--json")
    done = attune(*command, cwd=tmp_path)
    answer = spoken(done)
    assert answer["context"] == list(turns)
    assert [(one["run"], one["variant"]) for one in answer["answers"]] == [
        ("first", "dummy"),
        ("second", "multi-trs"),
    ]
    for one in answer["answers"]:
        assert set(one) == {"run", "variant", "answer", "seconds", "explanation"}
        assert one["seconds"] > 0
        assert sum(one["explanation"]["emotion"].values()) == pytest.approx(1.0)
    shown = call("respond", "second", *context, *FEW).stdout
    assert "speaker: I lost [my] job." in shown
    assert answer["answers"][1]["answer"] in shown
    assert "reads " in shown


@pytest.mark.usefixtures("home")
def test_respond_decodes_as_it_is_told(call):
    def answer(*arguments):
        command = ("respond", "second", "--context", "Hello.", "--json", *arguments)
        return spoken(call(*command))["answers"][0]["answer"]

    sampled = ("--decode", "nucleus", "--set", "max_tokens=8", "--set", "top_p=1.0")
    first = answer(*sampled)
    assert answer(*sampled, "--set", "seed=0") == first
    assert answer(*sampled, "--set", "seed=1") != first
    assert len(answer("--set", "max_tokens=1").split()) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("secnd", "--context", "x"), "did you mean 'second'"),
        (("multi-tsr@latest", "--context", "x"), "did you mean 'multi-trs'"),
        (("third", "--context", "x"), "run 'third' has no model yet: it is running"),
        (("second", "--context", "x", "--context", "y"), "has 2 turns"),
        (("second",), "--context"),
        (("second", "--context", "x", "--decode", "gredy"), "did you mean 'greedy'"),
        (("second", "--context", "x", "--set", "beam=3"), "did you mean 'beams'"),
        (("second", "--context", "x", "--set", "beams"), "--set beams: write it as KEY=VALUE"),
        (("second", "--context", "x", "--set", "beams=many"), "beams=many: int is expected"),
        (("second", "--context", "x", "--set", "beams=0"), "beams=0: at least 1 is expected"),
        (("second", "--context", "x", "--set", "top_p=1.5"), "top_p=1.5"),
        (("second", "--context", "x", "--set", "temperature=0"), "temperature=0"),
    ],
)
@pytest.mark.usefixtures("home")
def test_respond_refuses(call, arguments, message):
    assert message in refused(call("respond", *arguments, "--json"))


def test_evaluate_a_run(call, home, data):
    done = call("evaluate", "second", *FEW, "--json")
    result = spoken(done)
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
    # What a run's evaluation keeps is scored to the same numbers, quotation marks and all.
    again = spoken(call("evaluate", "--answers", kept, "--json"))
    assert (again["run_id"], again["split"], again["decode"]) == (None, None, None)
    assert again["answers"] == str(kept)
    of_the_model = {
        "unknown_share", "emotion_accuracy_top2", "emotion_accuracy_top5", "parameters",
    }  # fmt: skip
    for name in METRICS - of_the_model:
        assert again["metrics"][name] == pytest.approx(result["metrics"][name]), name
    assert all(again["metrics"][name] is None for name in of_the_model)


@pytest.mark.usefixtures("home")
def test_evaluate_keeps_what_was_made_differently_apart(call, data, tmp_path):
    def kept(*arguments):
        return Path(spoken(call("evaluate", "first", *arguments, "--json"))["answers"])

    plain = kept()
    assert plain.name == "test-greedy.parquet"
    assert kept("--set", "max_tokens=30") == plain  # the default
    assert kept("--data", str(data)) == plain  # its own
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
def test_evaluate_without_emotions_in_the_data_has_no_accuracy(call, tmp_path):
    utterances = [{"role": "speaker", "text": "Hi."}, {"role": "listener", "text": "Oh."}]
    conversation = {"id": 1, "split": "test", "utterances": utterances}
    (tmp_path / "mine.jsonl").write_text(json.dumps(conversation))
    prepare(str(tmp_path / "mine.jsonl"), tmp_path / "mine")
    done = call("evaluate", "second", "--data", "mine", "--json")
    assert spoken(done)["metrics"]["emotion_accuracy"] is None


@pytest.mark.usefixtures("home")
def test_evaluation_cuts_contexts_as_training_did(call):
    def perplexity():
        done = call("evaluate", "second", *FEW, "--json")
        return spoken(done)["metrics"]["perplexity"]

    whole = perplexity()
    folder = store.find("second").model
    runs.save(dataclasses.replace(runs.load(folder), max_context=1), folder)
    assert perplexity() != whole


@pytest.mark.usefixtures("home")
def test_runs_passes_over_a_damaged_one_and_says_so(call):
    path = store.find("first").folder / store.RECORD
    path.write_text("{")
    done = call("runs", "--json")
    assert "first" not in {run["name"] for run in spoken(done)["runs"]}
    assert f"{path} is damaged" in done.stderr


@pytest.mark.usefixtures("home")
def test_evaluate_logs_what_is_tracked(call, monkeypatch):
    logged = []
    tracking = ModuleType("attune.platform.tracking")
    tracking.log_evaluation = lambda *arguments: logged.append(arguments)
    monkeypatch.setitem(sys.modules, "attune.platform.tracking", tracking)
    spoken(call("evaluate", "first", *FEW, "--json"))
    assert not logged
    store.find("first").changed(run_id="abc123")
    result = spoken(call("evaluate", "abc123", "--split", "valid", *FEW, "--json"))
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
def test_evaluate_refuses(call, home, arguments, message):
    assert message in refused(call("evaluate", *arguments, "--json"))
    assert not list(home.glob("runs/*/answers"))


def test_a_run_is_measured_as_it_was_after_an_earlier_stage(call, home):
    last = spoken(call("evaluate", "first", "--split", "valid", "--json"))
    shutil.copytree(home / "runs/second/model", home / "runs/first/best-pretraining")
    first = ("evaluate", "first", "--split", "valid", "--stage")
    earlier = spoken(call(*first, "pretraining", "--json"))
    other = spoken(call("evaluate", "second", "--split", "valid", "--json"))
    assert earlier["metrics"] == other["metrics"] != last["metrics"]
    assert earlier["answers"] != last["answers"]
    assert "did you mean 'pretraining'" in refused(call(*first, "pretrainin"))


def test_anybodys_answers_are_scored_on_our_tokens(call, tmp_path):
    rows = [
        {"answer": "I'm so sorry, that's sad!", "response": "I am so sorry , that is sad !"},
        {"answer": "It's fine.", "response": "it is fine .", "other": [1]},
    ]
    (tmp_path / "raw.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    done = call("evaluate", "--answers", "raw.jsonl", "--json")
    result = spoken(done)
    assert set(result["metrics"]) == METRICS
    assert result["metrics"]["bleu"] == pytest.approx(100.0)
    assert result["metrics"]["distinct_1"] == 12 / 13  # "is" stands in both
    unknown = METRICS - {"bleu", "distinct_1", "distinct_2", "different_answers"}
    assert {result["metrics"][name] for name in unknown} == {None}
    assert "smooth:none" in result["signature"]


def test_answers_with_likelihoods_and_emotions(tmp_path):
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


def test_tokens_are_taken_as_they_stand():
    """Tokenising tokens again would turn the closing quotation mark around."""
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
def test_a_broken_file_of_answers(call, tmp_path, content, message):
    file = tmp_path / "file.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = call("evaluate", "--answers", file, "--json")
    assert message in refused(done, code=1)
    assert str(file) in done.stderr


def test_a_broken_parquet_of_answers(call, tmp_path):
    def refusal(name):
        return refused(call("evaluate", "--answers", name), code=1)

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


def test_answers_appear_whole_or_not_at_all(tmp_path, monkeypatch):
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


def test_find_data(tmp_path, monkeypatch, prepared):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    folder = find_data("bundled")
    assert folder == tmp_path / "data" / "bundled"
    assert read_manifest(folder) == read_manifest(prepared)
    monkeypatch.setattr(preparing, "prepare", None)  # it is not made a second time
    assert find_data("bundled") == folder
    monkeypatch.chdir(prepared.parent)
    assert find_data("./bundled") == prepared
    with pytest.raises(UsageError, match="not a prepared folder"):
        find_data("bundeld")


def test_changes():
    assert options.changes(["a=1", "b=x=y", "a=2"]) == {"a": "2", "b": "x=y"}
    assert options.changes(None) == {}
    for text in ("a", "=1", ""):
        with pytest.raises(UsageError, match="KEY=VALUE"):
            options.changes([text])


def test_help_names_every_setting_of_decoding(tmp_path):
    """It is written by hand, since asking the class would import torch."""
    keys = {field.name for field in dataclasses.fields(Decoding)} - {"method"}
    for command in ("respond", "evaluate"):
        done = attune(command, "--help", cwd=tmp_path, COLUMNS="200")
        assert keys <= set(re.findall(r"\w+", done.stdout))
        assert "Examples" in done.stdout


def test_help_is_fast_because_it_imports_nothing_heavy():
    code = (
        "import attune.jobs.cli, sys; print({'torch', 'mlflow', 'nltk', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture
def mimics(home, build):
    """Two runs of MIME more, one without mimicry."""
    for name, variant in (("with", "mime"), ("without", "mime-no-mimicry")):
        folder = home / "runs" / name
        run = dataclasses.replace(store.find("first"), name=name, folder=folder, variant=variant)
        run.write()
        runs.save(build(variant), run.model)
    return home


@pytest.fixture
def loud(mimics):
    """One with emotions that make a difference, as they do not before training."""
    model = runs.load(store.find("with").model)
    with torch.no_grad():
        model.variant.emotions.weight *= 100.0
    runs.save(model, mimics / "runs" / "with" / "model")


@pytest.mark.usefixtures("mimics")
def test_show_embeddings(call, tmp_path):
    out = tmp_path / "pictures" / "figure.png"
    done = spoken(call("show", "embeddings", "with", "without", "--out", out, "--json"))
    assert done["picture"] == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [one["variant"] for one in done["runs"]] == ["mime", "mime-no-mimicry"]
    assert all(-0.2 < one["separation"] < 0.2 for one in done["runs"])  # nothing learned yet
    assert "a run of mime is expected" in refused(call("show", "embeddings", "first"))
    assert "ends in .png" in refused(call("show", "embeddings", "with", "--out", "figure.xyz"))


def test_separated_groups_score_higher(call, mimics):
    model = runs.load(store.find("with").model)
    with torch.no_grad():
        model.variant.emotions.weight[model.variant.groups["positive"]] += 1.0
    runs.save(model, mimics / "runs" / "with" / "model")
    one, other = spoken(call("show", "embeddings", "with", "without", "--json"))["runs"]
    assert one["separation"] > 0.5 > other["separation"]


@pytest.mark.usefixtures("loud")
def test_show_stochasticity(call):
    done = spoken(call("show", "stochasticity", "with", "--count", 4, "--json"))
    assert len(done["answers"]) == 4
    differing = [one for one in done["answers"] if one["with"] != one["without"]]
    assert done["differing"] == len(differing) / 4
    assert differing
    assert done == spoken(call("show", "stochasticity", "with", "--count", 4, "--json"))
    assert "a run of mime is expected" in refused(call("show", "stochasticity", "second"))
    assert "unknown split 'tset'" in refused(
        call("show", "stochasticity", "with", "--split", "tset")
    )


@pytest.mark.usefixtures("loud")
def test_controls_are_checked_and_used(call):
    ask = ("respond", "with", "--context", "I won!", *FEW)
    calm = spoken(call(*ask, "--json"))["answers"][0]
    assert set(calm["explanation"]["response_emotion"]) == {"positive", "negative"}
    assert calm["explanation"]["words"] == ["i", "won", "!"]
    assert len(calm["explanation"]["by_word"]["gate mimicking"]) == 3
    seeds = [("--control", "stochasticity=on", "--control", f"seed={n}") for n in range(4)]
    texts = {spoken(call(*ask, *seed, "--json"))["answers"][0]["answer"] for seed in seeds}
    assert len(texts) > 1
    for given, message in (
        ("stochasticity=maybe", "unknown value of stochasticity 'maybe'"),
        ("stochastic=on", "did you mean 'stochasticity'"),
        ("on", "--control on: write it as KEY=VALUE"),
    ):
        assert message in refused(call(*ask, "--control", given))
    wrong = call("respond", "with", "second", "--context", "Hi.", "--control", "seed=1")
    assert "Multi-TRS has no controls" in refused(wrong)
    kept = {
        spoken(call("evaluate", "with", *FEW, *more, "--json"))["answers"]
        for more in ((), ("--control", "stochasticity=on"))
    }
    assert len(kept) == 2
