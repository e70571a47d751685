"""The compare tab: several runs answer one conversation side by side."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, TypeVar, cast

import gradio as gr

from attune.platform.core.errors import DataError, UsageError
from attune.platform.runs.record import Run
from attune.platform.serving.responder import Answer, run_controls
from attune.ui import examples, markup
from attune.ui.compare_layout import (
    MAX_PANES,
    MODEL_DEFAULT,
    NUM_EXAMPLES,
    Components,
    Pane,
    Updates,
    build_components,
)
from attune.ui.conversation import (
    Conversation,
    Turn,
    add_speaker_turn,
    awaits_answer,
    remove_last_turn,
    set_listener_turn,
    texts,
)
from attune.ui.decoding_settings import read_decoding
from attune.ui.run_catalog import Responders, RunCatalog

EXAMPLE_LENGTH = 72

QUIET: Any = {"show_progress": "hidden", "api_visibility": "private"}
FOCUS = "() => document.querySelector('#turn textarea').focus()"


def build(page: gr.Blocks, catalog: RunCatalog) -> "CompareTab":
    """Lay out the tab and connect its events."""
    components = build_components()
    tab = CompareTab(catalog, components)
    answering = _wire_answers(tab, components)
    _wire_conversation(tab, components, answering)
    _wire_choices(tab, components, page, answering)
    return tab


def _wire_answers(tab: "CompareTab", components: Components) -> Any:
    """Connect the panes to the question count; return their events, which others cancel."""
    # "multiple": a cancelled answer may still be ending when the next one is requested.
    return [
        components.question_count.change(
            functools.partial(tab.answer, pane),
            [pane.run, components.conversation, *components.settings, *pane.controls.values()],
            pane.answer_outputs,
            concurrency_limit=None,
            trigger_mode="multiple",
            **QUIET,
        )
        for pane in components.panes
    ]


def _wire_conversation(tab: "CompareTab", components: Components, answering: Any) -> None:
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
        components.turn_outputs,
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
    for place, button in enumerate(components.example_buttons):
        button.click(
            functools.partial(tab.pick_example, place),
            [components.current_examples, components.question_count, components.runs],
            components.turn_outputs,
            cancels=answering,
            **QUIET,
        )


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
    """The event handlers. Each returns its updates by component; others keep their value."""

    def __init__(self, catalog: RunCatalog, components: Components):
        self.catalog = catalog
        self.components = components
        self.responders = Responders()

    def load(self) -> Updates:
        """List the runs again each time the page is opened."""
        runs = self.catalog.runs()
        selected = self.catalog.preselect(MAX_PANES)
        choices = [(_label_run(run), run.name) for run in runs.values()]
        unused = [None] * MAX_PANES
        run_choices = gr.update(choices=choices, value=selected)
        return {self.components.runs: run_choices, **self._assign_runs(selected, unused)}

    def choose_runs(self, names: list[str], *current: str | None) -> Updates:
        """Show a column for each chosen run; one that keeps its position keeps its answer."""
        return self._assign_runs(names, current) or gr.skip()

    def _assign_runs(self, names: Sequence[str], current: Sequence[str | None]) -> Updates:
        """Return the updates of the panes whose run changes."""
        updates: Updates = {}
        panes = itertools.zip_longest(self.components.panes, current, names)
        for pane, before, name in panes:
            if name != before:
                updates |= {
                    pane.column: gr.update(visible=name is not None),
                    pane.run: name,
                    **self._clear_pane(pane, name),
                    **self._update_controls(pane, name),
                }
        return updates

    def _update_controls(self, pane: Pane, name: str | None) -> Updates:
        """Return the updates that show the controls of a run and hide all others."""
        run = None if name is None else self.catalog.runs().get(name)
        values = {} if run is None else run_controls(run)
        return {
            dropdown: gr.update(
                choices=[MODEL_DEFAULT, *values[control]], value=MODEL_DEFAULT, visible=True
            )
            if control in values
            else gr.update(visible=False)
            for control, dropdown in pane.controls.items()
        }

    @show_user_errors
    def send(
        self,
        text: str,
        conversation: Conversation,
        question_count: int,
        runs: list[str],
        *answers: str,
    ) -> Updates:
        """Add the speaker's next turn, which all panes answer."""
        _check_any_run(runs)
        only_answer = Turn(text=answers[0], by=runs[0]) if len(runs) == 1 else None
        return self._ask(add_speaker_turn(conversation, text, only_answer), question_count)

    @show_user_errors
    def answer_again(
        self, conversation: Conversation, question_count: int, runs: list[str]
    ) -> Updates:
        """Ask the same question again, after runs or settings may have changed."""
        _check_any_run(runs)
        if not awaits_answer(conversation):
            raise UsageError("There is no speaker's turn to answer: type one.")
        return {self.components.question_count: question_count + 1}

    @show_user_errors
    def pick_example(
        self,
        place: int,
        current_examples: list[examples.Example],
        question_count: int,
        runs: list[str],
    ) -> Updates:
        """Replace the conversation by an example."""
        _check_any_run(runs)
        conversation = tuple(Turn(text=text) for text in current_examples[place].turns)
        return self._ask(conversation, question_count)

    def _ask(self, conversation: Conversation, question_count: int) -> Updates:
        """Return the updates that show a conversation and make all panes answer it."""
        return {
            **self.components.show_conversation(conversation),
            self.components.box: "",
            self.components.question_count: question_count + 1,
        }

    def answer(
        self, pane: Pane, name: str | None, conversation: Conversation, *values: Any
    ) -> Iterator[Updates]:
        """Stream one pane's answer; errors are shown in the pane."""
        if name is None or not awaits_answer(conversation):
            yield gr.skip()
            return
        num_settings = len(self.components.settings)
        try:
            run = self.catalog.find(name)
            yield pane.show(markup.render_waiting(run))
            responder = self.responders.get(run)
            controls = {
                control: value
                for control, value in zip(pane.controls, values[num_settings:], strict=True)
                if control in responder.variant.controls and value != MODEL_DEFAULT
            }
            decoding = read_decoding(values[:num_settings])
            answer: Answer | None = None
            for answer in responder.follow(texts(conversation), decoding, controls):
                yield pane.show(markup.render_answer(run, answer, done=False))
            assert answer is not None, "the responder yields at least one answer"
            yield pane.show(markup.render_answer(run, answer, done=True), answer.text)
        except (UsageError, DataError) as error:
            yield pane.show(markup.render_problem(name, str(error)))
        except Exception as error:
            logging.getLogger(__name__).exception("run %s could not answer", name)
            message = f"{type(error).__name__}: {error} (the terminal has the details)"
            yield pane.show(markup.render_problem(name, message))

    @show_user_errors
    def continue_with(self, conversation: Conversation, name: str | None, answer: str) -> Updates:
        """Make a pane's answer the listener's turn."""
        conversation = set_listener_turn(conversation, Turn(text=answer, by=name))
        return self.components.show_conversation(conversation)

    @show_user_errors
    def undo(self, conversation: Conversation, *runs: str | None) -> Updates:
        """Remove the last turn; a speaker's returns to the text box and its answers are cleared."""
        speaker_was_last = awaits_answer(conversation)
        conversation, last = remove_last_turn(conversation)
        updates = self.components.show_conversation(conversation)
        if speaker_was_last:
            updates |= {self.components.box: last.text, **self._clear_panes(runs)}
        return updates

    def restart(self, _: Conversation, *runs: str | None) -> Updates:
        """Empty the conversation."""
        blank = self.components.show_conversation(())
        return {**blank, self.components.box: "", **self._clear_panes(runs)}

    @show_user_errors
    def draw_examples(self, runs: list[str], number: int) -> Updates:
        """Show examples from the data of the first chosen run."""
        run = self.catalog.runs().get(runs[0]) if runs else None
        drawn_examples = examples.draw(run, number, NUM_EXAMPLES)
        buttons = {
            button: gr.update(visible=False)
            if example is None
            else gr.update(value=_label_example(example), visible=True)
            for button, example in itertools.zip_longest(
                self.components.example_buttons, drawn_examples
            )
        }
        return {
            self.components.current_examples: drawn_examples,
            self.components.draw_number: number,
            **buttons,
        }

    def draw_other_examples(self, runs: list[str], number: int) -> Updates:
        """Show the next draw of examples."""
        return self.draw_examples(runs, number + 1)

    def _clear_panes(self, runs: Sequence[str | None]) -> Updates:
        """Return the updates that remove all answers."""
        updates: Updates = {}
        for pane, name in zip(self.components.panes, runs, strict=True):
            updates |= self._clear_pane(pane, name)
        return updates

    def _clear_pane(self, pane: Pane, name: str | None) -> Updates:
        """Return the updates of a pane without an answer."""
        if name is None:
            return pane.show("")
        try:
            return pane.show(markup.render_empty(self.catalog.find(name)))
        except UsageError as error:
            return pane.show(markup.render_problem(name, str(error)))


def _label_run(run: Run) -> str:
    """Return the run's name, with the variant unless the name begins with it."""
    return run.name if run.name.startswith(run.variant) else f"{run.name} ({run.variant})"


def _check_any_run(runs: list[str]) -> None:
    if not runs:
        raise UsageError("Choose at least one run to answer.")


def _label_example(example: examples.Example) -> str:
    """Return the label of an example's button."""
    text = example.turns[-1]
    short = text if len(text) <= EXAMPLE_LENGTH else text[: EXAMPLE_LENGTH - 1].rstrip() + "…"
    turns = f" ({len(example.turns)} turns)" if len(example.turns) > 1 else ""
    return f"{example.emotion}{turns}: {short}" if example.emotion else f"{short}{turns}"
