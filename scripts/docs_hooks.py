"""What mkdocs cannot do alone: include parts of files above docs/, and write pages from the code and from records.

A line that is only the link ``[HEADING](../FILE#heading)`` stands for the section of FILE under that heading; on a
forge it stays a link. ``{{ costs FILE }}`` stands for a table of what policies add to a prompt, of the newest
``benchmarks/results/*/FILE``. Whole pages: ``design.md`` and ``changelog.md`` (the files above docs/),
``policies/`` (docstrings, options, docs/results.md), ``benchmarks.md`` (benchmarks/results), ``reference.md``.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import posixpath
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import kvpass
from kvpass.eval.bench import kernels, smoke
from kvpass.eval.bench.processes import PrefillMemory, Start
from kvpass.eval.bench.report import conditions, markdown, title
from kvpass.eval.bench.serve import Serve
from kvpass.eval.bench.shared_model import SharedModel
from kvpass.eval.tables import markdown_table
from kvpass.policies.cake import TEMPERATURES

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from docs_roles import without_roles  # noqa: E402

HOME = {"DESIGN.md": "design.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Pages of files above docs/."""
_SECTION = re.compile(r"^\[(.+)\]\(\.\./(\S+)#\S+\)$", re.MULTILINE)
_WHOLE = {HOME[name]: name for name in ("DESIGN.md", "CHANGELOG.md")}
"""Pages that are such a file as a whole."""
_COSTS_OF = re.compile(r"^\{\{ costs (\S+) \}\}$", re.MULTILINE)
_LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)\s]+)(\))")


# -- mkdocs calls these -----------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{name: f"policies/{name}.md"} for name in _policies()]
    for entry in config.nav or []:
        if "Policies" in entry:
            entry["Policies"] = [{"All": "policies.md"}, *pages, {"CAKE's temperatures": "cake-temperatures.md"}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    results = _tables((ROOT / "docs" / "results.md").read_text())
    made: dict[str, str | bytes] = {
        **{page: (ROOT / name).read_text() for page, name in _WHOLE.items()},
        "benchmarks.md": benchmarks(),
        "reference.md": reference(),
    }
    for name, policy in _policies().items():
        picture = curve(name, results)
        if picture is not None:
            made[f"policies/{name}.svg"] = picture
        made[f"policies/{name}.md"] = policy_page(name, policy, results, drawn=picture is not None)
    if not any(name.endswith(".svg") for name in made):
        raise ValueError("docs/results.md: no table of accuracy against budget was found")
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(text: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    def of_root(text: str) -> str:
        return _LINK.sub(lambda link: link[1] + _target(link[2], page, config, files) + link[3], text)

    def moved(link: re.Match[str]) -> str:
        return f"]({_target(link[1], page, config, files)})"

    if page.file.src_uri in _WHOLE:
        return of_root(text)
    text = _SECTION.sub(lambda found: of_root(section(found[2], found[1])), text)
    text = _COSTS_OF.sub(lambda found: costs(found[1]), text)
    return re.sub(r"\]\(\.\./([^)\s]+)\)", moved, text)


# -- sections ---------------------------------------------------------------------------------------------------------


def section(name: str, heading: str) -> str:
    """Return what is under a heading of a file.

    Raises:
        ValueError: the file has no such heading.
    """
    found = re.search(
        rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,2}} |\Z)", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL
    )
    if found is None:
        raise ValueError(f"{name} has no section {heading!r}")
    return found[2].strip("\n")


