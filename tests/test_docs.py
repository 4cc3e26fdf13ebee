"""Code in README, docs/, examples/ and the notebook runs and prints what is shown.

A ``text`` block behind a ``python`` block is what that block prints; ``...`` stands for anything. The blocks of a page
run in order in one namespace. To be quick they run without Inductor, and ``kvpass.compile`` gives them all the built-in
model, set to their policy and budget, also in the place of a model of the hub. What is shown of that one's answers is
compared where its weights are (``-m real``), elsewhere only what is True or False in it. ``-m exhaustive`` runs the
blocks with Inductor.
"""

import contextlib
import doctest
import functools
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvpass
from kvpass import builtin
from kvpass.fetch import fetch
from tiny_models import random_ids, sharing_captures, tiny_model

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [*(ROOT / f"{name}.md" for name in ("README", "DESIGN", "CONTRIBUTING")), *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [path for path in TEXTS if "```python" in path.read_text()]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if "torchrun" not in path.read_text())
NOTEBOOK = ROOT / "examples" / "first-steps.ipynb"
HUB = "Qwen/Qwen3-0.6B"
"""The model of the first code; tests put local weights in its place."""
SMOLLM2, QWEN = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-Coder-0.5B-Instruct"
"""Models whose answers are shown."""
REAL = [path for path in (*PAGES, *EXAMPLES, NOTEBOOK) if re.search(f"{SMOLLM2}|{QWEN}", path.read_text())]
FACTS = "the code of bara dador is 482 913 . " + 20 * "the old farmer carried the lamp near the river . "
MANUAL = """# Tide clock

The clock shows the tide of one harbour. Wind it once a week. The file harbours.txt has the names of all harbours.

The variable TIDE_VERSION selects the version of the tables. Without it the newest tables are taken.

Oil the hands in spring. The workshop is open on Mondays. Do not set the hands by force.
"""

Block = tuple[str, str | None]
"""Code, and what it prints; None where nothing is said of that."""

_BLOCKS = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
_SAME = doctest.OutputChecker()
_TRUTH = re.compile(r"\b(?:True|False)\b")
_LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)
"""Code, and targets of links."""
_OWN_WORDS = (
    r"certificate|door|fed back|gist|judge[ds]?|judging|ledger|losers?|native(ly)?|occasions?|recut|refusals?|"
    r"survivors?|vouche?[ds]?|witness(es)?"
)
"""Of this project alone, and no terms of the field."""


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page, the cells of the notebook, or an example."""
    if path.suffix == ".md":
        return [(code, shown or None) for code, shown in _BLOCKS.findall(path.read_text())]
    if path.suffix == ".py":
        return [(path.read_text(), shown_by(path))]
    found: list[Block] = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            printed = "".join(line for output in cell["outputs"] for line in output["text"])
            found.append(("".join(cell["source"]), printed))
    return found


def run(blocks: list[Block], name: str, weights: Path | None = None) -> str:
    """Run the blocks in order, compare what they print with what is shown, and return all they print.

    Args:
        weights: in the place of a model of the hub; None: those of the built-in one, which gives other answers.
    """
    everything, namespace = "", {"__name__": "__main__"}
    others = weights is None and any(model in code for code, _ in blocks for model in (SMOLLM2, QWEN))
    for number, (code, shown) in enumerate(blocks, 1):
        for model in (HUB, SMOLLM2, QWEN):
            code = code.replace(model, str(weights or builtin.path()))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{name}, block {number}", "exec"), namespace)
        said = printed.getvalue()
        everything += said
        behind = re.findall(r"^print\((?:tokenizer|document).*\)  # (.*)$", code, re.MULTILINE)
        assert [line for line in behind if line not in said.splitlines()] == []
        if shown is not None:
            found = [" ".join(_TRUTH.findall(text)) if others else text for text in (shown, said)]
            same = _SAME.check_output(*found, _LIKE)
            assert same, f"{name}, block {number}: shown\n{shown}\nprinted\n{said}"
    return everything


def shown_by(example: Path) -> str:
    """What the docstring of an example says that it prints."""
    found = re.search(r'^Prints::\n\n(.*?)"""', example.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, example
    return found[1]


def numbers_of_report(text: str) -> list[float]:
    found = re.search(r"rows: 1, prompt tokens.*would hold \d+", text, re.DOTALL)
    assert found is not None
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", found[0])]


