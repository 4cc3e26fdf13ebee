"""Pages of the site that mkdocs writes from the code, from records of the bench, and from files above docs/.

Roles of docstrings (``:class:`X```, ``:meth:`Y```) are shown as code, options of policies as plain defaults.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import kvpass
from kvpass.eval.bench.report import show

ROOT = Path(__file__).resolve().parent.parent
ABOVE = {"design.md": "DESIGN.md", "changelog.md": "CHANGELOG.md"}
"""Pages that are a file above docs/."""
PAGES = {file: page for page, file in ABOVE.items()} | {"README.md": "index.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {page: (ROOT / name).read_text() for page, name in ABOVE.items()}
    pages |= {"each-policy.md": each_policy(), "benchmarks.md": benchmarks()}
    pages |= {"reference.md": reference("API", _API), "policy-reference.md": reference("API of policies", _POLICIES)}
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(text: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files above docs/ to their pages, or to the repository."""

    def target(link: re.Match[str]) -> str:
        path, anchor, place = link[1].partition("#")
        name = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(name) is not None:
            return f"]({name}{anchor}{place})"
        if not (ROOT / path).exists():
            raise ValueError(f"{page.file.src_uri}: the link {link[1]!r} leads nowhere")
        return f"]({str(config.repo_url).rstrip('/')}/blob/main/{link[1]})"

    start = "(?!https?://|#)" if page.file.src_uri in ABOVE else r"\.\./"
    return re.sub(rf"\]\({start}([^)\s]+)\)", target, text)


def each_policy() -> str:
    """A section for each policy, of the docstring of its class."""
    lines = ["# Each policy\n\nOptions without a text are those of a base class, such as [`Policy`][kvpass.Policy]."]
    for name, policy in sorted(kvpass.POLICIES.items()):
        lines += ["", f"## {name}", "", f"::: {policy.__module__}.{policy.__qualname__}", _POLICY]
    return "\n".join(lines) + "\n"


_POLICY = "    options: { heading_level: 3, members: false, show_root_full_path: false }"


def benchmarks() -> str:
    """Every record in benchmarks/results, newest first."""
    lines = ["# Every record\n\nThe files of `benchmarks/results`. [Results and speed](results.md) has what decides."]
    for folder in sorted((ROOT / "benchmarks" / "results").iterdir(), reverse=True):
        lines += ["", f"## {folder.name}"]
        for path in sorted(folder.glob("*.md")):
            lines += ["", f"### {path.stem}", "", path.read_text()]
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text())
            lines += ["", f"### {path.stem}", "", f"`{' '.join(record['command'])}`", ""]
            lines.append("[Serve](serve.md) has its figures." if "serve" in record else show(record).markdown())
    return "\n".join(lines) + "\n"


def reference(page: str, names: list[str]) -> str:
    """A section for each of these public names."""
    lines = [f"# {page}", "", "What `import kvpass` gives. Everything else may change without notice.", ""]
    for name in names:
        lines += [f"::: kvpass.{name}", *_OPTIONS.get(name, []), ""]
        if name == "compile":
            lines += ["What it returns is of the model's own class, and of this one:", "", _COMPILED, ""]
    return "\n".join(lines)


_POLICIES = "Policy POLICIES register_policy plan Plan calibrate Calibration attention_output_loss OutputLoss".split()
_API = "compile Document Chat load_cache CompressedCache Report".split()
_API += sorted({*kvpass.__all__} - {*_POLICIES, *_API, "__version__"})
_OPTIONS = {
    "CompressedCache": [
        "    options: { show_bases: false, members: "
        "[nbytes, lengths, positions, layer_ids, device, get_seq_length, clone, to, save, reset] }"
    ]
}
"""The rest of a cache is for kvpass and transformers."""
_COMPILED = """::: kvpass.frontends.transformers.CompressedModel
    options: { heading_level: 3, show_root_full_path: false, show_bases: false, inherited_members: [forward, device] }
"""

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):`(~?)([^`]*)`")
_SECTION = re.compile(r"(\n)([ ]*(?:Args|Attributes|Returns|Yields|Raises):\n)")
"""griffe reads a section only behind an empty line."""


class Roles(griffe.Extension):
    """Rewrites every docstring and every option of a policy before mkdocstrings reads them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        value = attr.value
        if isinstance(value, griffe.ExprCall) and value.canonical_path.endswith(".option"):
            attr.value = value.arguments[0]

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            # of a name that begins with a tilde only the last part
            text = _ROLE.sub(
                lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", obj.docstring.value
            )
            obj.docstring.value = _SECTION.sub(r"\1\n\2", text)