def _target(link: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Where a link of a file in the root leads from a page: to a page, or to the file in the repository."""
    path, anchor, place = link.partition("#")
    name = HOME.get(path, path.removeprefix("docs/"))
    if files.get_file_from_path(name) is not None:
        return posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or ".") + anchor + place
    if not (ROOT / path).exists():
        raise ValueError(f"{page.file.src_uri}: the link {link!r} leads nowhere")
    return f"{str(config.repo_url).rstrip('/')}/blob/main/{link}"


# -- policies ---------------------------------------------------------------------------------------------------------


def _policies() -> dict[str, type[kvpass.Policy]]:
    return dict(sorted(kvpass.POLICIES.items()))


def _made(policy: type[kvpass.Policy]) -> kvpass.Policy:
    """The policy with its usual options; some have to be given."""
    if policy.name == "cake":
        tau1, tau2 = next(iter(TEMPERATURES.values()))
        return policy(tau1=tau1, tau2=tau2)  # type: ignore[call-arg]
    if policy.name == "duo_attention":
        return policy(head_map=((1.0,),))  # type: ignore[call-arg]
    if policy.name == "kvzap":
        return policy(weights="FILE")  # type: ignore[call-arg]
    return policy()


def _said(policy: type) -> tuple[str, dict[str, str]]:
    """A class's docstring without its list of arguments, and that list."""
    text, _, listed = inspect.cleandoc(policy.__doc__ or "").partition("\nArgs:\n")
    options: dict[str, str] = {}
    named: list[str] = []
    for line in inspect.cleandoc(listed).splitlines():
        found = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        if found is not None:
            named, line = found[1].split(", "), found[2]
            options.update(dict.fromkeys(named, ""))
        for part in re.split(r"(?<=\. )(?=\w+: )", line.strip()):
            second = re.match(r"(\w+): (.*)", part)
            if second is not None and found is not None:
                named, part = [second[1]], second[2]
                options[second[1]] = ""
            options.update({name: f"{options[name]} {part.strip()}".strip() for name in named})
    return text, options


def _linked(text: str) -> str:
    """Docstring text as Markdown: roles as links to policies or as code, arXiv numbers as links."""
    pages = {policy.__name__: name for name, policy in _policies().items()}

    def role(found: re.Match[str]) -> str:
        last = found[1].rsplit(".", 1)[-1]
        return f"[`{pages[last]}`]({pages[last]}.md)" if last in pages else found[0]

    text = re.sub(r":class:`~?([^`]*)`", role, text)
    text = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return without_roles(text)


def _splits(policy: type[kvpass.Policy]) -> list[str]:
    made = _made(policy)
    rule = made.decode_rule()
    return [
        f"`{type(made.heads()).__name__}`",
        f"`{type(made.layers()).__name__}`",
        "appends" if rule is None else f"`{type(rule).__name__}`",
    ]


def _type_text(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value!r}`" for value in typing.get_args(kind))
    parts = [part for part in typing.get_args(kind)] or [kind]
    words = [_type_text(part) if typing.get_args(part) else f"`{getattr(part, '__name__', part)}`" for part in parts]
    return ", ".join(words).replace("`NoneType`", "`None`")


def policy_page(name: str, policy: type[kvpass.Policy], results: list[Table], *, drawn: bool) -> str:
    text = _said(policy)[0]
    known: dict[str, str] = {}
    for base in reversed(policy.__mro__):
        if base is not object:
            known.update(_said(base)[1])
    hints = typing.get_type_hints(policy)
    rows = []
    for field in dataclasses.fields(policy):
        about = _linked(known.get(field.name, "")) or "see above"
        required = field.name in ("tau1", "tau2", "head_map", "weights") and name in ("cake", "duo_attention", "kvzap")
        default = "required" if required else f"`{field.default!r}`"
        rows.append([f"`{field.name}`", _type_text(hints[field.name]), default, about.replace("|", "\\|")])
    heads, layers, rule = _splits(policy)
    lines = [
        f"# {name}",
        "",
        _linked(text),
        "",
        *([] if not policy.needs_budget else [_base_score(policy)]),
        f"A layer's entries are shared by `heads()` = {heads}, the total by `layers()` = {layers}. "
        + ("While decoding, new tokens are appended." if rule == "appends" else f"While decoding: {rule}."),
        "",
        "## Options",
        "",
        markdown_table(["option", "values", "default", "meaning"], rows, left=4),
        "## Measured",
        "",
        *_measured(name, results, drawn=drawn),
    ]
    return "\n".join(lines) + "\n"


def _base_score(policy: type[kvpass.Policy]) -> str:
    """The score of a base class that is no policy itself, in its words."""
    for base in policy.__mro__[1:]:
        if issubclass(base, kvpass.Policy) and base is not kvpass.Policy and not hasattr(base, "name"):
            return f"Score: {_linked(_said(base)[0])}\n"
    return ""


# -- results ----------------------------------------------------------------------------------------------------------

Table = tuple[str, list[str], list[list[str]]]
"""The line of text before a table, its header, its rows."""


def _tables(text: str) -> list[Table]:
    found: list[Table] = []
    said = ""
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            said, inside = line.strip() or said, False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not inside:
            found.append((said, cells, []))
            inside = True
        elif not set(line) <= set("|-: "):
            found[-1][2].append(cells)
    return found


def _own(name: str, rows: list[list[str]], column: int = 0) -> list[list[str]]:
    return [row for row in rows if row[column].strip("`").partition(":")[0] == name]


def _curves(results: list[Table]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    for said, header, rows in results:
        scope = re.match(r"Scope `(\w+)`", said)
        if scope is not None and header[0] == "policy" and all(cell.endswith("%") for cell in header[1:]):
            yield scope[1], header, rows


def curve(name: str, results: list[Table]) -> bytes | None:
    """Exact answers against budget, the others in grey, as SVG; None if the page of results has no such row."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    scopes = [(scope, header, rows) for scope, header, rows in _curves(results) if _own(name, rows)]
    if not scopes:
        return None
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 3), layout="constrained")
        panels = figure.subplots(1, len(scopes), sharey=True, squeeze=False)[0]
        for panel, (scope, header, rows) in zip(panels, scopes, strict=True):
            budgets = [float(cell.rstrip("%")) for cell in header[1:]]
            for row in sorted(rows, key=lambda row: bool(_own(name, [row]))):
                mine = bool(_own(name, [row]))
                panel.plot(
                    budgets,
                    [float(cell.split()[0]) for cell in row[1:]],
                    color="#3f51b5" if mine else "#bbbbbb",
                    linewidth=2.5 if mine else 1,
                    marker="o" if mine else None,
                    label=name if mine else None,
                )
            panel.set_xscale("log")
            panel.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
            panel.minorticks_off()
            panel.set(xlabel="entries kept, %", title=f"scope = {scope}", ylim=(-3, 103))
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("exact answers, %")
        panels[0].legend(frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def _measured(name: str, results: list[Table], *, drawn: bool) -> list[str]:
    lines = []
    if drawn:
        lines += [
            f"![exact answers against budget, {name} and the others in grey]({name}.svg)",
            "",
            "Exact answers in percent (95 % intervals) of the built-in model of 3.4M parameters, texts of 512 tokens. "
            "[Results](../results.md) says how this was measured and compares all policies.",
            "",
        ]
        scopes = list(_curves(results))
        rows = [[scope, *row] for scope, _, all_rows in scopes for row in _own(name, all_rows)]
        lines += [markdown_table(["scope", *scopes[0][1]], rows, left=2)]
    for said, header, rows in results:
        if header[0] == "system" and _own(name, rows):
            first = _own("hf-eager", rows)
            chosen = [header.index(cell) for cell in header if cell in _COSTS]
            cut = [[row[index] for index in [0, *chosen]] for row in [*first, *_own("full", rows), *_own(name, rows)]]
            unique = list(dict.fromkeys(map(tuple, cut)))
            lines += [
                f"Cost ({said.strip('*')}; random weights):",
                "",
                markdown_table(["system", *(header[index] for index in chosen)], unique),
            ]
    return lines or ["Not measured yet."]


_COSTS = {"prefill s", "scoring %", "decode ms/token", "cache MiB", "compile s"}


# -- records and reference --------------------------------------------------------------------------------------------


def benchmarks() -> str:
    """Every file of benchmarks/results, newest first.

    Raises:
        ValueError: a file is of no known form.
    """
    lines = [
        "# Every record",
        "",
        "Written from the files in `benchmarks/results`. `kvpass bench` and `make gpu-check` make them; "
        "[figures.md](figures.md) discusses them.",
    ]
    for folder in sorted((ROOT / "benchmarks" / "results").iterdir(), reverse=True):
        lines += ["", f"## {folder.name}"]
        for path in sorted(folder.glob("*.json")):
            if path.name == "made-by.json":
                continue  # a note of make gpu-check about the other files
            lines += ["", f"### {path.stem}", "", *_record(path)]
    return "\n".join(lines) + "\n"


_IN_PROCESSES = {
    "start": Start,
    "prefill_memory": PrefillMemory,
    "tensor_parallel": SharedModel,
    "serve": Serve,
}
"""Measurements that are not of the bench itself, by the name under which their record holds them."""


def _record(path: Path) -> list[str]:
    found = json.loads(path.read_text())
    command = [f"`{' '.join(found['command'])}`", ""] if "command" in found else []
    if "systems" in found:
        return [*command, _earlier_table(found)]
    if "runs" in found:
        return [*command, markdown(found)]
    for name, kind in _IN_PROCESSES.items():
        if name in found:
            return [*command, kind.shown(found).markdown()]
    if "decode" in found:
        return [*command, *_kernel_tables(found)]
    if "checks" in found:
        return [markdown_table(["check", "error", "allowed", "right"], smoke.rows(found))]
    if "exit_status" in found:
        return [f"Exit status {found['exit_status']}: {found['said']}", ""]
    raise ValueError(f"{path}: no record of kvpass bench or make gpu-check")


def _kernel_tables(found: dict[str, Any]) -> list[str]:
    """The tables of the kernel bench."""
    lines = [markdown_table(header, rows, left=0) for header, rows in kernels.tables(found)]
    for record in found.get("prefill", []):
        if "failure" not in record:
            parts = ", ".join(f"{name[:60]} {ms:.3f}" for name, ms in record["parts_ms"].items())
            lines += [f"{record['policy']}, {record['prompt']} tokens, ms a layer: {parts}", ""]
    return lines


def _earlier_table(found: dict[str, Any]) -> str:
    """Of a record of 2026-11-21: one run, fewer columns."""
    rows = [
        [
            system["name"],
            f"{system['prefill_s']['median']:.3g}",
            f"{system['decode_ms']['median']:.2f}",
            f"{system['cache_bytes'] / 2**20:.2f}",
        ]
        for system in found["systems"]
    ]
    machine, used = found["machine"], found["versions"]
    return (
        f"**{found['model']['name']}: prompt {found['context']} tokens, batch {found['batch']}; budget "
        f"{found['budget']['entries']} entries per KV head per layer**\n\n"
        + markdown_table(["system", "prefill s", "decode ms/token", "cache MiB"], rows)
        + f"\n{machine['cpu']}; torch {used['torch']}, transformers {used['transformers']}.\n"
    )


def costs(name: str) -> str:
    """Of each policy in the newest record of that name, what it adds to a prompt, the least first."""
    found = sorted((ROOT / "benchmarks" / "results").glob(f"*/{name}"))
    if not found:
        return "Not measured yet."
    record = json.loads(found[-1].read_text())
    lines = [f"`{' '.join(record['command'])}`"]
    for run in record["runs"]:
        systems = [system for system in run["systems"] if not system["failure"]]
        measured = sorted((system for system in systems if system["scoring"]), key=lambda one: one["scoring"]["share"])
        rows = [
            [
                f"`{system['name']}`",
                f"{100 * system['scoring']['share']:.1f}",
                f"{system['prefill_s']['median']:.2f}",
                f"{system['prefill_ratio']['full']:.2f}",
            ]
            for system in measured
        ]
        header = ["policy", "its share of the prefill, %", "prefill s", "x `full`"]
        lines += [f"**{title(record, run)}**", markdown_table(header, rows).strip()]
    return "\n\n".join([*lines, conditions(record)])


def reference() -> str:
    """A section for each public name."""
    lines = ["# API", "", "What `import kvpass` gives. Everything else may change without notice.", ""]
    for name in kvpass.__all__:
        if not name.startswith("__"):
            lines += [f"::: kvpass.{name}", *_OPTIONS.get(name, []), ""]
        if name == "compile":
            lines += ["What it returns is of the model's own class, and of this one:", "", _COMPILED, ""]
    return "\n".join(lines)


_OPTIONS = {
    "CompressedCache": [
        "    options: { show_bases: false, members: "
        "[nbytes, lengths, positions, layer_ids, device, get_seq_length, clone, to, save, reset] }"
    ],
}
"""The rest of a cache is for kvpass and transformers."""
_COMPILED = """::: kvpass.frontends.transformers.CompressedModel
    options: { heading_level: 3, show_root_full_path: false, show_bases: false }
"""
