"""`make screenshot`: a screenshot of the page with answers of real runs, for the documentation.

The tests of the page use its browser too.
"""

import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attune.jobs.console import console
from attune.jobs.ui import parse_ui_runs
from attune.platform.core.errors import UsageError

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SECONDS_TO_ANSWER = 120
ALL_DONE = """() => {
    const panes = [...document.querySelectorAll('.pane')];
    return panes.length > 0 && panes.every(pane => pane.dataset.state === 'done');
}"""


def screenshot(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", show_default="the newest of each variant"),
    ] = None,
    out: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path(
        "docs/images/page.png"
    ),
    example: Annotated[
        int, typer.Option(min=1, max=5, help="The example to pick, counted from the top.")
    ] = 1,
    draws: Annotated[
        int, typer.Option(min=0, help="How many times to press Draw others before.")
    ] = 0,
    dark: Annotated[bool, typer.Option("--dark", help="Use the dark colours.")] = False,
) -> None:
    """Take a screenshot of the page after runs have answered an example conversation."""
    catalog = parse_ui_runs(names)
    from attune.ui import app

    port = free_screenshot_port()
    page = app.start(catalog, "127.0.0.1", port)
    try:
        with screenshot_browser() as chromium:
            view = chromium.new_page(
                viewport={"width": 1280, "height": 800}, color_scheme="dark" if dark else "light"
            )
            view.goto(f"http://127.0.0.1:{port}")
            _answer_for_screenshot(view, example, draws)
            out.parent.mkdir(parents=True, exist_ok=True)
            view.screenshot(path=out, full_page=True, animations="disabled")
    finally:
        page.close(verbose=False)
    console().print(f"{out}: {out.stat().st_size / 1000:.0f} KB", markup=False)


def _answer_for_screenshot(page: "Page", example: int, draws: int) -> None:
    buttons = page.locator("button.example:visible")
    buttons.first.wait_for()
    for _ in range(draws):
        before = buttons.all_inner_texts()
        page.get_by_role("button", name="Draw others").click()
        page.wait_for_function(
            "before => document.querySelector('button.example').innerText !== before",
            arg=before[0],
        )
    buttons.nth(example - 1).click()
    page.wait_for_function(ALL_DONE, timeout=1000 * SECONDS_TO_ANSWER)
    page.mouse.move(0, 0)


@contextmanager
def screenshot_browser() -> "Iterator[Browser]":
    """Start a headless Chromium: the machine's, or Playwright's."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, BROWSERS)), None)
        bundled = playwright.chromium.executable_path
        if path is None and not Path(bundled).is_file():
            raise UsageError(
                "no browser was found: run 'make browser', or install chromium, or run "
                "'playwright install chromium'"
            )
        chromium = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield chromium
        finally:
            chromium.close()


def free_screenshot_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    try:
        typer.run(screenshot)
    except UsageError as error:
        sys.exit(f"screenshot: {error}")
