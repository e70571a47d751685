"""The tab on which one conversation is answered by several runs side by side."""

import dataclasses
import functools
import logging
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar, cast

import gradio as gr

from attune.models import all_variants
from attune.models.base import DialogueVariant
from attune.models.decoding import Decoding
from attune.platform.core.errors import DataError, UsageError
from attune.platform.core.field_help import field_help
from attune.platform.core.settings import apply_overrides
from attune.platform.runs.record import Run
from attune.platform.serving.responder import Answer, controls_of
from attune.ui import conversation as talk
from attune.ui import examples, markup
from attune.ui.conversation import Conversation, Turn
from attune.ui.run_catalog import Offer, Responders

MAX_PANES = 6
NUM_EXAMPLES = 5
EXAMPLE_LENGTH = 72
MODELS_CHOICE = "the model's own"

RANGES: dict[str, tuple[float, float, float]] = {
    "max_tokens": (1, 100, 1),
    "beams": (1, 20, 1),
    "length_penalty": (0, 3, 0.1),
    "block_ngrams": (0, 6, 1),
    "top_k": (1, 100, 1),
    "top_p": (0.05, 1, 0.05),
    "temperature": (0.1, 3, 0.1),
}
"""Least, most and step of what has a slider."""

QUIET: Any = {"show_progress": "hidden", "api_visibility": "private"}
FOCUS = "() => document.querySelector('#turn textarea').focus()"

Update = Any
"""What a handler returns for one component: a value, or gradio's word for a change."""


