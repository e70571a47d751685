"""The page without a browser: run catalog, conversations, examples, markup and events."""

import os
import shutil
import threading
from types import SimpleNamespace

import gradio
import pytest
import torch

from attune.models.base import DialogueVariant, Explanation
from attune.models.decoding import Decoding
from attune.models.dummy import Dummy
from attune.platform.core.errors import UsageError
from attune.platform.runs.model import MODEL_WEIGHTS, save_model
from attune.platform.serving.responder import Answer, Responder
from attune.ui import app, compare_layout, compare_tab, conversation, examples, markup, run_catalog
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


def test_a_model_is_loaded_again_only_after_it_changed(add_run):
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
    with pytest.raises(UsageError, match="Choose the answer"):
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
    with pytest.raises(UsageError, match="Type the speaker's turn"):
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


def test_text_is_escaped(add_run):
    run = add_run("mine")
    evil = "<img src=x onerror=alert(1)>"
    answer = Answer(text=evil, seconds=1.0, explanation=Explanation(emotion={evil: 1.0}))
    pages = [
        markup.render_answer(run, answer, done=True),
        markup.render_conversation((Turn(text=evil), Turn(text=evil, by=evil))),
        markup.render_problem(evil, evil),
    ]
    for page in pages:
        assert "<img" not in page
        assert "&lt;img" in page


def test_the_five_most_probable_emotions_are_shown():
    shares = {"a": 0.05, "b": 0.5, "c": 0.1, "d": 0.2, "e": 0.1, "f": 0.05}
    shown = markup.render_explanation(Explanation(emotion=shares))
    assert [shown.find(f">{name}<") > 0 for name in "abcdef"] == [True] * 5 + [False]
    assert shown.index(">b<") < shown.index(">d<") < shown.index(">c<")
    assert "width:50.0%" in shown
    assert "does not predict" in markup.render_explanation(Explanation())


def test_details_of_an_explanation_can_be_unfolded():
    reason = Explanation(
        emotion={"sad": 1.0},
        groups={"positive": 0.25, "negative": 0.75},
        listeners={"sad": 0.6, "lonely": 0.4},
        response_emotion={"positive": {"hopeful": 1.0}},
        by_word={"gate mimicking": (0.2, 0.7)},
        words=("<b>", "dog"),
    )
    shown = markup.render_explanation(reason)
    assert "<details" in shown
    for text in (
        "Emotion group",
        ">75%<",
        "Listener weights",
        ">lonely<",
        "positive group",
        ">hopeful<",
    ):
        assert text in shown
    assert '--strength:0%" title="0.200">&lt;b&gt;</mark>' in shown
    assert '--strength:100%" title="0.700">dog</mark>' in shown
    assert "<details" not in markup.render_explanation(Explanation(emotion={"sad": 1.0}))


def test_turns_are_shown_with_their_predicted_labels():
    reason = Explanation(
        response_label={"consoling": 0.9, "sad": 0.1},
        words=("my", "<b>", "oh", "yes"),
        word_labels=("sad", "sad", "questioning", ""),
    )
    shown = markup.render_explanation(reason)
    assert "<dt>sad</dt><dd>my &lt;b&gt;</dd><dt>questioning</dt><dd>oh</dd></dl>" in shown


def name_handler(fn):
    """Return the name of the handler of an event, which may be bound to a pane."""
    return getattr(fn.fn, "func", fn.fn).__name__ if fn.fn else ""


def test_each_pane_answers_in_a_separate_event(home):  # noqa: ARG001
    page = app.build(RunCatalog())
    answering = [fn for fn in page.fns.values() if name_handler(fn) == "answer"]
    assert len(answering) == compare_layout.MAX_PANES
    assert all(fn.concurrency_limit is None for fn in answering)
    assert len({fn.concurrency_id for fn in answering}) == compare_layout.MAX_PANES


@pytest.fixture
def build_tab():
    """A function that builds a compare tab of the runs on disk."""

    def build():
        with gradio.Blocks() as page:
            return compare_tab.build(page, RunCatalog())

    return build


def decoding_values():
    return [getattr(Decoding(), name) for name in Decoding.__dataclass_fields__]