@dataclass
class Shared:
    """A model, compiled once for each of two options: one capture serves many pages."""

    model: Any
    backend: str = "eager"
    compiled: dict[tuple[str, ...], Any] = field(default_factory=dict)

    def compile(self, model: Any, *, policy: str = "lava", budget: Any = None, **given: Any) -> Any:
        if model.config.hidden_size != self.model.config.hidden_size:  # a page's own
            return _compile(model, policy=policy, budget=budget, backend="eager", **given)
        of_cache = {name: given.pop(name, usual) for name, usual in (("recompress", "never"), ("entries", "model"))}
        key = tuple(of_cache.values())
        if key not in self.compiled:
            made = _compile(self.model, backend=self.backend, policy=policy, budget=budget, **of_cache, **given)
            self.compiled[key] = sharing_captures(made, "docs", self.model.config.hidden_size)
        self.compiled[key].set_policy(policy, budget, **given)
        return self.compiled[key]


_compile = kvpass.compile


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    yield Shared(builtin.load()[0])
    torch._dynamo.reset()


@pytest.fixture
def quickly(shared: Shared, monkeypatch: pytest.MonkeyPatch, document: Path) -> None:
    """Without Inductor, and with the shared model as the only one."""
    compile_module = torch.compile

    def compiled_module(module: Any, **given: Any) -> Any:
        if given.get("backend") == "kvpass":
            given["options"] = {**given.get("options", {}), "compiler": "eager"}
        return compile_module(module, **given)

    monkeypatch.setattr(kvpass, "compile", shared.compile)
    monkeypatch.setattr(torch, "compile", compiled_module)


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Documents of the reader's, in the working directory."""
    folder = tmp_path / "examples"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "manual.md").write_text(FACTS)
    write_licence(folder, 4500)  # as much as is read quickly
    return folder / "manual.md"


