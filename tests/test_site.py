"""`make docs`: the site builds without a warning, and a browser that reads it asks no other host."""

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # the theme announces its successor
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def test_the_site_has_every_page(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for path in ROOT.glob("docs/**/*.md")}
    pages = {page.replace("README.html", "index.html") for page in pages}
    assert pages <= {path.relative_to(site).as_posix() for path in site.rglob("*.html")}


def test_settings_and_functions_are_described(site: Path) -> None:
    settings = (site / "settings.html").read_text()
    for name in ("weight_decay", "randaugment", "cuda_graph", "drop_path", "interpolation"):
        assert f"<code>{name}</code>" in settings
    api = (site / "api.html").read_text()
    for name in ("create", "load", "save", "convert", "attention", "build", "Classifier"):
        assert f'id="vitlab.{name}"' in api
    assert "<!-- settings" not in settings
    readme = re.sub("<[^>]+>", "", (site / "index.html").read_text())
    assert "vitlab finetune photos/" in readme


@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")
def test_no_page_asks_another_host(site: Path, address: str) -> None:
    api = pytest.importorskip("playwright.sync_api")
    foreign: list[str] = []
    failed: list[str] = []

    def check_request(request: Any) -> None:
        if not request.url.startswith((address, "data:")):
            foreign.append(request.url)

    def check_response(response: Any) -> None:
        if response.status >= 400:
            failed.append(response.url)

    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", check_request)
        page.on("response", check_response)
        for path in sorted(site.rglob("*.html")):
            if path.name != "404.html":
                page.goto(address + path.relative_to(site).as_posix(), wait_until="networkidle")
                assert page.locator("h1").count() == 1
        page.locator("input[name=query]").click()  # the search loads its worker and index
        page.locator("input[name=query]").press_sequentially("checkpoint")
        page.locator(".md-search-result__item").first.wait_for(state="attached", timeout=60_000)
        browser.close()
    assert not foreign
    assert not failed
