"""The page of `attune ui` in a real browser."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from attune.jobs.screenshot import ALL_DONE, free_screenshot_port, screenshot_browser
from attune.models.decoding import Decoding
from attune.platform.runs.model import save_model
from attune.platform.serving.responder import Responder
from tests.runs import write_run

pytestmark = pytest.mark.xdist_group("page")

ATTUNE = Path(sys.executable).parent / "attune"
TURN = "I lost my job today."
PATIENCE = 60_000  # milliseconds, for a machine that has much else to do
# Records every text of each pane's answer in order.
WATCH = """
window.seen = {};
new MutationObserver(() => {
    for (const answer of document.querySelectorAll('.pane[data-state=answering] .answer')) {
        const name = answer.closest('.pane').querySelector('h3').textContent;
        const texts = (window.seen[name] ??= []);
        if (texts.at(-1) !== answer.textContent) texts.push(answer.textContent);
    }
}).observe(document, {subtree: true, childList: true, characterData: true});
"""


def add_run(home, name, variant, build, prepared):
    created = f"2026-01-01T00:00:{len(list(home.glob('runs/*'))):02}"
    data = {"name": "bundled", "folder": str(prepared), "hash": ""}
    run = write_run(home, name, variant, data=data, created=created)
    save_model(build(variant), run.model)
    return run


@pytest.fixture(scope="module")
def home(tmp_path_factory, build, prepared):
    """Three runs; the oldest first."""
    home = tmp_path_factory.mktemp("home")
    for name, variant in (("plain", "transformer"), ("first", "dummy"), ("second", "multi-trs")):
        add_run(home, name, variant, build, prepared)
    return home


def start(home, *arguments):
    environment = {**os.environ, "ATTUNE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [ATTUNE, "ui", *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_until_ready(process):
    """Wait for the address that the command prints, and return it."""
    for line in process.stdout:
        if match := re.search(r"Attune is at (\S+)", line):
            return match[1]
    raise AssertionError(process.stderr.read())


@pytest.fixture(scope="module")
def url(home):
    process = start(home, "--port", free_screenshot_port())
    yield wait_until_ready(process)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "the page is closed" in output
    assert not errors


@pytest.fixture(scope="module")
def chromium():
    expect.set_options(timeout=PATIENCE)
    with screenshot_browser() as instance:
        yield instance


@pytest.fixture
def page(chromium, url):
    """Open the page; afterwards check that it had no errors and sent no request elsewhere."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    requests, problems = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.add_init_script(WATCH)
    page.goto(url)
    expect(page.locator("button.example")).to_have_count(5)
    yield page
    assert not problems
    assert not [address for address in requests if not address.startswith((url, "data:", "blob:"))]
    assert "Traceback" not in page.content()
    context.close()


def press(page, name):
    page.get_by_role("button", name=name, exact=True).click()


def say(page, text):
    page.get_by_label("The speaker says").fill(text)
    press(page, "Send")
    expect(page.get_by_label("The speaker says")).to_have_value("")


def choose(page, *names):
    """Select exactly these runs, in this order."""
    page.locator("#runs").get_by_title("Clear").click()
    expect(page.locator(".pane")).to_have_count(0)
    for count, name in enumerate(names, start=1):
        page.get_by_role("combobox", name="Runs").fill(name)
        expect(page.get_by_role("option")).to_have_count(1)
        page.keyboard.press("Enter")
        expect(page.locator(".pane h3")).to_have_text(list(names)[:count])


def pane(page, name):
    return page.get_by_label(f"Answer of {name}", exact=True)


def answers(page, *names):
    """Wait until the runs have answered, and return their answers."""
    page.wait_for_function(ALL_DONE)
    expect(page.locator(".pane h3")).to_have_text(list(names))
    return [pane(page, name).locator(".answer").inner_text() for name in names]


