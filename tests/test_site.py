"""The built site in a browser, as wide as a screen and as a phone: only parts with a scroll bar scroll sideways."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --enable-logging=stderr --dump-dom"
).split()
PAGES = [".", "results", "which-policy", "reference"]
LOOK = """<script>addEventListener("load", () => {
  const all = (names, bad) => [...document.querySelectorAll(names)].filter(bad).map((e) => e.textContent.slice(0, 40));
  const hidden = (e) => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX != "visible";
  const bar = (e) => getComputedStyle(e).overflowX == "auto" && e.offsetHeight > e.clientHeight + 4;
  console.log("seen " + JSON.stringify({
    page: document.title.split(" - ")[0], width: innerWidth,
    sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    broken: all("td code, th code", (e) => e.getClientRects().length > 1),
    cut: all("article *", (e) => hidden(e) && !bar(e)), scrolls: all("article *", (e) => hidden(e) && bar(e)).length,
  }));
});</script>"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the browser says of each page at both widths, in frames of one page."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    frames = ""
    for page in PAGES:
        path = folder / page / "index.html"
        path.write_text(path.read_text().replace("</body>", f"{LOOK}</body>"))
        for width in (1280, 390):
            frames += f'<iframe src="{page}/index.html" style="width: {width}px; height: 900px"></iframe>'
    (folder / "frames.html").write_text(frames)
    command = [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'profile'}", (folder / "frames.html").as_uri()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    return [json.loads(found) for found in re.findall(r'CONSOLE[^"]*"seen (.*)", source', said)]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: make docs")
def test_no_page_scrolls_sideways_and_what_is_wider_than_a_page_has_a_scroll_bar(seen):
    assert sorted(page["width"] for page in seen) == [390] * len(PAGES) + [1280] * len(PAGES)
    for page in seen:
        assert (page["sideways"], page["broken"], page["cut"]) == (0, [], []), page
    assert sum(page["scrolls"] for page in seen) > 10  # so that bars are looked at
