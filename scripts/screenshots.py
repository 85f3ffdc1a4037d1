"""Takes the pictures in docs/screenshots: the status page of a real node whose engines are killed meanwhile.

``.venv/bin/python scripts/screenshots.py`` needs what the tests need, Debian's chromium among it.
"""

import json
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from readmit import demo_model
from readmit.demo.node import Node
from readmit.demo.reference import right_answers
from weightcache import messages
from weightcache.protocol import Connection
from weightcache.version import VERSION

PLACE = Path(__file__).parents[1] / "docs" / "screenshots"
PROMPTS = ("The capital of France is", "One, two, three, four,")
PHONE = {"width": 390, "height": 1200}
DESK = {"width": 1080, "height": 1200}


def main() -> None:
    model = demo_model.prepare()
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name, sync_playwright() as playwright:
        folder = Path(name)
        node = Node(folder, "node", model, probe_file(folder, model), slots=("a", "b"))
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        node.up("client")
        try:
            serving = node.wait_all_ready()["serving"]
            known = node.last_episode()
            node.kill(serving)  # the standby takes over, and this one comes back by a hit
            for _ in node.wait_ready(known):
                pass
            node.wait_all_ready()
            forget(node)
            node.kill(node.wait_all_ready()["serving"])
            while "load_weights" not in str(node.get("/api/status")[1]["open"]):
                time.sleep(0.1)
            take(browser, node, "recovering", DESK)
            node.wait_all_ready()
            while "daemon_loading" in str(node.get("/api/status")[1]["slots"]):  # the gate asks now and then
                time.sleep(0.1)
            take(browser, node, "status", DESK)
            take(browser, node, "status-phone", PHONE, dark=True)
        finally:
            browser.close()
            node.down()


def probe_file(folder: Path, model: Path) -> Path:
    answers = right_answers(model, [(prompt, 4) for prompt in PROMPTS])
    probes = [
        {"name": f"golden-{number}", "prompt": prompt, "max_tokens": 4, "expect": {"text": answer}}
        for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True), 1)
    ]
    file = folder / "probes.json"
    file.write_text(json.dumps({"model": model.name, "probes": probes}))
    return file


def forget(node: Node) -> None:
    """Have the daemon forget its weights: the next start misses."""
    connection = Connection(node.socket, messages.Hello(version=VERSION))
    for generation in node.cache_status()["generations"]:
        connection.ask(messages.Release(generation=generation["generation"], force=True), messages.Done)
    connection.close()


def take(browser: Browser, node: Node, name: str, size: dict[str, int], *, dark: bool = False) -> None:
    page = browser.new_page(viewport=size, color_scheme="dark" if dark else "light")
    page.goto(f"{node.url}/")
    page.screenshot(path=PLACE / f"{name}.png")
    page.close()


if __name__ == "__main__":
    main()
