"""The compare tab: several runs answer one conversation side by side."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar, cast

import gradio as gr

from attune.models import all_variants
from attune.models.base import DialogueVariant
from attune.platform.core.errors import DataError, UsageError
from attune.platform.runs.record import Run
from attune.platform.serving.responder import Answer, run_controls
from attune.ui import examples, markup
from attune.ui.conversation import (
    Conversation,
    Turn,
    add_speaker_turn,
    awaits_answer,
    remove_last_turn,
    set_listener_turn,
    texts,
)
from attune.ui.decoding_settings import build_settings, read_decoding
from attune.ui.run_catalog import Responders, RunCatalog

MAX_PANES = 6
NUM_EXAMPLES = 5
EXAMPLE_LENGTH = 72
MODEL_DEFAULT = "the model's own"

QUIET: Any = {"show_progress": "hidden", "api_visibility": "private"}
FOCUS = "() => document.querySelector('#turn textarea').focus()"

Update = Any
"""What a handler returns for one component: a value, or a `gr.update`."""


@dataclass(frozen=True, kw_only=True)
class Pane:
    """One column: the components and state of one run's answer."""

    column: gr.Column
    display: gr.HTML
    continue_button: gr.Button
    controls: dict[str, gr.Dropdown]
    run: gr.State
    """The run's name; None where the column is not in use."""
    answer: gr.State
    """The complete answer; empty until then."""

    @property
    def answer_outputs(self) -> list[gr.components.Component]:
        """The components that an answer updates."""
        return [self.display, self.answer, self.continue_button]

    @property
    def all_outputs(self) -> list[Any]:
        """The components that choosing another run updates."""
        return [self.column, self.run, *self.answer_outputs, *self.controls.values()]


@dataclass(frozen=True, kw_only=True)
class Components:
    """All components of the tab."""

    runs: gr.Dropdown
    example_buttons: list[gr.Button]
    draw_button: gr.Button
    settings: list[gr.components.Component]
    display: gr.HTML
    box: gr.Textbox
    send: gr.Button
    answer_again: gr.Button
    undo: gr.Button
    restart: gr.Button
    panes: list[Pane]
    conversation: gr.State
    current_examples: gr.State
    """The examples on the buttons."""
    draw_number: gr.State
    question_count: gr.State
    """Incremented by each question; its change event makes all panes answer at once."""


def build(page: gr.Blocks, catalog: RunCatalog) -> None:
    """Lay out the tab and connect its events."""
    controls = _all_controls()
    with gr.Row(elem_id="talk"):
        with gr.Column(scale=1, min_width=280, elem_id="choices"):
            choice_components = _build_choices()
        with gr.Column(scale=3, min_width=320):
            conversation_components = _build_conversation(controls)
    components = Components(
        **choice_components,
        **conversation_components,
        conversation=gr.State(()),
        current_examples=gr.State([]),
        draw_number=gr.State(0),
        question_count=gr.State(0),
    )
    tab = CompareTab(catalog, tuple(controls))
    answering = _wire_answers(tab, components)
    _wire_conversation(tab, components, answering)
    _wire_choices(tab, components, page, answering)


def _build_choices() -> dict[str, Any]:
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
        example_buttons = [
            gr.Button("", size="sm", visible=False, elem_classes="example")
            for _ in range(NUM_EXAMPLES)
        ]
    draw_button = gr.Button("Draw others", size="sm")
    with gr.Accordion("Decoding", open=False):
        settings = build_settings()
    return {
        "runs": runs,
        "example_buttons": example_buttons,
        "draw_button": draw_button,
        "settings": settings,
    }


def _build_conversation(controls: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    display = gr.HTML(markup.conversation(()), elem_id="conversation")
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
            "send": _build_button("Send", variant="primary", scale=3),
            "answer_again": _build_button("Answer again"),
            "undo": _build_button("Undo"),
            "restart": _build_button("Start again"),
        }
    with gr.Row(elem_id="panes"):
        panes = [_build_pane(number, controls) for number in range(MAX_PANES)]
    return {"display": display, "box": box, **actions, "panes": panes}


