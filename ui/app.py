"""The page: build it from its tabs and serve it."""

import os
from pathlib import Path

# Set before gradio is imported, which would otherwise check the network for newer versions.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr
import torch

from attune.ui import compare_tab
from attune.ui.run_catalog import RunCatalog

STYLE = Path(__file__).with_name("page.css")
HEADER = """<header><h1>Attune</h1><p>Talk to several runs at once, and compare their answers and
the emotions they predict.</p></header>"""
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif")
MONO = ("ui-monospace", "Menlo", "Consolas", "monospace")


def build(catalog: RunCatalog) -> gr.Blocks:
    """Build the page with all its tabs."""
    page = gr.Blocks(title="Attune", analytics_enabled=False, fill_width=True)
    with page:
        gr.HTML(HEADER)
        compare_tab.build(page, catalog)
    return page


def start(catalog: RunCatalog, host: str, port: int) -> gr.Blocks:
    """Serve the page from threads of this process; `close()` ends it."""
    # Several small models answer at once: more threads for each would compete for the cores.
    torch.set_num_threads(1)
    page = build(catalog)
    page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        quiet=True,
        inbrowser=False,
        inline=False,
        share=False,
        allowed_paths=[],
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        mcp_server=False,
        ssr_mode=False,
        pwa=False,
        max_file_size="1mb",
        theme=_build_theme(),
        css_paths=STYLE,
    )
    return page


def _build_theme() -> gr.themes.Base:
    """Return the theme; it uses fonts that every machine has, so that none is downloaded."""
    return gr.themes.Default(
        primary_hue="teal",
        secondary_hue="teal",
        neutral_hue="slate",
        radius_size="lg",
        font=SANS,
        font_mono=MONO,
    ).set(  # subdued text and buttons, dark enough to be easy to read
        body_text_color_subdued="*neutral_500",
        block_info_text_color="*neutral_500",
        input_placeholder_color="*neutral_500",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_background_fill_hover_dark="*primary_600",
    )
