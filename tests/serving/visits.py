"""For the tests of the page: a real browser, and what a visitor does and sees."""

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright import sync_api
else:
    sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = Path("/usr/bin/chromium")
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no browser at {CHROMIUM}"),
]
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
DROP = """(files) => {
    const data = new DataTransfer();
    for (const [text, name, type] of files) {
        const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
        data.items.add(new File([bytes], name, { type }));
    }
    for (const kind of ["dragenter", "dragover", "drop"])
        document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
}"""
VIOLATIONS = """async () => {
    const { violations } = await axe.run();
    return violations.filter((one) => ["serious", "critical"].includes(one.impact))
        .map((one) => `${one.id}: ${one.help}: ${one.nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`);
}"""


class Visit:
    """A page, with the browser's errors and the URLs it requested."""

    def __init__(self, page: "sync_api.Page") -> None:
        self.page = page
        self.errors: list[str] = []
        self.requested: list[str] = []
        page.on("console", lambda m: self.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector("#model:has-text('parameters')")

    def drop(self, data: bytes, name: str = "cat.png", kind: str = "image/png") -> None:
        self.drop_all([(data, name, kind)])

    def drop_all(self, files: Sequence[tuple[bytes, str, str]]) -> None:
        self.page.evaluate(DROP, [[base64.b64encode(data).decode(), name, kind] for data, name, kind in files])

    def answered(self) -> tuple[str, float]:
        self.page.wait_for_selector("#result:not([hidden])")
        self.page.wait_for_selector("body:not(.busy)")
        value = self.page.get_attribute("#top-probability", "data-value")
        return self.page.inner_text("#top-class"), float(value or "nan")

    def slide(self, name: str, value: int) -> None:
        self.page.fill(f"#{name}", str(value))

    def pixels(self, canvas: str = "overlay") -> str:
        """A canvas as a PNG in a data: URL; by default the picture with its map."""
        return str(self.page.evaluate("(id) => document.getElementById(id).toDataURL()", canvas))

    def texts(self, selector: str) -> list[str]:
        return list(self.page.eval_on_selector_all(selector, "all => all.map((one) => one.textContent)"))

    def violations(self) -> list[str]:
        """What axe-core calls serious or critical."""
        self.page.evaluate(AXE.read_text("utf-8"))
        return list(self.page.evaluate(VIOLATIONS))


@contextmanager
def open_browser(*options: str) -> Iterator["sync_api.Browser"]:
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", *options])
        yield browser
        browser.close()


@contextmanager
def visiting(browser: "sync_api.Browser", url: str, **settings: Any) -> Iterator[Visit]:
    """A visit without errors, and without a request to another host."""
    page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **settings})
    visit = Visit(page)
    visit.open(url)
    yield visit
    page.close()
    assert visit.errors == []
    assert all(one.startswith((url, "blob:", "data:")) for one in visit.requested), visit.requested