def _wire_answers(tab: "CompareTab", components: Components) -> Any:
    """Connect the panes to the question count; return their events, which others cancel."""
    # "multiple": a cancelled answer may still be ending when the next one is requested.
    return [
        components.question_count.change(
            tab.answer,
            [pane.run, components.conversation, *components.settings, *pane.controls.values()],
            pane.answer_outputs,
            concurrency_limit=None,
            trigger_mode="multiple",
            **QUIET,
        )
        for pane in components.panes
    ]


def _wire_conversation(tab: "CompareTab", components: Components, answering: Any) -> None:
    turn_outputs = [
        components.conversation,
        components.display,
        components.box,
        components.question_count,
    ]
    pane_runs = [pane.run for pane in components.panes]
    answers = [pane.answer for pane in components.panes]
    gr.on(
        [components.send.click, components.box.submit],
        tab.send,
        [
            components.box,
            components.conversation,
            components.question_count,
            components.runs,
            *answers,
        ],
        turn_outputs,
        **QUIET,
    )
    components.answer_again.click(
        tab.answer_again,
        [components.conversation, components.question_count, components.runs],
        components.question_count,
        cancels=answering,
        **QUIET,
    )
    for pane in components.panes:
        event = pane.continue_button.click(
            tab.continue_with,
            [components.conversation, pane.run, pane.answer],
            [components.conversation, components.display],
            **QUIET,
        )
        event.success(None, js=FOCUS)
    answer_outputs = [output for pane in components.panes for output in pane.answer_outputs]
    cleared = [components.conversation, components.display, components.box, *answer_outputs]
    inputs = [components.conversation, *pane_runs]
    components.undo.click(tab.undo, inputs, cleared, cancels=answering, **QUIET)
    components.restart.click(tab.restart, inputs, cleared, cancels=answering, **QUIET)


def _wire_choices(
    tab: "CompareTab", components: Components, page: gr.Blocks, answering: Any
) -> None:
    pane_outputs = [output for pane in components.panes for output in pane.all_outputs]
    run_inputs = [components.runs, *(pane.run for pane in components.panes)]
    draw_inputs = [components.runs, components.draw_number]
    example_outputs = [
        components.current_examples,
        components.draw_number,
        *components.example_buttons,
    ]
    run_change = components.runs.change(
        tab.choose_runs, run_inputs, pane_outputs, cancels=answering, **QUIET
    )
    run_change.success(tab.draw_examples, draw_inputs, example_outputs, **QUIET)
    page_load = page.load(tab.load, None, [components.runs, *pane_outputs], **QUIET)
    page_load.success(tab.draw_examples, draw_inputs, example_outputs, **QUIET)
    components.draw_button.click(tab.draw_other_examples, draw_inputs, example_outputs, **QUIET)
    turn_outputs = [
        components.conversation,
        components.display,
        components.box,
        components.question_count,
    ]
    for place, button in enumerate(components.example_buttons):
        button.click(
            functools.partial(tab.pick_example, place),
            [components.current_examples, components.question_count, components.runs],
            turn_outputs,
            cancels=answering,
            **QUIET,
        )


def _build_button(name: str, **options: Any) -> gr.Button:
    return gr.Button(name, size="md", **{"min_width": 110, "scale": 1, **options})


def _build_pane(number: int, controls: Mapping[str, Sequence[str]]) -> Pane:
    with gr.Column(visible=False, min_width=230, elem_classes="run") as column:
        display = gr.HTML("", elem_id=f"pane-{number}")
        dropdowns = {
            name: gr.Dropdown(
                [MODEL_DEFAULT, *values], value=MODEL_DEFAULT, label=name, visible=False
            )
            for name, values in controls.items()
        }
        continue_button = gr.Button("Go on with this answer", size="sm", interactive=False)
    return Pane(
        column=column,
        display=display,
        continue_button=continue_button,
        controls=dropdowns,
        run=gr.State(None),
        answer=gr.State(""),
    )