def continue_with(page, name):
    column = page.locator("#panes .run", has=pane(page, name))
    column.get_by_role("button", name="Continue with this answer").click()


def expected(home, name, *turns, **settings):
    responder = Responder(home / "runs" / name / "model")
    return responder.respond([turns], Decoding(**settings))[0]


def turns(page):
    return page.locator(".conversation .turn p").all_inner_texts()


def test_runs_answer_side_by_side_word_by_word(page, home):
    names = ("second", "first", "plain")  # the newest of each variant
    expect(page.locator(".pane h3")).to_have_text(list(names))
    say(page, TURN)
    texts = answers(page, *names)
    assert texts == [expected(home, name, TURN).text for name in names]
    places = [pane(page, name).bounding_box() for name in names]
    assert places[0]["x"] < places[1]["x"] < places[2]["x"]
    assert len({place["y"] for place in places}) == 1
    seen = page.evaluate("window.seen")
    for name, answer in zip(names, texts, strict=True):
        lengths = [len(text) for text in seen[name]]
        assert lengths == sorted(lengths)
        assert any(0 < length < len(answer) for length in lengths), name


def test_each_pane_shows_its_run_variant_and_emotions(page, home):
    say(page, TURN)
    answers(page, "second", "first", "plain")
    emotion = expected(home, "second", TURN).explanation.emotion
    likeliest = sorted(emotion, key=emotion.get, reverse=True)[:5]
    bars = pane(page, "second").locator(".emotions li")
    expect(bars.locator(".name")).to_have_text(likeliest)
    expect(bars.locator(".share")).to_have_text([f"{emotion[name]:.0%}" for name in likeliest])
    widths = [bar.bounding_box()["width"] for bar in bars.locator(".bar").all()]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] > 0
    expect(pane(page, "second").locator(".variant")).to_have_text("multi-trs")
    expect(pane(page, "second").locator(".seconds")).to_have_text(re.compile(r"^\d+\.\d\d s$"))
    expect(pane(page, "plain").locator(".emotions")).to_have_count(0)
    expect(pane(page, "plain")).to_contain_text("does not predict an emotion")


def test_continuing_with_an_answer(page, home):
    choose(page, "first", "second")
    say(page, TURN)
    first, second = answers(page, "first", "second")
    continue_with(page, "first")
    expect(page.locator(".turn.listener p")).to_have_text([first])
    continue_with(page, "second")  # another choice takes its place
    expect(page.locator(".turn.listener p")).to_have_text([second])
    expect(page.locator(".turn.listener .who")).to_have_text("listener · second")
    say(page, "Thank you.")
    expect(page.locator(".turn p")).to_have_text([TURN, second, "Thank you."])
    page.wait_for_function(ALL_DONE)
    answer = expected(home, "second", TURN, second, "Thank you.")
    expect(pane(page, "second").locator(".answer")).to_have_text(answer.text)
    press(page, "Undo")
    expect(page.get_by_label("The speaker says")).to_have_value("Thank you.")
    expect(page.locator(".turn p")).to_have_text([TURN, second])
    expect(pane(page, "second")).to_contain_text("No answer yet")
    press(page, "Undo")
    expect(page.locator(".turn p")).to_have_text([TURN])
    press(page, "Answer again")
    assert answers(page, "first", "second") == [first, second]
    press(page, "Start again")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator(".answer")).to_have_count(0)


def test_with_one_run_its_answer_continues_the_conversation(page):
    choose(page, "first")
    say(page, TURN)
    [answer] = answers(page, "first")
    say(page, "Thank you.")
    expect(page.locator(".turn p")).to_have_text([TURN, answer, "Thank you."])


def test_examples(page, url, test_samples):
    buttons = page.locator("button.example")
    titles = buttons.all_inner_texts()
    contexts = [tuple(context) for context in test_samples["context"]]
    buttons.first.click()
    answers(page, "second", "first", "plain")
    assert tuple(turns(page)) in contexts
    press(page, "Draw others")
    expect(buttons.first).not_to_have_text(titles[0])
    page.goto(url)
    expect(buttons).to_have_text(titles)


