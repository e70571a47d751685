"""The layout of the compare tab: its components, and how they are updated by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr
from gradio.blocks import Block

from attune.models import all_variants
from attune.models.base import DialogueVariant
from attune.ui import markup
from attune.ui.conversation import Conversation
from attune.ui.decoding_settings import build_settings

MAX_PANES = 6
NUM_EXAMPLES = 5
MODEL_DEFAULT = "model default"

Updates = dict[Block, Any]
"""The new value, or a `gr.update`, of each component that a handler changes."""


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
    def answer_outputs(self) -> list[Block]:
        """The components that an answer updates."""
        return [self.display, self.answer, self.continue_button]

    @property
    def all_outputs(self) -> list[Block]:
        """The components that choosing another run updates."""
        return [self.column, self.run, *self.answer_outputs, *self.controls.values()]

    def show(self, html: str, answer: str = "") -> Updates:
        """Return the updates that show this HTML; a complete answer can be continued with."""
        return {
            self.display: html,
            self.answer: answer,
            self.continue_button: gr.update(interactive=bool(answer)),
        }


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

    @property
    def turn_outputs(self) -> list[Block]:
        """The components that a new turn updates."""
        return [self.conversation, self.display, self.box, self.question_count]

    def show_conversation(self, conversation: Conversation) -> Updates:
        """Return the updates that show a conversation."""
        return {
            self.conversation: conversation,
            self.display: markup.render_conversation(conversation),
        }


def build_components() -> Components:
    """Lay out the tab within the current page."""
    controls = all_controls()
    with gr.Row(elem_id="talk"):
        with gr.Column(scale=1, min_width=280, elem_id="choices"):
            choice_components = _build_choices()
        with gr.Column(scale=3, min_width=320):
            conversation_components = _build_conversation(controls)
    return Components(
        **choice_components,
        **conversation_components,
        conversation=gr.State(()),
        current_examples=gr.State([]),
        draw_number=gr.State(0),
        question_count=gr.State(0),
    )


def _build_choices() -> dict[str, Any]:
    runs = gr.Dropdown(
        label="Runs",
        info=f"One column per run, at most {MAX_PANES}.",
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
    display = gr.HTML(markup.render_conversation(()), elem_id="conversation")
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
        continue_button = gr.Button("Continue with this answer", size="sm", interactive=False)
    return Pane(
        column=column,
        display=display,
        continue_button=continue_button,
        controls=dropdowns,
        run=gr.State(None),
        answer=gr.State(""),
    )


def all_controls() -> dict[str, list[str]]:
    """Return every control that a variant declares, with the values of all variants."""
    controls: dict[str, list[str]] = {}
    for variant, _ in all_variants().values():
        if issubclass(variant, DialogueVariant):
            for name, values in variant.controls.items():
                known = controls.setdefault(name, [])
                known.extend(value for value in values if value not in known)
    return controls