def write_licence(folder: Path, characters: int | None = None) -> None:
    """Write the licence also to the folder above, where the notebook looks."""
    for place in (folder, folder.parent):
        (place / "LICENSE").write_text((ROOT / "LICENSE").read_text()[:characters])


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that a page registers are gone after it."""
    monkeypatch.setattr("kvpass.policies.POLICIES", known := dict(kvpass.POLICIES))
    monkeypatch.setattr(kvpass, "POLICIES", known)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_code_of_a_page_prints_what_is_shown(page, quickly, shared, policies):
    printed = run(blocks_of(page), page.name)
    if page.name == "README.md":  # another processor may round otherwise and keep a few other entries
        assert numbers_of_report(printed) == pytest.approx(numbers_of_report(page.read_text()), rel=0.05, abs=3)
        shown = page.read_text().split("```\n")[1]
        assert shown.startswith("def forward") and _SAME.check_output(
            shown, printed[printed.index("def forward") :], _LIKE
        )


@pytest.mark.parametrize(
    ("weights", "text", "question", "answer"),
    [
        ("builtin", FACTS, "question the code of bara dador is", "482 913"),
        pytest.param(
            "smollm2-135m", MANUAL, "Which variable selects the version?", "TIDE_VERSION", marks=pytest.mark.real
        ),
    ],
    ids=["builtin", "smollm2"],
)
def test_the_first_code_of_readme_answers_about_a_document(weights, text, question, answer, quickly, document):
    folder = builtin.path() if weights == "builtin" else fetch(weights)
    code = _BLOCKS.findall((ROOT / "README.md").read_text())[0][0]
    assert code.count(HUB) == code.count("Which variable selects the version?") == 1
    document.write_text(text)
    code = code.replace("Which variable selects the version?", question)
    assert answer in run([(code, None)], "README.md", folder)
    assert document.with_suffix(".kv").exists()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_prints_what_its_docstring_shows(example, quickly, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(example)])
    assert example.read_text().count("\n") < 40
    run(blocks_of(example), example.name)


def test_the_notebook_prints_what_it_shows(quickly):
    run(blocks_of(NOTEBOOK), NOTEBOOK.name)


@functools.cache
def with_inductor(weights: Path) -> Shared:
    return Shared(AutoModelForCausalLM.from_pretrained(weights, dtype="float32").eval(), "inductor")


def weights_of(model: str) -> Path:
    """The weights of this machine in the place of a model of the hub: 4-bit GGUF, dequantised."""
    if model == SMOLLM2:
        return fetch("smollm2-135m")
    folder = Path(os.environ.get("KVPASS_REAL_MODEL", ""))
    if not (folder / "config.json").exists() or '"Qwen2ForCausalLM"' not in (folder / "config.json").read_text():
        pytest.skip(f"no folder of {model} in KVPASS_REAL_MODEL")
    return folder


@pytest.mark.real
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_answers_shown_of_a_real_model_are_those_that_its_weights_give(path, document, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(path)])
    write_licence(document.parent)
    weights = weights_of(SMOLLM2 if SMOLLM2 in path.read_text() else QWEN)
    monkeypatch.setattr(kvpass, "compile", with_inductor(weights).compile)
    run(blocks_of(path), path.name, weights)


def test_blocks_that_print_something_else_are_seen_and_every_language_block_is_python_or_text():
    """A block in another spelling (``py``, ``python3``) would not be run."""
    with pytest.raises(AssertionError, match="block 1"):
        run([("print(1)", "2\n")], "page")
    with pytest.raises(AssertionError):
        run([("tokenizer = str\nprint(tokenizer(1))  # 2", None)], "page")
    with pytest.raises(AssertionError, match="block 1"):
        run([(f"print(1 == 2)  # {QWEN}", "True, 3\n")], "page")
    for page in TEXTS:
        assert set(re.findall(r"^ *```(\w+)", page.read_text(), re.MULTILINE)) <= {"python", "text"}, page


@pytest.mark.parametrize("page", [*TEXTS, *sorted(ROOT.glob("[CS]*.md"))], ids=lambda path: path.name)
def test_links_to_files_lead_to_files(page):
    """Pages that ``make docs`` writes are not there before; it checks links to them."""
    made = {"benchmarks.md", "changelog.md", "design.md", "each-policy.md", "policy-reference.md", "reference.md"}
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    found = [page.parent / link for link in links if link not in made]
    assert [str(path) for path in found if not path.exists()] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: path.name)
def test_a_page_uses_terms_of_the_field_or_links_to_those_of_design(page):
    text = page.read_text()
    words = _OWN_WORDS if "DESIGN.md" in text or page.name == "DESIGN.md" else f"{_OWN_WORDS}|ring|site|tail"
    assert [match[0] for match in re.finditer(rf"\b(?:{words})\b", _CODE.sub("", text), re.IGNORECASE)] == []


def test_the_floors_of_design_are_those_that_are_linted():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    linted = [set(layer.split(" | ")) for layer in contracts[0]["layers"]]
    text = (ROOT / "DESIGN.md").read_text()
    floors = [set[str]() for _ in linted]
    for number, packages in re.findall(r"^\| (\d+) \| ([^|]*) \|", text[text.index("## Floors") :], re.MULTILINE):
        floors[int(number) - 1] |= {name.strip("/") for name in re.findall(r"`([\w/]+)`", packages)}
    assert floors == linted


@pytest.mark.exhaustive
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_as_a_program(example, document):
    """With Inductor, in a process of its own."""
    (document.parent / "kvpass").symlink_to(ROOT / "kvpass")
    env = {**os.environ, "PYTHONPATH": str(document.parent), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, example, builtin.path()]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(shown_by(example).splitlines()), result.stdout
    assert _TRUTH.findall(result.stdout) == _TRUTH.findall(shown_by(example))


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_code_of_a_page_runs_with_inductor(page, policies, document):
    run(blocks_of(page), page.name)


@pytest.mark.exhaustive
def test_a_decode_step_enters_the_files_that_design_names():
    text = (ROOT / "DESIGN.md").read_text()
    text = text[text.index("One\ndecode step, top to bottom") : text.index("Three other paths")]
    named = {"kvpass." + name.replace("/", ".") for name in re.findall(r"`([\w/]+)\.py`", text)}
    model = kvpass.compile(tiny_model("llama"), policy="snapkv", budget=40)
    ids, entered = random_ids(1, 80), set()

    def see(frame: Any, event: str, _: Any) -> None:
        if not frame.f_code.co_filename.startswith("<"):  # comparisons that dataclasses have
            entered.add(frame.f_globals.get("__name__", ""))

    cache = model.compress(ids, reusable=False)
    for step in range(3):
        sys.setprofile(see if step == 2 else None)
        try:
            model(ids[:, :1], past_key_values=cache)
        finally:
            sys.setprofile(None)
    torch._dynamo.reset()
    assert {name for name in entered if name.startswith("kvpass.")} == named - {"kvpass.ops.cuda"}