def test_decoding_settings(page, home):
    # Opened first: gradio may reset a field to its default while the page loads.
    page.get_by_role("button", name="Decoding").click()
    longest = page.get_by_label("number input for max_tokens")
    expect(longest).to_have_value("30")
    choose(page, "first", "second")
    longest.click()
    longest.fill("3")
    longest.press("Tab")
    expect(longest).to_have_value("3")
    say(page, TURN)
    names = ("first", "second")
    wanted = [expected(home, name, TURN, max_tokens=3).text for name in names]
    assert answers(page, *names) == wanted
    page.get_by_label("method").click()
    page.get_by_role("option", name="nucleus").click()
    page.get_by_label("seed").fill("7")
    page.get_by_label("seed").press("Tab")
    press(page, "Answer again")
    sampled = expected(home, "first", TURN, max_tokens=3, method="nucleus", seed=7).text
    assert sampled != wanted[0]
    expect(pane(page, "first").locator(".answer")).to_have_text(sampled)


def test_bad_input_shows_a_message(page):
    def expect_message(message):
        expect(page.get_by_test_id("toast-body").last).to_contain_text(message)

    press(page, "Send")
    expect_message("Type the speaker's turn first.")
    press(page, "Undo")
    expect_message("nothing to undo")
    press(page, "Answer again")
    expect_message("There is no speaker's turn to answer")
    say(page, TURN)
    answers(page, "second", "first", "plain")
    page.get_by_label("The speaker says").fill("And?")
    press(page, "Send")
    expect_message("Choose the answer to continue with")
    page.locator("#runs").get_by_title("Clear").click()
    expect(page.locator(".pane")).to_have_count(0)
    press(page, "Send")
    expect_message("Choose at least one run")
    expect(page.get_by_label("The speaker says")).to_have_value("And?")
    assert turns(page) == [TURN]


@pytest.fixture
def late(home, build, prepared):
    """A run that is created after the page was opened."""
    run = add_run(home, "late", "dummy", build, prepared)
    yield run
    shutil.rmtree(run.folder, ignore_errors=True)


def test_a_run_that_is_added_and_deleted(page, url, late):
    page.goto(url)
    choose(page, "late", "second")
    say(page, TURN)
    assert all(answers(page, "late", "second"))
    shutil.rmtree(late.folder)
    press(page, "Answer again")
    alert = page.get_by_role("alert").filter(has_text="late")
    expect(alert).to_contain_text("run 'late' is no longer on disk: choose another")
    expect(pane(page, "second")).to_have_attribute("data-state", "done")


def test_typed_text_is_not_markup(page):
    evil = "<img src=x onerror=\"document.title='evil'\"> {{7*7}} ${7*7} *x*"
    say(page, evil)
    answers(page, "second", "first", "plain")
    assert turns(page) == [evil]
    expect(page).to_have_title("Attune")
    assert page.locator(".conversation img").count() == 0


def test_a_narrow_screen_shows_columns_below_each_other(page):
    page.set_viewport_size({"width": 390, "height": 800})
    say(page, TURN)
    answers(page, "second", "first", "plain")
    places = [pane(page, name).bounding_box() for name in ("second", "first", "plain")]
    assert len({place["x"] for place in places}) == 1
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_port_in_use(home):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output, errors = (process := start(home, "--port", port)).communicate(timeout=60)
    assert process.returncode == 2
    assert f"port {port} is in use" in errors
    assert "--port" in errors
    assert not output


def test_without_runs(tmp_path):
    _, errors = (process := start(tmp_path, "--port", free_screenshot_port())).communicate(
        timeout=60
    )
    assert process.returncode == 2
    assert "attune train" in errors
    assert len(errors.splitlines()) <= 2
