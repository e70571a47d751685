"""The page without a browser: run catalog, conversations, examples, markup and events."""

import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from attune.models.base import DialogueVariant, Explanation
from attune.models.decoding import Decoding
from attune.models.dummy import Dummy
from attune.platform.core.errors import UsageError
from attune.platform.runs.model import MODEL_WEIGHTS, save_model
from attune.platform.serving.responder import Answer, Responder
from attune.ui import app, compare_tab, conversation, examples, markup, run_catalog
from attune.ui.conversation import Turn
from attune.ui.run_catalog import Responders, RunCatalog
from tests.runs import write_run


@pytest.fixture
def home(tmp_path, monkeypatch, prepared):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bundled").symlink_to(prepared)
    return tmp_path


@pytest.fixture
def add_run(home, prepared):
    def write(name, variant="dummy", folder=prepared, model=True):
        number = len(list((home / "runs").glob("*")))
        data = {"name": "bundled", "folder": str(folder), "hash": ""}
        run = write_run(home, name, variant, data=data, created=f"2026-01-01T00:00:{number:02}")
        if model:
            run.model.mkdir()
        return run

    return write


def test_runs_with_a_model_are_listed_newest_first(add_run):
    for name in ("one", "two"):
        add_run(name)
    add_run("three", "multi-trs")
    add_run("four", model=False)
    assert list(RunCatalog().runs()) == ["three", "two", "one"]
    assert RunCatalog().preselect(6) == ["three", "two"]
    late = RunCatalog()
    add_run("five", "transformer")
    assert late.preselect(6) == ["five", "three", "two"]


def test_selected_runs_keep_their_order(add_run):
    add_run("other")
    selection = [add_run(name) for name in ("b", "a", "c")]
    assert list(RunCatalog(selection).runs()) == ["b", "a", "c"]
    assert RunCatalog(selection).preselect(2) == ["b", "a"]


def test_classifiers_and_unknown_variants_are_not_listed(add_run, monkeypatch):
    add_run("dialogue")
    add_run("odd", "from-another-version")
    classifier = add_run("classifier", "multi-trs")
    find = run_catalog.find_variant

    def without(name):
        return (object, {}) if name == "multi-trs" else find(name)

    monkeypatch.setattr(run_catalog, "find_variant", without)
    assert list(RunCatalog().runs()) == ["dialogue"]
    with pytest.raises(UsageError, match="'classifier' does not answer"):
        RunCatalog([classifier])


def test_a_model_is_loaded_once_until_it_changes(add_run):
    run = add_run("mine")
    weights = run.model / MODEL_WEIGHTS
    weights.touch()
    loaded = []
    responders = Responders(lambda run: loaded.append(run.name) or object())
    assert responders.get(run) is responders.get(run)
    os.utime(weights, ns=(1, 1))
    responders.get(run)
    assert loaded == ["mine", "mine"]
    shutil.rmtree(run.folder)
    with pytest.raises(UsageError, match="'mine' is no longer on disk"):
        responders.get(run)


def test_conversation():
    opening = conversation.add_speaker_turn((), " Hello. ")
    assert opening == (Turn(text="Hello."),)
    with pytest.raises(UsageError, match="Choose first"):
        conversation.add_speaker_turn(opening, "And?")
    with pytest.raises(UsageError, match="no answer yet"):
        conversation.add_speaker_turn(opening, "And?", Turn(text=""))
    first, second = Turn(text="Hi.", by="a"), Turn(text="Oh.", by="b")
    assert conversation.add_speaker_turn(opening, "And?", first) == (
        *opening,
        first,
        Turn(text="And?"),
    )
    answered = conversation.set_listener_turn(opening, first)
    assert conversation.set_listener_turn(answered, second) == (*opening, second)
    assert conversation.remove_last_turn(answered) == (opening, first)
    with pytest.raises(UsageError, match="nothing to undo"):
        conversation.remove_last_turn(())
    with pytest.raises(UsageError, match="Type what the speaker says"):
        conversation.add_speaker_turn((), "  ")


def test_examples_are_drawn_from_the_runs_own_test_split(add_run, tmp_path, test_samples):
    drawn = examples.draw(add_run("mine"), 0, 5)
    assert drawn == examples.draw(None, 0, 5)  # the bundled corpus is its data
    assert drawn != examples.draw(None, 1, 5)
    assert len({one.emotion for one in drawn}) == 5
    contexts = {tuple(context) for context in test_samples["context"]}
    assert all(one.turns in contexts and len(one.turns) % 2 for one in drawn)
    gone = add_run("gone", folder=tmp_path / "deleted")
    assert examples.draw(gone, 0, 5) == drawn
    assert len(set(examples.draw(None, 0, 40))) == 40  # more than there are emotions


def test_no_text_is_markup(add_run):
    run = add_run("mine")
    evil = "<img src=x onerror=alert(1)>"
    answer = Answer(text=evil, seconds=1.0, explanation=Explanation(emotion={evil: 1.0}))
    pages = [
        markup.answer(run, answer, done=True),
        markup.conversation((Turn(text=evil), Turn(text=evil, by=evil))),
        markup.problem(evil, evil),
    ]
    for page in pages:
        assert "<img" not in page
        assert "&lt;img" in page


