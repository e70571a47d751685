"""`make picture`: the page as the documentation shows it, answered by real runs.

Also knows where to find a browser, for the tests of the page.
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
from attune.jobs.ui import offered
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


def picture(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", show_default="the newest of each variant"),
    ] = None,
    out: Annotated[Path, typer.Option(help="The PNG file to write.")] = Path(
        "docs/images/page.png"
    ),
    example: Annotated[int, typer.Option(min=1, max=5, help="Which example to pick.")] = 1,
    draws: Annotated[int, typer.Option(min=0, help="How often to draw other examples.")] = 0,
    dark: Annotated[bool, typer.Option("--dark", help="As a dark desktop shows it.")] = False,
) -> None:
    """Photograph the page while runs answer an example conversation."""
    offer = offered(names)
    from attune.ui import app

    port = free_port()
    page = app.start(offer, "127.0.0.1", port)
    try:
        with browser() as chromium:
            shown = chromium.new_page(
                viewport={"width": 1280, "height": 800}, color_scheme="dark" if dark else "light"
            )
            shown.goto(f"http://127.0.0.1:{port}")
            _answered(shown, example, draws)
            out.parent.mkdir(parents=True, exist_ok=True)
            shown.screenshot(path=out, full_page=True, animations="disabled")
    finally:
        page.close(verbose=False)
    console().print(f"{out}: {out.stat().st_size / 1000:.0f} KB", markup=False)


def _answered(page: "Page", example: int, draws: int) -> None:
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
def browser() -> "Iterator[Browser]":
    """A headless Chromium: the machine's, or Playwright's own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
        own = playwright.chromium.executable_path
        if path is None and not Path(own).is_file():
            raise UsageError(
                "there is no browser: 'make browser' installs one; or install chromium, or run "
                "'playwright install chromium'"
            )
        made = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield made
        finally:
            made.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    try:
        typer.run(picture)
    except UsageError as error:
        sys.exit(f"picture: {error}")
