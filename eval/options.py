"""Options of the commands: each once, as it is typed, with its default and its help.

Imports neither torch nor transformers: help and a wrong path need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

MODEL = "'builtin', 'smollm2-135m', or a folder or hub name."
Model = Annotated[str, Argument(help=MODEL)]
OfFile = Annotated[
    str | None,
    Option(
        envvar="KVPASS_MODEL",
        help="The model that compressed it; if not given, what the file names: 'builtin', fetched, or a folder.",
    ),
]
Policies = Annotated[str, Option(help="Such as 'full,lava:window=8'; a grid: 'lava:window={8,32}'.")]
Budget = Annotated[str, Option(help="Entries per KV head per layer (256), share of the text (0.25) or bytes ('4MiB').")]
Budgets = Annotated[str, Option(help="Separated by commas: entries (64), share of the prompt (0.1) or bytes ('4MiB').")]
Scopes = Annotated[str, Option("--scope", help="'prompt' (question-aware), 'context' (question-agnostic), or both.")]
Folder = Annotated[Path, Option(file_okay=False, help="Folder for samples and tables; a rerun goes on there.")]
Evaluated = Annotated[Path, Argument(exists=True, file_okay=False, help="Folder that 'kvpass eval' wrote.")]
Seed = Annotated[int, Option(min=0, help="Seed of texts and weights that are made up.")]
Backend = Annotated[Literal["inductor", "eager"], Option(help="What compiles the graphs; eager: nothing does.")]
Device = Annotated[str, Option(help="Where the model runs, such as 'cpu' or 'cuda'.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"],
    Option(help="Of the weights; auto: the checkpoint's own; int8, int4: quantised with torchao, multiply bfloat16."),
]
System = Annotated[str | None, Option(help="Text of a system message at the begin of the chat.")]
Chat = Annotated[bool, Option(help="Use the tokenizer's chat template, if it has one; else the model continues text.")]
NewTokens = Annotated[int, Option(min=1, help="Longest answer in tokens.")]
Entries = Annotated[str, Option(help="Held as 'model', 'int8', 'fp8', 'rot4', 'rot3' or 'rot2', or as several.")]
Prefill = Annotated[str, Option(help="'full', 'xattention:threshold=0.9' or 'minference', or several; see --policies.")]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """All combinations of policies, budgets, scopes and entries are run; a policy that needs no budget runs once."""

    model: Model
    tasks: Annotated[str, Option(help="Tasks, groups (ruler, longbench), .jsonl files; by commas.")] = "multi_needle"
    policies: Policies = "full,lava,snapkv"
    budgets: Budgets = "0.125,0.25"
    scopes: Scopes = "prompt,context"
    samples: Annotated[int, Option(min=1, help="Samples of each task.")] = 20
    length: Annotated[int, Option(min=2, help="Longest prompt in tokens; longer ones lose their middle.")] = 2048
    data_dir: Annotated[
        Path | None, Option(exists=True, file_okay=False, help="Folder with longbench/; else the hub is asked.")
    ] = None
    output: Folder = Path("kvpass-eval")
    entries: Entries = "model"
    prefill: Prefill = "full"
    seed: Seed = 0
    batch: Annotated[int, Option(min=1, help="Prompts answered at once.")] = 1
    num_uncompressed_tokens: Annotated[int, Option(min=0, help="Scope prompt: last tokens, fed after compression.")] = 1
    chat: Annotated[bool, Option(help="Use the tokenizer's chat template where the task wants one.")] = True
    backend: Backend = "inductor"
    dtype: Dtype = "auto"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Without rows and columns, a line for each task, policy, budget and scope."""

    folder: Evaluated
    rows: Annotated[str, Option(help="Of task, scope, policy, budget; policy if not given.")] = ""
    columns: Annotated[str, Option(help="One of task, scope, policy, budget.")] = ""
    against: Annotated[str | None, Option(help="A policy to compare with, beside 'full'.")] = None
    csv: Annotated[bool, Option("--csv", help="As comma-separated numbers.")] = False
    latex: Annotated[bool, Option("--latex", help="As LaTeX, with the package booktabs.")] = False
    markdown: Annotated[bool, Option("--markdown", help="As Markdown.")] = False


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    folder: Evaluated
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help=".svg, .pdf or .png.")] = Path("results.svg")
    policies: Annotated[str, Option(help="As typed for 'kvpass eval'; all if not given.")] = ""
    task: Annotated[str, Option(help="The mean of all tasks if not given.")] = ""


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    folder: Evaluated
    wrong: Annotated[bool, Option("--wrong", help="Only those with a score below 1.")] = False
    policy: Annotated[str, Option(help="As typed for 'kvpass eval', one or several.")] = ""
    task: Annotated[str, Option(help="Tasks, separated by commas.")] = ""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    model: Model = "builtin"
    tokens: Annotated[int | None, Option(help="Length of each prompt; 2048 for the built-in model, else 1024.")] = None
    facts: Annotated[int, Option(min=1, max=512, help="Facts hidden in the text; each is asked for.")] = 8
    seed: Seed = 0
    output: Annotated[Path, Option(help="Where the heat map goes (.png, .pdf or .svg).")] = Path("kvpass-demo.png")
    document: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="Text file to ask about, in place of facts.")
    ] = None
    question: Annotated[str | None, Option(help="What is asked about the document.")] = None
    policies: Policies = ""
    scopes: Scopes = ""
    max_new_tokens: NewTokens = 64
    backend: Backend = "inductor"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Every pair of contexts and batches is one comparison."""

    model: Annotated[
        str,
        Option(
            help="With random weights: llama-3.1-8b, qwen3-8b, mistral-7b, small, small-mha, tiny, or a config.json; "
            "with its own: smollm2-135m, or a folder."
        ),
    ] = "small-mha"
    device: Annotated[Literal["cpu", "cuda"], Option(help="Weights are made there.")] = "cpu"
    dtype: Annotated[Literal["fp32", "bf16", "fp16"] | None, Option(help="bf16 on CUDA, fp32 on a CPU if not.")] = None
    contexts: Annotated[str, Option("--contexts", "--context", help="Prompt tokens; the model's own if not.")] = ""
    batches: Annotated[str, Option("--batches", "--batch", help="Rows, separated by commas.")] = "1"
    budget: Budget = "256"
    policies: Policies = "lava,snapkv"
    entries: Entries = "model"
    prefill: Prefill = "full"
    text: Annotated[Path | None, Option(exists=True, dir_okay=False, help="Of the prompts; random if not.")] = None
    systems: Annotated[str | None, Option(help="Beside them: hf-eager, hf-static, full; all if not.")] = None
    new_tokens: Annotated[int, Option(min=1, help="Tokens decoded in each repeat.")] = 32
    repeats: Annotated[int, Option(min=1, help="Timed rounds over all systems.")] = 3
    backend: Backend = "inductor"
    shared_prompt: Annotated[bool, Option("--shared-prompt", help="Prefill one row, repeat it for the batch.")] = False
    warm_cache: Annotated[bool, Option("--warm-cache", help="Do not empty Inductor's cache before.")] = False
    seed: Seed = 0
    json_path: Annotated[Path | None, Option("--json", help="Also write everything measured to this file.")] = None


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    document: Annotated[
        Path,
        # path_type: typer would compare a Path with "-"
        Argument(exists=True, dir_okay=False, allow_dash=True, path_type=str, help="Text file; '-': standard input."),
    ]
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help="File the compressed cache goes to.")]
    model: Annotated[str, Option(envvar="KVPASS_MODEL", help=MODEL)] = "builtin"
    policy: Annotated[str, Option(help="With its options, such as 'compactor' or 'cake:tau1=1.6,tau2=0.4'.")] = "kvzip"
    budget: Budget = "0.5"
    entries: Annotated[str, Option(help="Held as 'model', 'int8', 'fp8', 'rot4', 'rot3' or 'rot2'.")] = "rot4"
    guide: Annotated[str | None, Option(help="A question of the kind to come, for policies that go by one.")] = None
    system: System = None
    chat: Chat = True
    backend: Backend = "inductor"
    dtype: Dtype = "auto"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    cache: Annotated[Path, Argument(exists=True, dir_okay=False, help="File of 'kvpass compress' or Document.save.")]
    question: Annotated[str, Argument(help="What is asked about the document.")]
    model: OfFile = None
    policy: Annotated[str | None, Option(help="A policy of your own to import first: my.module:KeyDiff.")] = None
    max_new_tokens: NewTokens = 256
    backend: Backend = "inductor"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """With a file, model, policy and budget are its own; else the history is compressed when it has doubled."""

    cache: Annotated[
        Path | None, Argument(exists=True, dir_okay=False, help="File of 'kvpass compress' or Document.save.")
    ] = None
    model: OfFile = None
    policy: Annotated[str, Option(help="Of a chat without a file.")] = "lava"
    budget: Annotated[str, Option(help="Of a chat without a file: entries per KV head per layer.")] = "1024"
    system: System = None
    chat: Chat = True
    max_new_tokens: NewTokens = 512
    backend: Backend = "inductor"
    dtype: Dtype = "auto"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class LookOptions:
    cache: Annotated[Path, Argument(exists=True, dir_okay=False, help="File of 'kvpass compress' or Document.save.")]
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help="Where the page goes.")] = Path("kept.html")
    model: OfFile = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Without documents the policy is lava, if none is named; with documents and no policy each request names one."""

    model: Annotated[str, Argument(help="'smollm2-135m', or a folder or hub name.")]
    flags: Annotated[list[str] | None, Argument(metavar="[-- FLAGS]", help="Of vLLM, such as: -- --port 8001.")] = None
    documents: Annotated[
        list[str] | None, Option("--document", metavar="NAME=FILE", help="A file of 'kvpass compress'; one or more.")
    ] = None
    policy: Annotated[str | None, Option(help="Of prompts, such as 'lava' or 'snapkv:kernel_size=31'.")] = None
    budget: Annotated[
        int | None, Option(min=1, help="Of the policy: entries per KV head per layer; 256 if not given.")
    ] = None
    room: Annotated[int, Option(help="Most tokens that a request may append to its prompt.")] = 512
    entries: Annotated[
        str | None, Option(help="Held as 'model', 'int8', 'fp8', 'rot4', 'rot3' or 'rot2'; the documents' own if not.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    model: Model
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help="File the maps go to.")]
    texts: Annotated[
        Path | None, Option(exists=True, file_okay=False, help="Folder of .txt files to fit on; generated ones if not.")
    ] = None
    tokens: Annotated[int, Option(help="Longest piece of text; about the length to be compressed.")] = 1000
    ridge: Annotated[float, Option(help="Added to the diagonal of the system that is solved.")] = 30.0
    dtype: Dtype = "auto"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class ChooseOptions:
    """Prompts are made of texts or of tasks."""

    model: Model
    texts: Annotated[list[Path] | None, Option(exists=True, dir_okay=False, help="Text file; one or more.")] = None
    tasks: Annotated[str, Option(help="In place of texts: tasks of 'kvpass eval', separated by commas.")] = ""
    agreement: Annotated[float, Option(help="Take the smallest cache that agrees with the full one so often.")] = 0.98
    memory: Annotated[str | None, Option(help="Take the best cache of at most so many bytes, such as '64MiB'.")] = None
    scope: Annotated[Literal["prompt", "context"], Option(help="Compress with the question, or before it.")] = "prompt"
    policies: Policies = ""
    budgets: Budgets = "0.125,0.25,0.5"
    entries: Entries = "model,rot4"
    length: Annotated[int, Option(min=2, help="Tokens of a prompt; of tasks at most.")] = 2048
    max_new_tokens: NewTokens = 64
    samples: Annotated[int, Option(min=2, help="Prompts of all texts, or of each task.")] = 20
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help="File of the choice.")] = Path("choice.json")
    data_dir: Annotated[Path | None, Option(exists=True, file_okay=False, help="Folder with longbench/.")] = None
    backend: Backend = "inductor"
    dtype: Dtype = "auto"
    device: Device = "cpu"


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in names(text))
    except ValueError:
        raise ValueError(f"{option}={text!r}: must be whole numbers separated by commas") from None
