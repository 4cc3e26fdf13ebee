"""The page of a document: what it shows, against positions and reports of the cache, and in a real browser."""

import json
import re
import shutil
import subprocess
from base64 import b64decode
from html.parser import HTMLParser
from itertools import chain, pairwise
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from byte_tokenizer import byte_tokenizer
from compiled_models import padded, two_layers
from kvpass import Document

LINE = "The tide\tturns at noon, ropes are mended.\n\n  "
TEXT = LINE + "</script><img src=x onerror=alert(1)>&amp; 🦊🦊 潮が満ちる <!-- " + LINE * 3 + "The end."
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --dump-dom"
).split()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows some English, and tags: other characters are several tokens."""
    return byte_tokenizer([LINE] * 9, 300, additional_special_tokens=["</script>", "<img src=x", "<!--"])


def read(tokenizer: Any, family: str = "llama", **options: Any) -> Document:
    fast = two_layers(family, changes={"vocab_size": 300}, **options)[1]
    return Document.of_text(TEXT, fast, tokenizer)


def data_of(page: str) -> Any:
    (line,) = re.findall(r"^const data = (.*);$", page, re.MULTILINE)
    return json.loads(line)


def expected(document: Document, data: Any, gone: range = range(0)) -> list[list[int]]:
    """Percent of the heads that keep each piece, in all layers and in each, counted one by one."""
    layers = document.cache.positions[0].tolist()
    tokens = [token for token in range(document.cache.columns + len(gone)) if token not in gone]
    kept = [[sum(token in head for head in heads) for token in tokens] for heads in layers]
    bounds = [*data["starts"], len(tokens)]
    rows = [([sum(column) for column in zip(*kept, strict=True)], sum(map(len, layers)))]
    rows += [(counts, len(heads)) for counts, heads in zip(kept, layers, strict=True)]
    pieces = list(pairwise(bounds))
    shares = [[sum(counts[a:b]) / (b - a) / heads for a, b in pieces] for counts, heads in rows]
    return [[max(round(100 * share), share > 0) for share in row] for row in shares]


OUTSIDE = {"llama": 0, "gemma3": 1}


@pytest.mark.parametrize(
    ("family", "options", "first", "newest"),
    [
        ("llama", {"policy": "snapkv", "window": 8}, 0, 8),
        ("llama", {"policy": "streaming_llm", "window": 8}, 4, 8),
        ("gemma3", {"policy": "snapkv", "window": 8}, 0, 8),
    ],
)
def test_the_page_has_the_text_the_shares_and_the_figures_of_the_report(tokenizer, family, options, first, newest):
    document = read(tokenizer, family, budget=24, **options)
    page = document.html()
    data, report = data_of(page), document.model.report(document.cache)
    assert "".join(data["pieces"]) == tokenizer.decode(document.cache.ids[0]) == TEXT + "\n\n"
    assert {"🦊", "潮"} <= {*data["pieces"]}
    assert page.count("</script>") == 1 and "<img" not in page
    shares = [*b64decode(data["shares"])]
    assert shares == [*chain(*expected(document, data))]
    assert {0, 100} <= {*shares} and (options["policy"] == "streaming_llm" or len({*shares}) > 2)
    assert (data["first"], data["newest"], data["outside"]) == (first, newest, OUTSIDE[family])
    kept, full = int(report.lengths.sum()), document.cache.columns * report.lengths[0].numel()
    cache_bytes, full_bytes = document.cache.nbytes, report.bytes_full
    assert [*data["figures"].values()] == [
        f"{document.cache.columns:,}",
        f"{document.cache.policy.text}, budget 24",
        f"{kept:,} of {full:,} ({kept / full:.1%})",
        f"{cache_bytes:,} of {full_bytes:,} ({cache_bytes / full_bytes:.1%})",
    ]
    assert data["kept"][0] == pytest.approx(100 * kept / full, abs=0.06)


def test_tokens_that_came_later_are_shown_as_kept(tokenizer):
    document = read(tokenizer, policy="snapkv", window=8, budget=24)
    chat, read_tokens = document.chat(), document.cache.columns
    chat.send("Who?", max_new_tokens=3)
    document.cache = chat.cache
    data = data_of(document.html())
    assert data["newest"] == 8 + document.cache.columns - read_tokens
    assert [*b64decode(data["shares"])] == [*chain(*expected(document, data))]
    assert "Who?" in "".join(data["pieces"])


def test_forgotten_tokens_are_not_shown(tokenizer):
    document = read(tokenizer, policy="snapkv", window=8, budget=24)
    before = data_of(document.html())
    last = document.cache.columns
    document.cache.forget(5, 9)
    data = data_of(document.html())
    assert data["tokens"] == before["tokens"] - 4 == last - 4
    assert [*b64decode(data["shares"])] == [*chain(*expected(document, data, gone=range(5, 9)))]


def test_a_cache_of_several_rows_is_no_document(tokenizer):
    document = read(tokenizer, policy="snapkv", window=8, budget=24)
    document.cache = document.model.compress(*padded(50, 33))
    with pytest.raises(ValueError, match="only one row of token ids"):
        document.html()


class Spans(HTMLParser):
    """Class and text of the spans of the text, what the output says, and the names of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.spans: list[list[str]] = []
        self.shown = ""
        self.ids = [""]  # of what encloses the place that is read

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        if tag in ("div", "span", "output"):
            self.ids.append(dict(attributes).get("id", self.ids[-1]))
            if tag == "span" and self.ids[-1] in ("text", "here"):
                self.spans.append([dict(attributes)["class"], ""])

    def handle_endtag(self, tag):
        if tag in ("div", "span", "output"):
            self.ids.pop()

    def handle_data(self, content):
        if self.ids[-1] in ("text", "here") and self.spans:
            self.spans[-1][1] += content
        if self.ids[-1] == "shown":
            self.shown += content