def _all_controls() -> dict[str, list[str]]:
    """Return every control that a variant declares, with the values of all variants."""
    controls: dict[str, list[str]] = {}
    for variant, _ in all_variants().values():
        if issubclass(variant, DialogueVariant):
            for name, values in variant.controls.items():
                known = controls.setdefault(name, [])
                known.extend(value for value in values if value not in known)
    return controls


Handler = TypeVar("Handler", bound=Callable[..., Any])


def show_user_errors(handler: Handler) -> Handler:
    """Show user errors of a handler as a message, which gradio renders as HTML; update nothing."""

    @functools.wraps(handler)
    def handle(*arguments: Any) -> Any:
        try:
            return handler(*arguments)
        except (UsageError, DataError) as error:
            gr.Warning(escape(str(error)))
            return gr.skip()

    return cast(Handler, handle)


class CompareTab:
    """The event handlers. Each returns one update per output component."""

    def __init__(self, catalog: RunCatalog, controls: Sequence[str] = ()):
        self.catalog = catalog
        self.controls = controls
        """The names of the controls that a pane has dropdowns for."""
        self.responders = Responders()

    def load(self) -> list[Update]:
        """List the runs again each time the page is opened."""
        runs = self.catalog.runs()
        selected = self.catalog.preselect(MAX_PANES)
        choices = [(_run_label(run), run.name) for run in runs.values()]
        unused = [None] * MAX_PANES
        return [gr.update(choices=choices, value=selected), *self.choose_runs(selected, *unused)]

    def choose_runs(self, names: list[str], *current: str | None) -> list[Update]:
        """Show a column for each chosen run; one that keeps its position keeps its answer."""
        updates: list[Update] = []
        for place, before in enumerate(current):
            name = names[place] if place < len(names) else None
            if name == before:
                updates += [gr.skip()] * (5 + len(self.controls))
            else:
                dropdowns = [_control_update(values) for values in self._control_values(name)]
                visible = gr.update(visible=name is not None)
                updates += [visible, name, *self._clear_pane(name), *dropdowns]
        return updates

    def _control_values(self, name: str | None) -> list[Sequence[str] | None]:
        """Return the values of each control; None where the run's variant does not have it."""
        run = None if name is None else self.catalog.runs().get(name)
        values = {} if run is None else run_controls(run)
        return [values.get(control) for control in self.controls]

    @show_user_errors
    def send(
        self,
        text: str,
        conversation: Conversation,
        question_count: int,
        runs: list[str],
        *answers: str,
    ) -> list[Update]:
        """Add the speaker's next turn, which all panes answer."""
        _check_any_run(runs)
        only_answer = Turn(text=answers[0], by=runs[0]) if len(runs) == 1 else None
        conversation = add_speaker_turn(conversation, text, only_answer)
        return [conversation, markup.conversation(conversation), "", question_count + 1]

    @show_user_errors
    def answer_again(self, conversation: Conversation, question_count: int, runs: list[str]) -> int:
        """Ask the same question again, after runs or settings may have changed."""
        _check_any_run(runs)
        if not awaits_answer(conversation):
            raise UsageError("There is no turn of the speaker's to answer: type one.")
        return question_count + 1

    @show_user_errors
    def pick_example(
        self,
        place: int,
        current_examples: list[examples.Example],
        question_count: int,
        runs: list[str],
    ) -> list[Update]:
        """Replace the conversation by an example."""
        _check_any_run(runs)
        conversation = tuple(Turn(text=text) for text in current_examples[place].turns)
        return [conversation, markup.conversation(conversation), "", question_count + 1]

    def answer(
        self, name: str | None, conversation: Conversation, *values: Any
    ) -> Iterator[list[Update]]:
        """Stream one pane's answer; errors are shown in the pane."""
        if name is None or not awaits_answer(conversation):
            yield [gr.skip()] * 3
            return
        num_settings = len(values) - len(self.controls)
        try:
            run = self.catalog.find(name)
            yield [markup.waiting(run), "", _disable()]
            responder = self.responders.get(run)
            controls = {
                control: value
                for control, value in zip(self.controls, values[num_settings:], strict=True)
                if control in responder.variant.controls and value != MODEL_DEFAULT
            }
            decoding = read_decoding(values[:num_settings])
            answer: Answer | None = None
            for answer in responder.follow(texts(conversation), decoding, controls):
                yield [markup.answer(run, answer, done=False), "", _disable()]
            assert answer is not None, "the responder yields at least one answer"
            enable = gr.update(interactive=bool(answer.text))
            yield [markup.answer(run, answer, done=True), answer.text, enable]
        except (UsageError, DataError) as error:
            yield [markup.problem(name, str(error)), "", _disable()]
        except Exception as error:
            logging.getLogger(__name__).exception("run %s could not answer", name)
            message = f"{type(error).__name__}: {error} (the terminal has the details)"
            yield [markup.problem(name, message), "", _disable()]

    @show_user_errors
    def continue_with(
        self, conversation: Conversation, name: str | None, answer: str
    ) -> tuple[Conversation, str]:
        """Make a pane's answer the listener's turn."""
        conversation = set_listener_turn(conversation, Turn(text=answer, by=name))
        return conversation, markup.conversation(conversation)

    @show_user_errors
    def undo(self, conversation: Conversation, *runs: str | None) -> list[Update]:
        """Remove the last turn; a speaker's returns to the text box and its answers are cleared."""
        speaker_was_last = awaits_answer(conversation)
        conversation, last = remove_last_turn(conversation)
        outputs = [conversation, markup.conversation(conversation)]
        if not speaker_was_last:
            return [*outputs, gr.skip(), *[gr.skip()] * (3 * len(runs))]
        return [*outputs, last.text, *(part for run in runs for part in self._clear_pane(run))]

    def restart(self, _: Conversation, *runs: str | None) -> list[Update]:
        """Empty the conversation."""
        blank = [part for run in runs for part in self._clear_pane(run)]
        return [(), markup.conversation(()), "", *blank]

    @show_user_errors
    def draw_examples(self, runs: list[str], number: int) -> list[Update]:
        """Show examples from the data of the first chosen run."""
        run = self.catalog.runs().get(runs[0]) if runs else None
        drawn_examples = examples.draw(run, number, NUM_EXAMPLES)
        buttons = [
            gr.update(value=_example_label(example), visible=True) for example in drawn_examples
        ]
        buttons += [gr.update(visible=False)] * (NUM_EXAMPLES - len(drawn_examples))
        return [drawn_examples, number, *buttons]

    def draw_other_examples(self, runs: list[str], number: int) -> list[Update]:
        """Show the next draw of examples."""
        return self.draw_examples(runs, number + 1)

    def _clear_pane(self, name: str | None) -> list[Update]:
        """Return the updates of a pane without an answer."""
        if name is None:
            return ["", "", _disable()]
        try:
            return [markup.empty(self.catalog.find(name)), "", _disable()]
        except UsageError as error:
            return [markup.problem(name, str(error)), "", _disable()]


def _run_label(run: Run) -> str:
    """Return the run's name, with the variant unless the name begins with it."""
    return run.name if run.name.startswith(run.variant) else f"{run.name} ({run.variant})"


def _disable() -> Update:
    return gr.update(interactive=False)


def _control_update(values: Sequence[str] | None) -> Update:
    if values is None:
        return gr.update(visible=False)
    return gr.update(choices=[MODEL_DEFAULT, *values], value=MODEL_DEFAULT, visible=True)


def _check_any_run(runs: list[str]) -> None:
    if not runs:
        raise UsageError("Choose at least one run to answer.")


def _example_label(example: examples.Example) -> str:
    """Return the label of an example's button."""
    text = example.turns[-1]
    short = text if len(text) <= EXAMPLE_LENGTH else text[: EXAMPLE_LENGTH - 1].rstrip() + "…"
    turns = f" ({len(example.turns)} turns)" if len(example.turns) > 1 else ""
    return f"{example.emotion}{turns}: {short}" if example.emotion else f"{short}{turns}"
