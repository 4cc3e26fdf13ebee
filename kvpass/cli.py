"""The ``kvpass`` command."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import kvpass

app = typer.Typer(
    help="KV cache compression for any decoder, through torch.compile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@contextmanager
def _bad_values() -> Iterator[None]:
    """A ``ValueError`` about what the user asked for becomes one line and exit code 2."""
    try:
        yield
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpass {kvpass.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """KV cache compression for any decoder, through torch.compile."""


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(help="Length of each prompt in tokens.")] = 2048,
    facts: Annotated[int, typer.Option(help="Facts hidden in the text; each is asked for.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of facts and text.")] = 0,
    output: Annotated[Path, typer.Option(help="Where the heat map of what was kept goes (.png).")] = Path(
        "kvpass-demo.png"
    ),
    backend: Annotated[str, typer.Option(help="'inductor', or 'eager' to run without it.")] = "inductor",
) -> None:
    """Hide facts in a long text and ask the built-in model for them, with full and with compressed caches."""
    from kvpass.backend import check_compiler
    from kvpass.eval.demo import Demo, DemoSettings

    with _bad_values():
        compiler = check_compiler("backend", backend)
        settings = DemoSettings(tokens=tokens, facts=facts, seed=seed, output=output, backend=compiler)
        checked = Demo(settings)
    checked.run(Console())


@app.command()
def bench(
    model: Annotated[
        str, typer.Option(help="'tiny', 'small', 'small-mha' or the path of a transformers config.json.")
    ] = "small-mha",
    context: Annotated[int | None, typer.Option(help="Prompt tokens; by default the model's own choice.")] = None,
    budget: Annotated[
        str, typer.Option(help="Entries per KV head per layer (256), share of the prompt (0.1) or bytes ('4MiB').")
    ] = "256",
    window: Annotated[int, typer.Option(help="Last prompt tokens, always kept.")] = 32,
    policies: Annotated[str, typer.Option(help="Policies, separated by commas; 'full' is always added.")] = (
        "lava,snapkv"
    ),
    new_tokens: Annotated[int, typer.Option(help="Tokens decoded in each repeat.")] = 32,
    repeats: Annotated[int, typer.Option(help="Timed rounds over all systems.")] = 3,
    backend: Annotated[str, typer.Option(help="'inductor', or 'eager' to run without it.")] = "inductor",
    seed: Annotated[int, typer.Option(help="Seed of weights and prompt.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write everything measured to this file.")] = (
        None
    ),
) -> None:
    """Time prefill and decode of kvpass beside transformers' own caches, on random weights."""
    from kvpass.backend import check_compiler
    from kvpass.eval.bench import Bench, BenchSettings, table

    with _bad_values():
        if json_path is not None and not json_path.absolute().parent.is_dir():
            raise ValueError(f"json={str(json_path)!r}: there is no folder {str(json_path.absolute().parent)!r}")
        checked = Bench(
            BenchSettings(
                model=model,
                context=context,
                budget=_budget(budget),
                window=window,
                policies=tuple(name.strip() for name in policies.split(",") if name.strip()),
                new_tokens=new_tokens,
                repeats=repeats,
                backend=check_compiler("backend", backend),
                seed=seed,
            )
        )
    console = Console()
    result = checked.run(console)
    console.print(table(result))
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {json_path}", highlight=False)


@app.command()
def policies() -> None:
    """List the registered policies and their options."""
    made = Table("policy", "options and defaults", "budget", "what it does")
    for name, policy in sorted(kvpass.POLICIES.items()):
        options = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(policy))
        summary = (policy.__doc__ or "").strip().splitlines()[0]
        made.add_row(name, options, "yes" if policy.needs_budget else "none", summary)
    Console().print(made)


def _budget(text: str) -> int | float | str:
    """A budget as typed: an int, a float, or bytes left as text for the library to read."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text
