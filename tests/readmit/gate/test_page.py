"""The status page in a real browser, before a real node."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from tests.readmit.gate.nodes import Node

CHROMIUM = "/usr/bin/chromium"
CHROMIUM_ARGS = ["--no-sandbox", "--disable-dev-shm-usage"]  # containers: root, and a /dev/shm of 64 MiB
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture(params=[PHONE, DESK], ids=["phone", "desk"])
def page(browser: Browser, pair: Node, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page of a node with two slots; whatever the browser complains about fails the test."""
    complaints: list[str] = []

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    context = browser.new_context(viewport=request.param)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", complain)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda failed: complaints.append(f"{failed.url} failed"))
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url))
    page.goto(f"{pair.gate_url}/")
    yield page
    found = list(complaints)  # closing breaks off whatever is under way, and that is complained about too
    context.close()
    assert found == []
    assert {re.sub(r"/[^/]*$", "", url) for url in asked if not url.startswith("data:")} == {pair.gate_url}


def test_it_fits_and_says_what_serves(page: Page, pair: Node) -> None:
    serving = pair.status()["serving"]
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Serving from slot {serving}")
    for name in ("Slots", "Recoveries", "The latest, by phase", "Golden answers"):
        expect(page.get_by_role("region", name=name)).to_be_visible()
    expect(page.get_by_role("listitem").filter(has_text="stands by")).to_have_count(1)
    width, shown = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width == shown, "nobody should have to scroll sideways"
    inside = "[...document.querySelectorAll('main *')].every(it => it.getBoundingClientRect().right < innerWidth + 1)"
    assert page.evaluate(inside)


def test_every_bar_has_its_phases_in_words(page: Page, pair: Node) -> None:
    bars = page.get_by_role("region", name="The latest, by phase").get_by_role("img")
    expect(bars).to_have_count(min(len(pair.status()["recoveries"]), 12))
    drawn = """bars => bars.map(bar => [
        bar.getAttribute("aria-label"),
        [...bar.querySelectorAll("rect")].map(piece => [piece.getAttribute("class"), getComputedStyle(piece).fill]),
    ])"""
    for words, pieces in bars.evaluate_all(drawn):
        assert re.search(r"\w+ \d+\.\d\d s", words)
        assert len({fill for _, fill in pieces}) == len({phase for phase, _ in pieces}), "each phase its colour"


def test_it_can_be_read_with_the_keyboard_alone(page: Page) -> None:
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    assert focused.evaluate("it => it.tagName") == "SUMMARY"
    assert "phases of recovery" in (focused.get_attribute("aria-label") or "")
    page.keyboard.press("Enter")
    opened = page.locator("details[open]")
    expect(opened.get_by_role("table")).to_be_visible()
    assert opened.evaluate("it => getComputedStyle(it.querySelector('summary')).outlineStyle") == "solid"


@pytest.mark.parametrize("page", [PHONE], indirect=True, ids=["phone"])
def test_it_follows_what_happens_without_being_loaded_again(page: Page, pair: Node) -> None:
    page.evaluate("window.mark = 1")
    page.keyboard.press("Tab")
    summary = page.evaluate("document.activeElement.id")
    page.keyboard.press("Enter")
    before = pair.status()["serving"]
    (other,) = {"a", "b"} - {before}
    card = page.get_by_role("region", name="Slots").get_by_role("listitem").filter(has_text=f"Slot {before}")
    assert pair.readmit("drain", before).returncode == 0
    try:
        expect(page.get_by_role("heading", level=1)).to_have_text(f"Serving from slot {other}")
        expect(card).to_contain_text("draining (operator_drain)")
        expect(page).to_have_title(f"Serving from slot {other}")
    finally:
        assert pair.readmit("drain", "--undo", before).returncode == 0
    expect(card).to_contain_text("ready (verified)")
    assert page.evaluate("window.mark") == 1
    assert page.evaluate("document.activeElement.id") == summary, "who reads with the keyboard stays where they were"
    assert page.locator(f"#{summary}").locator("..").evaluate("it => it.open")


@pytest.mark.parametrize("page", [PHONE], indirect=True, ids=["phone"])
def test_an_override_is_shown_while_it_lasts(page: Page, pair: Node) -> None:
    begun = pair.readmit("gate", "override", "--ttl", "10m", "--reason", "<b>new model</b>, old answers")
    assert begun.returncode == 0, begun.stderr
    try:
        expect(page.get_by_role("banner")).to_contain_text("<b>new model</b>, old answers")
        expect(page.get_by_role("banner")).to_contain_text("Override by")
    finally:
        assert pair.readmit("gate", "override", "--lift").returncode == 0
    expect(page.get_by_role("banner")).not_to_contain_text("Override")


def test_a_page_whose_gate_is_gone_says_so(browser: Browser, pair: Node) -> None:
    page = browser.new_page()
    page.goto(f"{pair.gate_url}/")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.route("**/*", lambda route: route.abort())
    expect(page.get_by_role("alert")).to_be_visible()
    page.unroute("**/*")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.close()


def test_it_says_the_same_without_script(browser: Browser, pair: Node) -> None:
    context = browser.new_context(java_script_enabled=False, viewport=PHONE)
    page = context.new_page()
    page.goto(f"{pair.gate_url}/")
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("Serving from slot [ab]"))
    expect(page.get_by_role("region", name="The latest, by phase").get_by_role("img").first).to_be_visible()
    refreshes = page.locator("meta[http-equiv=refresh]")
    assert refreshes.count() == 1
    context.close()


def test_nothing_but_its_own_style_and_script_may_run(browser: Browser, pair: Node) -> None:
    page = browser.new_page()
    page.goto(f"{pair.gate_url}/")
    injected = """() => {
        const script = document.createElement("script");
        script.textContent = "window.injected = 1";
        document.body.append(script);
        return window.injected;
    }"""
    assert page.evaluate(injected) is None
    page.close()