def browse(url: str, folder: Any, *flags: str) -> tuple[Spans, list[str]]:
    """What a page looks like to a program, and what its console says."""
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    spans = Spans()
    spans.feed(done.stdout)
    return spans, re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)


MOVED = """
layer.value = 1; layer.dispatchEvent(new Event("input"));
text.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
console.log(token.textContent);
overview.dispatchEvent(new MouseEvent("click", { clientX: 1e6, clientY: 1e6 }));
console.log(`${layer.value} ${layer.getAttribute("aria-valuetext")} ${here}`);
layer.value = 1; layer.dispatchEvent(new Event("input"));
"""
WIDTH = "console.log(`${innerWidth} ${document.documentElement.scrollWidth}`);"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")
def test_a_browser_shows_the_layer_that_the_slider_says(tokenizer, tmp_path):
    document = read(tokenizer, policy="expected_attention", window=8, budget=24)
    page = document.html()
    data = data_of(page)
    shares, pieces = expected(document, data), len(data["pieces"])
    for name, script in (("page", ""), ("moved", MOVED), ("narrow", WIDTH)):
        (tmp_path / f"{name}.html").write_text(page.replace("</script>", f"{script}</script>"))
    (tmp_path / "frame.html").write_text('<iframe src="narrow.html" style="border: 0; width: 360px; height: 800px">')
    marks = ["first" if a < 4 else "newest" if a >= data["tokens"] - 8 else "" for a in data["starts"]]
    at = (tmp_path / "page.html").as_uri()
    for url, of in ((at, 0), (f"{at}#layer=2", 2), ((tmp_path / "moved.html").as_uri(), 1)):
        wide = ("--window-size=1280,900", f"--screenshot={tmp_path / f'layer{of}.png'}")
        seen, said = browse(url, tmp_path, *wide)
        rows = zip(shares[of], marks, data["pieces"], strict=True)
        assert seen.spans == [[f"k{share} {mark}", piece] for share, mark, piece in rows]
        assert seen.shown == f"{f'{of} of 2' if of else 'all 2'}: {data['kept'][of]:g} % kept"
        assert "img" not in seen.names and seen.names.count("script") == 1
        token = f"token 0: {shares[1][0]} % of heads keep it, first"
        moved = [token, f"2 2 of 2: {data['kept'][2]:g} % kept {pieces - 1}"]
        assert said == (moved if of == 1 else [])
    narrow = (f"--screenshot={tmp_path / 'narrow.png'}", "--window-size=500,800")
    assert browse((tmp_path / "frame.html").as_uri(), tmp_path, *narrow)[1] == ["360 360"]
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("layer0", "layer1", "layer2", "narrow"))
