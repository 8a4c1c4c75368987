"""The built documentation: nothing external is loaded, and every page can be read and used.

The second is checked with a browser, at the widths of a desktop and of a phone: no page is wider
than the screen, flags stay on one line, and the keyboard reaches what scrolls.
"""

import functools
import http.server
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.repository.checkout import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="no mkdocs here: pip install '.[docs]'"
    ),
]

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
WIDTHS = {"desktop": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("documentation") / "site"
    mkdocs = Path(sys.executable).parent / "mkdocs"
    build = [mkdocs, "build", "--strict", "--quiet", "--site-dir", folder]
    # Parallel tests put the checkout on the path, where `tftpu` is without its sibling folders.
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(build, cwd=ROOT, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> list[str]:
    """Returns the addresses of all pages below the site's root."""
    found = [path.relative_to(site).as_posix() for path in site.rglob("index.html")]
    assert len(found) > 20
    return sorted(found)


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    if not BROWSER or not DRIVER:
        pytest.skip("no chromium here: apt-get install chromium chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def screen(browser, width: int, height: int) -> None:
    """Sets the browser's screen size; a window cannot be as narrow as a phone."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_scrolls_sideways(width, browser, address, pages, tmp_path):
    screen(browser, *WIDTHS[width])
    wide = []
    for page in pages:
        browser.get(f"{address}/{page}")
        root = "document.documentElement"
        needed, there = browser.execute_script(f"return [{root}.scrollWidth, {root}.clientWidth]")
        if needed > there:
            wide.append(f"{page}: {needed} of {there}")
            assert browser.save_screenshot(str(tmp_path / f"{len(wide)}.png"))
    assert wide == []


# The flags in the text's code that are drawn on more than one line.
BROKEN_FLAGS = """
const broken = []
for (const code of document.querySelectorAll("article :not(pre) > code")) {
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT)
  while (walker.nextNode()) {
    for (const flag of walker.currentNode.data.matchAll(/--[A-Za-z][\\w.-]*/g)) {
      const range = document.createRange()
      range.setStart(walker.currentNode, flag.index)
      range.setEnd(walker.currentNode, flag.index + flag[0].length)
      const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)))
      if (lines.size > 1) broken.push(flag[0])
    }
  }
}
return broken
"""
# The boxes that scroll sideways, of which the Tab key reaches neither the box nor anything inside.
UNREACHABLE = """
return [...document.querySelectorAll("article *")]
  .filter((box) => /auto|scroll/.test(getComputedStyle(box).overflowX))
  .filter((box) => box.scrollWidth > box.clientWidth && box.clientWidth > 0)
  .filter((box) => ![box, ...box.querySelectorAll("*")].some((part) => part.tabIndex >= 0))
  .map((box) => box.outerHTML.slice(0, 80))
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_flags_stay_on_one_line(width, browser, address, pages):
    screen(browser, *WIDTHS[width])
    broken = {}
    for page in pages:
        browser.get(f"{address}/{page}")
        broken[page] = browser.execute_script(BROKEN_FLAGS)
    assert {page: flags for page, flags in broken.items() if flags} == {}


@pytest.mark.parametrize("width", WIDTHS)
def test_the_keyboard_reaches_what_scrolls(width, browser, address, pages):
    screen(browser, *WIDTHS[width])
    unreachable = {}
    for page in pages:
        browser.get(f"{address}/{page}")
        frames = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        browser.execute_async_script(frames)  # what observes sizes has been told of them
        unreachable[page] = browser.execute_script(UNREACHABLE)
    assert {page: boxes for page, boxes in unreachable.items() if boxes} == {}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_that_is_too_wide_is_noticed(width, browser, address):
    screen(browser, *WIDTHS[width])
    browser.get(f"{address}/speed/index.html")
    browser.execute_script(
        "const wide = document.createElement('div'); wide.style = 'width: 3000px; height: 9px';"
        "document.querySelector('article').append(wide)"
    )
    assert browser.execute_script("return document.documentElement.scrollWidth") >= 3000


def test_pages_load_nothing_from_elsewhere(site, pages):
    loaded = re.compile(
        r"<(?:script|img|iframe|link(?=[^>]*rel=.?(?:stylesheet|icon|preload)))[^>]*"
        r"(?:src|href)=[\"']?(https?://[^\"' >]+)"
    )
    for page in pages:
        assert loaded.findall((site / page).read_text()) == [], page
    for picture in site.rglob("*.svg"):
        assert "url(http" not in picture.read_text(), picture


def test_every_command_and_every_public_name_is_in_the_reference(site):
    import tftpu
    from tftpu.launch import main

    commands = (site / "reference/commands/index.html").read_text()
    for name, command in main.load_commands().items():
        assert f"tftpu {name}" in commands
        for flag in command.flags:
            assert flag.usage.partition("=")[0] in commands, flag.usage
    api = (site / "api/tftpu/index.html").read_text()
    for name in set(tftpu.__all__) - {"__version__", "models", "input_pipelines", "preflight"}:
        assert f'id="tftpu.{name}"' in api, name