def test_the_five_likeliest_emotions_are_shown():
    shares = {"a": 0.05, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.1, "f": 0.05}
    shown = markup.reasons(Explanation(emotion=shares))
    assert [shown.find(f">{name}<") > 0 for name in "abcdef"] == [True] * 5 + [False]
    assert shown.index(">b<") < shown.index(">d<") < shown.index(">c<")
    assert "width:50.0%" in shown
    assert "does not predict" in markup.reasons(Explanation())


def test_reasons_of_an_answer_can_be_unfolded():
    reason = Explanation(
        emotion={"sad": 1.0},
        groups={"positive": 0.25, "negative": 0.75},
        listeners={"sad": 0.6, "lonely": 0.4},
        response_emotion={"positive": {"hopeful": 1.0}},
        by_word={"gate mimicking": (0.2, 0.7)},
        words=("<b>", "dog"),
    )
    shown = markup.reasons(reason)
    assert "<details" in shown
    for text in ("Taken as", ">75%<", "Listener weights", ">lonely<", "if positive", ">hopeful<"):
        assert text in shown
    assert '--strength:0%" title="0.200">&lt;b&gt;</mark>' in shown
    assert '--strength:100%" title="0.700">dog</mark>' in shown
    assert "<details" not in markup.reasons(Explanation(emotion={"sad": 1.0}))


def test_turns_are_shown_with_what_they_are_taken_for():
    reason = Explanation(
        response_label={"consoling": 0.9, "sad": 0.1},
        words=("my", "<b>", "oh", "yes"),
        word_labels=("sad", "sad", "questioning", ""),
    )
    shown = markup.reasons(reason)
    assert "<dt>sad</dt><dd>my &lt;b&gt;</dd><dt>questioning</dt><dd>oh</dd></dl>" in shown


def test_each_pane_answers_in_an_event_of_its_own(home):  # noqa: ARG001
    page = app.build(RunCatalog())
    answering = [fn for fn in page.fns.values() if fn.name == "answer"]
    assert len(answering) == compare_tab.MAX_PANES
    assert all(fn.concurrency_limit is None for fn in answering)
    assert len({fn.concurrency_id for fn in answering}) == compare_tab.MAX_PANES


def test_controls_of_a_variant_reach_its_model(add_run, monkeypatch):
    asked = []

    class Echo:
        variant = SimpleNamespace(controls={"intent": ("asking", "agreeing")})

        def follow(self, turns, decoding, controls):
            asked.append((turns, decoding.max_tokens, controls))
            yield Answer(text="Yes.", seconds=0.1, explanation=Explanation())

    monkeypatch.setattr(Dummy, "controls", Echo.variant.controls)
    run = add_run("mine")
    (run.model / MODEL_WEIGHTS).touch()
    tab = compare_tab.CompareTab(RunCatalog(), ("intent", "style"))
    tab.responders = Responders(lambda _: Echo())
    *_, intent, style = tab.choose_runs(["mine"], None)
    assert intent["visible"]
    assert "agreeing" in intent["choices"]
    assert not style["visible"]
    values = [getattr(Decoding(), name) for name in Decoding.__dataclass_fields__]
    context = (Turn(text="Hello."),)
    *_, last = tab.answer("mine", context, *values, "agreeing", compare_tab.MODEL_DEFAULT)
    assert last[1] == "Yes."
    list(tab.answer("mine", context, *values, compare_tab.MODEL_DEFAULT, compare_tab.MODEL_DEFAULT))
    assert asked == [(["Hello."], 30, {"intent": "agreeing"}), (["Hello."], 30, {})]
    assert compare_tab._all_controls()["intent"] == ["asking", "agreeing"]
    assert DialogueVariant.controls == {}


def test_errors_are_shown_in_the_pane(add_run, caplog):
    run = add_run("mine")
    (run.model / MODEL_WEIGHTS).write_bytes(b"nonsense")
    tab = compare_tab.CompareTab(RunCatalog())
    values = [getattr(Decoding(), name) for name in Decoding.__dataclass_fields__]
    [_, (shown, answer, _)] = tab.answer("mine", (Turn(text="Hello."),), *values)
    assert "model.json is missing" in shown
    assert answer == ""
    tab.responders = Responders(lambda _: 1 / 0)
    [_, (shown, _, _)] = tab.answer("mine", (Turn(text="Hello."),), *values)
    assert "ZeroDivisionError" in shown
    assert "Traceback" not in shown
    assert "Traceback" in caplog.text


def test_an_answer_can_be_followed_from_any_thread(build, tmp_path):
    """Gradio asks for each token from another thread, and whether torch records is the thread's."""
    save_model(build("multi-trs"), tmp_path / "model")
    responder = Responder(tmp_path / "model")
    recorded = []
    forward = responder.variant.next_logits

    def watched(tokens, state):
        logits, state = forward(tokens, state)
        recorded.append(logits.requires_grad)
        return logits, state

    responder.variant.next_logits = watched
    following = responder.follow(["My dog ran away."], Decoding(max_tokens=5))
    answers, modes = [], []

    def ask():
        answers.append(next(following, None))
        modes.append(torch.is_grad_enabled())

    while not answers or answers[-1] is not None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert not any(recorded)
    assert all(modes)
    [alone] = responder.respond([["My dog ran away."]], Decoding(max_tokens=5))
    first, *_, last, _ = answers
    assert first.text == ""
    assert first.explanation == last.explanation == alone.explanation
    assert last.text == alone.text
    seconds = [answer.seconds for answer in answers[:-1]]
    assert seconds == sorted(seconds)