def test_handlers_update_components_by_name(add_run, build_tab):
    for name in ("a", "b", "c"):
        add_run(name)
    tab = build_tab()
    components = tab.components
    first, second, third, *_ = components.panes
    unused = [None] * (len(components.panes) - 2)
    updates = tab.choose_runs(["a", "c"], "a", "b", *unused)
    assert set(updates) == set(second.all_outputs)
    assert updates[second.run] == "c"
    assert "Answer of c" in updates[second.display]
    assert tab.choose_runs(["a", "b"], "a", "b", *unused) == gradio.skip()
    removed = tab.choose_runs(["a"], "a", "b", "c", *unused[1:])
    assert set(removed) == {*second.all_outputs, *third.all_outputs}
    assert removed[third.run] is None
    assert not removed[third.column]["visible"]
    turns = (Turn(text="Hello."), Turn(text="Hi.", by="a"))
    undone = tab.undo(turns, "a", "b", *unused)
    assert set(undone) == {components.conversation, components.display}
    cleared = tab.undo(turns[:1], "a", "b", *unused)
    assert cleared[components.box] == "Hello."
    assert all("No answer yet" in cleared[pane.display] for pane in (first, second))
    assert cleared[third.display] == ""


def test_every_handler_updates_only_outputs_of_its_event(home):  # noqa: ARG001
    """Gradio raises an error for a component that is not an output of the event."""
    page = app.build(RunCatalog())
    outputs = {name_handler(fn): set(fn.outputs) for fn in page.fns.values()}
    tab = next(fn.fn.__self__ for fn in page.fns.values() if name_handler(fn) == "send")
    nobody = [None] * compare_layout.MAX_PANES
    turn = (Turn(text="Hello."),)
    example = [examples.Example(turns=("Hello.",))]
    updates = {
        "load": tab.load(),
        "send": tab.send("Hello.", (), 0, ["a"], "Hi."),
        "answer_again": tab.answer_again(turn, 0, ["a"]),
        "pick_example": tab.pick_example(0, example, 0, ["a"]),
        "continue_with": tab.continue_with(turn, "a", "Hi."),
        "choose_runs": tab.choose_runs(["a"], *nobody),
        "undo": tab.undo(turn, *nobody),
        "restart": tab.restart(turn, *nobody),
        "draw_examples": tab.draw_examples([], 0),
        "draw_other_examples": tab.draw_other_examples([], 0),
    }
    assert set(updates) == {name for name, each in outputs.items() if each} - {"answer"}
    for name, changed in updates.items():
        assert set(changed) <= outputs[name], name


def test_controls_of_a_variant_reach_its_model(add_run, build_tab, monkeypatch):
    asked = []

    class Echo:
        variant = SimpleNamespace(controls={"intent": ("asking", "agreeing")})

        def follow(self, turns, decoding, controls):
            asked.append((turns, decoding.max_tokens, controls))
            yield Answer(text="Yes.", seconds=0.1, explanation=Explanation())

    monkeypatch.setattr(Dummy, "controls", Echo.variant.controls)
    monkeypatch.setattr(
        compare_layout, "all_controls", lambda: {"intent": ["asking"], "style": ["short"]}
    )
    run = add_run("mine")
    (run.model / MODEL_WEIGHTS).touch()
    tab = build_tab()
    tab.responders = Responders(lambda _: Echo())
    [pane, *_] = tab.components.panes
    updates = tab.choose_runs(["mine"], None)
    intent, style = (updates[pane.controls[name]] for name in ("intent", "style"))
    assert intent["visible"]
    assert "agreeing" in intent["choices"]
    assert not style["visible"]
    context, default = (Turn(text="Hello."),), compare_layout.MODEL_DEFAULT
    *_, last = tab.answer(pane, "mine", context, *decoding_values(), "agreeing", default)
    assert last[pane.answer] == "Yes."
    list(tab.answer(pane, "mine", context, *decoding_values(), default, default))
    assert asked == [(["Hello."], 30, {"intent": "agreeing"}), (["Hello."], 30, {})]


def test_controls_are_those_of_all_variants(monkeypatch):
    monkeypatch.setattr(Dummy, "controls", {"intent": ("asking", "agreeing")})
    assert set(compare_layout.all_controls()["intent"]) >= {"asking", "agreeing"}
    assert DialogueVariant.controls == {}


def test_errors_are_shown_in_the_pane(add_run, build_tab, caplog):
    run = add_run("mine")
    (run.model / MODEL_WEIGHTS).write_bytes(b"nonsense")
    tab = build_tab()
    [pane, *_] = tab.components.panes
    values = [*decoding_values(), *[compare_layout.MODEL_DEFAULT] * len(pane.controls)]
    [_, failed] = tab.answer(pane, "mine", (Turn(text="Hello."),), *values)
    assert "model.json is missing" in failed[pane.display]
    assert failed[pane.answer] == ""
    tab.responders = Responders(lambda _: 1 / 0)
    [_, failed] = tab.answer(pane, "mine", (Turn(text="Hello."),), *values)
    assert "ZeroDivisionError" in failed[pane.display]
    assert "Traceback" not in failed[pane.display]
    assert "Traceback" in caplog.text


def test_an_answer_can_be_streamed_from_any_thread(build, tmp_path):
    """Gradio requests each token from another thread; torch's grad mode is set per thread."""
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