@dataclass(frozen=True, kw_only=True)
class Pane:
    """A column: what it shows and remembers of one run's answer."""

    column: gr.Column
    shown: gr.HTML
    go_on: gr.Button
    controls: dict[str, gr.Dropdown]
    run: gr.State
    """The run's name; None where the column is not in use."""
    answer: gr.State
    """The whole answer, empty until it is there."""

    @property
    def outcome(self) -> list[gr.components.Component]:
        """What an answer changes."""
        return [self.shown, self.answer, self.go_on]

    @property
    def all(self) -> list[Any]:
        """What another run changes."""
        return [self.column, self.run, *self.outcome, *self.controls.values()]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the tab is made of."""

    runs: gr.Dropdown
    picks: list[gr.Button]
    others: gr.Button
    settings: list[gr.components.Component]
    shown: gr.HTML
    box: gr.Textbox
    send: gr.Button
    again: gr.Button
    undo: gr.Button
    restart: gr.Button
    panes: list[Pane]
    conversation: gr.State
    drawn: gr.State
    """The examples on the buttons."""
    draw_number: gr.State
    asked: gr.State
    """Counts questions; when it changes, all panes answer at once, each in its own event."""


def build(page: gr.Blocks, offer: Offer) -> None:
    """Lay the tab out and wire it up."""
    controls = _all_controls()
    with gr.Row(elem_id="talk"):
        with gr.Column(scale=1, min_width=280, elem_id="choices"):
            choices = _choices()
        with gr.Column(scale=3, min_width=320):
            talking = _talking(controls)
    parts = Parts(
        **choices,
        **talking,
        conversation=gr.State(()),
        drawn=gr.State([]),
        draw_number=gr.State(0),
        asked=gr.State(0),
    )
    tab = Talk(offer, tuple(controls))
    answering = _wire_answers(tab, parts)
    _wire_conversation(tab, parts, answering)
    _wire_choices(tab, parts, page, answering)


def _choices() -> dict[str, Any]:
    runs = gr.Dropdown(
        label="Runs",
        info=f"Each answers in its own column; {MAX_PANES} at most.",
        choices=[],
        multiselect=True,
        max_choices=MAX_PANES,
        interactive=True,
        elem_id="runs",
    )
    gr.HTML("<h2>Examples</h2>")
    with gr.Column(elem_id="examples"):
        picks = [
            gr.Button("", size="sm", visible=False, elem_classes="example")
            for _ in range(NUM_EXAMPLES)
        ]
    others = gr.Button("Draw others", size="sm")
    with gr.Accordion("Decoding", open=False):
        settings = [_setting(field) for field in dataclasses.fields(Decoding)]
    return {"runs": runs, "picks": picks, "others": others, "settings": settings}


def _talking(controls: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    shown = gr.HTML(markup.conversation(()), elem_id="conversation")
    box = gr.Textbox(
        label="The speaker says",
        placeholder="I lost my job today.",
        lines=1,
        max_lines=4,
        max_length=2000,
        elem_id="turn",
        autofocus=True,
    )
    with gr.Row(elem_id="actions"):
        actions = {
            "send": _action("Send", variant="primary", scale=3),
            "again": _action("Answer again"),
            "undo": _action("Undo"),
            "restart": _action("Start again"),
        }
    with gr.Row(elem_id="panes"):
        panes = [_pane(number, controls) for number in range(MAX_PANES)]
    return {"shown": shown, "box": box, **actions, "panes": panes}


def _wire_answers(tab: "Talk", parts: Parts) -> Any:
    """The events in which the panes answer."""
    # "multiple": an answer that was broken off may still be ending when the next one is asked for.
    return [
        parts.asked.change(
            tab.answer,
            [pane.run, parts.conversation, *parts.settings, *pane.controls.values()],
            pane.outcome,
            concurrency_limit=None,
            trigger_mode="multiple",
            **QUIET,
        )
        for pane in parts.panes
    ]


def _wire_conversation(tab: "Talk", parts: Parts, answering: Any) -> None:
    said = [parts.conversation, parts.shown, parts.box, parts.asked]
    pane_runs = [pane.run for pane in parts.panes]
    answers = [pane.answer for pane in parts.panes]
    gr.on(
        [parts.send.click, parts.box.submit],
        tab.say,
        [parts.box, parts.conversation, parts.asked, parts.runs, *answers],
        said,
        **QUIET,
    )
    parts.again.click(
        tab.ask_again,
        [parts.conversation, parts.asked, parts.runs],
        parts.asked,
        cancels=answering,
        **QUIET,
    )
    for pane in parts.panes:
        chosen = pane.go_on.click(
            tab.go_on,
            [parts.conversation, pane.run, pane.answer],
            [parts.conversation, parts.shown],
            **QUIET,
        )
        chosen.success(None, js=FOCUS)
    outcomes = [part for pane in parts.panes for part in pane.outcome]
    blank = [parts.conversation, parts.shown, parts.box, *outcomes]
    given = [parts.conversation, *pane_runs]
    parts.undo.click(tab.undo, given, blank, cancels=answering, **QUIET)
    parts.restart.click(tab.restart, given, blank, cancels=answering, **QUIET)


def _wire_choices(tab: "Talk", parts: Parts, page: gr.Blocks, answering: Any) -> None:
    whole_panes = [part for pane in parts.panes for part in pane.all]
    choosing = [parts.runs, *(pane.run for pane in parts.panes)]
    number = [parts.runs, parts.draw_number]
    drawn = [parts.drawn, parts.draw_number, *parts.picks]
    chosen = parts.runs.change(tab.choose, choosing, whole_panes, cancels=answering, **QUIET)
    chosen.success(tab.draw, number, drawn, **QUIET)
    loaded = page.load(tab.load, None, [parts.runs, *whole_panes], **QUIET)
    loaded.success(tab.draw, number, drawn, **QUIET)
    parts.others.click(tab.draw_others, number, drawn, **QUIET)
    said = [parts.conversation, parts.shown, parts.box, parts.asked]
    for place, pick in enumerate(parts.picks):
        pick.click(
            functools.partial(tab.pick, place),
            [parts.drawn, parts.asked, parts.runs],
            said,
            cancels=answering,
            **QUIET,
        )


def _action(name: str, **options: Any) -> gr.Button:
    return gr.Button(name, size="md", **{"min_width": 110, "scale": 1, **options})


def _pane(number: int, controls: Mapping[str, Sequence[str]]) -> Pane:
    with gr.Column(visible=False, min_width=230, elem_classes="run") as column:
        shown = gr.HTML("", elem_id=f"pane-{number}")
        dropdowns = {
            name: gr.Dropdown(
                [MODELS_CHOICE, *values], value=MODELS_CHOICE, label=name, visible=False
            )
            for name, values in controls.items()
        }
        go_on = gr.Button("Go on with this answer", size="sm", interactive=False)
    return Pane(
        column=column,
        shown=shown,
        go_on=go_on,
        controls=dropdowns,
        run=gr.State(None),
        answer=gr.State(""),
    )


def _all_controls() -> dict[str, list[str]]:
    """Every control that some variant declares, with all values that any of them takes."""
    found: dict[str, list[str]] = {}
    for variant, _ in all_variants().values():
        if issubclass(variant, DialogueVariant):
            for name, values in variant.controls.items():
                known = found.setdefault(name, [])
                known.extend(value for value in values if value not in known)
    return found


def _setting(field: "dataclasses.Field[Any]") -> gr.components.Component:
    about = field_help(Decoding)[field.name]
    default: Any = field.default
    kind = typing.get_type_hints(Decoding)[field.name]
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        return gr.Dropdown(choices, value=default, label=field.name, info=about)
    if field.name not in RANGES:
        return gr.Number(default, label=field.name, info=about, precision=0, minimum=0)
    least, most, step = RANGES[field.name]
    return gr.Slider(least, most, default, step=step, label=field.name, info=about)


def _decoding(values: Sequence[Any]) -> Decoding:
    """The settings as they stand on the page."""
    hints = typing.get_type_hints(Decoding)
    names = [field.name for field in dataclasses.fields(Decoding)]
    given = dict(zip(names, values, strict=True))
    for name, value in given.items():
        if hints[name] is int and isinstance(value, float) and value.is_integer():
            given[name] = int(value)  # JavaScript has one kind of number
    made: Decoding = apply_overrides(Decoding(), given)
    return made


Handler = TypeVar("Handler", bound=Callable[..., Any])


def told(handler: Handler) -> Handler:
    """What a user did wrong appears as a message, which gradio shows as HTML; nothing changes."""

    @functools.wraps(handler)
    def called(*arguments: Any) -> Any:
        try:
            return handler(*arguments)
        except (UsageError, DataError) as error:
            gr.Warning(escape(str(error)))
            return gr.skip()

    return cast(Handler, called)


class Talk:
    """What happens when something is clicked. Each handler returns a value an output."""

    def __init__(self, offer: Offer, controls: Sequence[str] = ()):
        self.offer = offer
        self.controls = controls
        """The names of those that a pane has dropdowns for."""
        self.responders = Responders()

    def load(self) -> list[Update]:
        """The runs as they are now, each time the page is opened."""
        offered = self.offer.runs()
        chosen = self.offer.preselected(MAX_PANES)
        choices = [(_named(run), run.name) for run in offered.values()]
        unused = [None] * MAX_PANES
        return [gr.update(choices=choices, value=chosen), *self.choose(chosen, *unused)]

    def choose(self, names: list[str], *present: str | None) -> list[Update]:
        """A column for each chosen run; one that stays where it is keeps its answer."""
        updates: list[Update] = []
        for place, before in enumerate(present):
            name = names[place] if place < len(names) else None
            if name == before:
                updates += [gr.skip()] * (5 + len(self.controls))
            else:
                dropdowns = [_control(values) for values in self._controls_of(name)]
                visible = gr.update(visible=name is not None)
                updates += [visible, name, *self._blank(name), *dropdowns]
        return updates

    def _controls_of(self, name: str | None) -> list[Sequence[str] | None]:
        """What each control may be set to; None where the run's variant does not have it."""
        run = None if name is None else self.offer.runs().get(name)
        own = {} if run is None else controls_of(run)
        return [own.get(control) for control in self.controls]

    @told
    def say(
        self, text: str, conversation: Conversation, asked: int, runs: list[str], *answers: str
    ) -> list[Update]:
        """The speaker's next turn, which all panes answer."""
        _check_chosen(runs)
        only = Turn(text=answers[0], by=runs[0]) if len(runs) == 1 else None
        conversation = talk.say(conversation, text, only)
        return [conversation, markup.conversation(conversation), "", asked + 1]

    @told
    def ask_again(self, conversation: Conversation, asked: int, runs: list[str]) -> int:
        """The same question once more, with other runs or settings perhaps."""
        _check_chosen(runs)
        if not talk.awaits_answer(conversation):
            raise UsageError("There is no turn of the speaker's to answer: type one.")
        return asked + 1

    @told
    def pick(
        self, place: int, drawn: list[examples.Example], asked: int, runs: list[str]
    ) -> list[Update]:
        """An example instead of what was said so far."""
        _check_chosen(runs)
        conversation = tuple(Turn(text=text) for text in drawn[place].turns)
        return [conversation, markup.conversation(conversation), "", asked + 1]

    def answer(
        self, name: str | None, conversation: Conversation, *given: Any
    ) -> Iterator[list[Update]]:
        """One pane's answer as it is made; what goes wrong is said in the pane."""
        if name is None or not talk.awaits_answer(conversation):
            yield [gr.skip()] * 3
            return
        cut = len(given) - len(self.controls)
        try:
            run = self.offer.find(name)
            yield [markup.waiting(run), "", _off()]
            responder = self.responders.of(run)
            controls = {
                control: value
                for control, value in zip(self.controls, given[cut:], strict=True)
                if control in responder.variant.controls and value != MODELS_CHOICE
            }
            decoding = _decoding(given[:cut])
            made: Answer | None = None
            for made in responder.follow(talk.texts(conversation), decoding, controls):
                yield [markup.answer(run, made, done=False), "", _off()]
            assert made is not None, "there is always a last one"
            can_go_on = gr.update(interactive=bool(made.text))
            yield [markup.answer(run, made, done=True), made.text, can_go_on]
        except (UsageError, DataError) as error:
            yield [markup.problem(name, str(error)), "", _off()]
        except Exception as error:
            logging.getLogger(__name__).exception("run %s could not answer", name)
            message = f"{type(error).__name__}: {error} (the terminal has the details)"
            yield [markup.problem(name, message), "", _off()]

    @told
    def go_on(
        self, conversation: Conversation, name: str | None, answer: str
    ) -> tuple[Conversation, str]:
        """A pane's answer becomes the listener's turn."""
        conversation = talk.go_on(conversation, Turn(text=answer, by=name))
        return conversation, markup.conversation(conversation)

    @told
    def undo(self, conversation: Conversation, *runs: str | None) -> list[Update]:
        """Without the last turn: the speaker's goes back into the box, and its answers go."""
        mine = talk.awaits_answer(conversation)
        conversation, last = talk.undo(conversation)
        shown = [conversation, markup.conversation(conversation)]
        if not mine:
            return [*shown, gr.skip(), *[gr.skip()] * (3 * len(runs))]
        return [*shown, last.text, *(part for run in runs for part in self._blank(run))]

    def restart(self, _: Conversation, *runs: str | None) -> list[Update]:
        """Nothing said."""
        blank = [part for run in runs for part in self._blank(run)]
        return [(), markup.conversation(()), "", *blank]

    @told
    def draw(self, runs: list[str], number: int) -> list[Update]:
        """Examples from the first chosen run's data."""
        run = self.offer.runs().get(runs[0]) if runs else None
        drawn = examples.draw(run, number, NUM_EXAMPLES)
        buttons = [gr.update(value=_title(one), visible=True) for one in drawn]
        buttons += [gr.update(visible=False)] * (NUM_EXAMPLES - len(drawn))
        return [drawn, number, *buttons]

    def draw_others(self, runs: list[str], number: int) -> list[Update]:
        """The next draw."""
        return self.draw(runs, number + 1)

    def _blank(self, name: str | None) -> list[Update]:
        """A pane's outcome before it is asked."""
        if name is None:
            return ["", "", _off()]
        try:
            return [markup.empty(self.offer.find(name)), "", _off()]
        except UsageError as error:
            return [markup.problem(name, str(error)), "", _off()]


def _named(run: Run) -> str:
    """Most names begin with the variant; it is added to the others."""
    return run.name if run.name.startswith(run.variant) else f"{run.name} ({run.variant})"


def _off() -> Update:
    return gr.update(interactive=False)


def _control(values: Sequence[str] | None) -> Update:
    if values is None:
        return gr.update(visible=False)
    return gr.update(choices=[MODELS_CHOICE, *values], value=MODELS_CHOICE, visible=True)


def _check_chosen(runs: list[str]) -> None:
    if not runs:
        raise UsageError("Choose at least one run to answer.")


def _title(example: examples.Example) -> str:
    """An example as its button names it."""
    text = example.turns[-1]
    short = text if len(text) <= EXAMPLE_LENGTH else text[: EXAMPLE_LENGTH - 1].rstrip() + "…"
    turns = f" ({len(example.turns)} turns)" if len(example.turns) > 1 else ""
    return f"{example.emotion}{turns}: {short}" if example.emotion else f"{short}{turns}"
