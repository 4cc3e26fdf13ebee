"""Options of the commands: each once, as it is typed, with its default and its help.

Imports neither torch nor transformers: help and a wrong path need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

MODEL = "'builtin', 'smollm2-135m', a .gguf file, or a folder or hub name."
Model = Annotated[str, Argument(help=MODEL)]
Tasks = Annotated[str, Option(help="Tasks, or groups of them (ruler, longbench), separated by commas.")]
Policies = Annotated[str, Option(help="With their options, such as 'full,lava,cake:tau1=1.6,tau2=0.4'.")]
Budgets = Annotated[str, Option(help="Separated by commas: entries (64), share of the prompt (0.1) or bytes ('4MiB').")]
Scopes = Annotated[str, Option("--scope", help="'prompt' (question-aware), 'context' (question-agnostic), or both.")]
Samples = Annotated[int, Option(min=1, help="Samples of each task.")]
Length = Annotated[int, Option(min=2, help="Longest prompt in tokens; longer ones lose their middle.")]
Batch = Annotated[int, Option(min=1, help="Prompts answered at once.")]
NewTokens = Annotated[int, Option(min=1, help="Longest answer in tokens.")]
Folder = Annotated[
    Path, Option(file_okay=False, help="Folder for samples, tables and pictures; a rerun goes on there.")
]
Json = Annotated[Path | None, Option("--json", help="Also write everything measured to this file.")]
Seed = Annotated[int, Option(min=0, help="Seed of texts and weights that are made up.")]
Backend = Annotated[Literal["inductor", "eager"], Option(help="What compiles the graphs; eager: nothing does.")]
Device = Annotated[str, Option(help="Where the model runs, such as 'cpu' or 'cuda'.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Option(help="Of the weights.")]
Entries = Annotated[
    str, Option(help="How kept entries are held: 'model', 'int8', 'fp8', 'rot4', 'rot3', 'rot2', or several.")
]


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """All combinations of policies, budgets, scopes and entries are run; a policy that needs no budget runs once.

    Attributes:
        output: folder for ``samples.jsonl`` (to which later runs add), ``manifest.json`` and the tables.
        num_uncompressed_tokens: with 1 the first generated token sees the compressed cache; with 0 it does not.
    """

    model: Model
    tasks: Tasks = "multi_needle"
    policies: Policies = "full,lava,snapkv"
    budgets: Budgets = "0.125,0.25"
    scopes: Scopes = "prompt,context"
    samples: Samples = 20
    length: Length = 2048
    data_dir: Annotated[
        Path | None, Option(exists=True, file_okay=False, help="Folder with longbench/; else the hub is asked.")
    ] = None
    output: Folder = Path("kvpass-eval")
    entries: Entries = "model"
    seed: Seed = 0
    batch: Batch = 1
    workers: Annotated[
        int, Option(min=1, help="Processes that answer, each with its own model; on CUDA one device each.")
    ] = 1
    num_uncompressed_tokens: Annotated[int, Option(min=0, help="Scope prompt: last tokens, fed after compression.")] = 1
    chat: Annotated[bool, Option(help="Use the tokenizer's chat template where the task wants one.")] = True
    backend: Backend = "inductor"
    dtype: Dtype = "auto"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class CurveOptions:
    samples: Samples = 24
    length: Length = 512
    budgets: Annotated[str, Option(help="As in 'kvpass eval'.")] = "0.03,0.06,0.12,0.25,0.5"
    policies: Annotated[str | None, Option(help="As in 'kvpass eval'; all by default.")] = None
    scopes: Scopes = "prompt,context"
    output: Folder = Path("kvpass-curve")
    entries: Entries = "model"
    seed: Seed = 0
    batch: Batch = 25
    backend: Backend = "eager"
    dtype: Dtype = "auto"
    model: Annotated[str, Option(help=MODEL)] = "builtin"
    tasks: Annotated[str, Option("--task", help="A task of 'kvpass eval'.")] = "multi_needle"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    model: Model = "builtin"
    document: Annotated[
        Path | None, Option(exists=True, dir_okay=False, help="Text file to ask about, instead of a made-up text.")
    ] = None
    question: Annotated[str | None, Option(help="What is asked about the document.")] = None
    tokens: Annotated[
        int | None, Option(help="Length of each made-up prompt; 2048 for the built-in model, else 1024.")
    ] = None
    facts: Annotated[int, Option(help="Facts hidden in the text; each is asked for.")] = 8
    seed: Seed = 0
    output: Annotated[Path, Option(help="Where the heat map of what was kept goes (.png).")] = Path("kvpass-demo.png")
    backend: Backend = "inductor"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Every pair of contexts and batches is one comparison."""

    model: Annotated[
        str,
        Option(
            help="With random weights: llama-3.1-8b, qwen3-8b, mistral-7b, small, small-mha, tiny, wide-mlp, or a "
            "config.json; with its own: smollm2-135m, a .gguf file, or a folder."
        ),
    ] = "small-mha"
    device: Annotated[Literal["cpu", "cuda"], Option(help="Weights are made there.")] = "cpu"
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, Option(help="If not given, bf16 on CUDA and fp32 on a CPU.")
    ] = None
    contexts: Annotated[
        str, Option("--contexts", "--context", help="Prompt tokens, separated by commas; the model's own if not.")
    ] = ""
    batches: Annotated[
        str, Option("--batches", "--batch", help="Rows, separated by commas; 1 if not, with --start 1,2,3,7.")
    ] = ""
    budget: Annotated[
        str, Option(help="Entries per KV head per layer (256), share of the prompt (0.1) or bytes ('4MiB').")
    ] = "256"
    window: Annotated[int, Option(min=1, help="Last prompt tokens, always kept.")] = 32
    policies: Policies = "lava,snapkv"
    entries: Entries = "model"
    systems: Annotated[
        str | None,
        Option(help="Beside them: hf-eager, hf-static, full, kvpress; all of these that are installed if not."),
    ] = None
    new_tokens: Annotated[int, Option(min=1, help="Tokens decoded in each repeat.")] = 32
    repeats: Annotated[int, Option(min=1, help="Timed rounds over all systems.")] = 3
    backend: Backend = "inductor"
    shared_prompt: Annotated[
        bool, Option("--shared-prompt", help="Prefill one row and repeat its cache for the batch.")
    ] = False
    warm_cache: Annotated[
        bool, Option("--warm-cache", help="Use what Inductor has compiled before; compile times mean little.")
    ] = False
    seed: Seed = 0
    json_path: Json = None
    start: Annotated[
        str,
        Option(
            metavar="LAYERS",
            help="Instead: seconds to capture and compile the first policy at these depths, such as 4,16,32, with "
            "Inductor's cache empty and filled, and the first call of each of --batches.",
        ),
    ] = ""
    prefill_memory: Annotated[
        bool,
        Option(
            "--prefill-memory",
            help="Instead: peak memory of prompts of --contexts tokens under the first policy, in blocks and whole.",
        ),
    ] = False
    tensor_parallel: Annotated[
        int,
        Option(
            metavar="N",
            help="Instead: the policies on one process and on N that share the model (on CUDA a device each); starts "
            "them itself.",
        ),
    ] = 0
    serve: Annotated[
        bool,
        Option(
            "--serve", help="Instead: many requests in vLLM on the CPU, with and without the first policy, per context."
        ),
    ] = False
    waits: Annotated[
        bool,
        Option(
            "--waits",
            help="Instead: how long --requests that run in vLLM wait for a token while a prompt of --contexts tokens "
            "is read, whole and in chunks.",
        ),
    ] = False
    requests: Annotated[int, Option(min=1, help="Requests of each context, with --serve and --waits.")] = 32
    cache_mib: Annotated[int, Option(min=1, help="MiB of an engine's KV cache, with --serve and --waits.")] = 64
    question_tokens: Annotated[
        int,
        Option(
            min=0,
            help="With --serve: each request is a question of so many tokens about one text of --contexts tokens, "
            "compressed before.",
        ),
    ] = 0
    task: Annotated[
        str,
        Option(
            help="With --serve: prompts are samples of this task of 'kvpass eval', of at most --contexts tokens, and "
            "answers are scored; a model with weights."
        ),
    ] = ""
    tune: Annotated[
        bool,
        Option(
            "--tune", help="Instead: measure the kernels' block sizes on this CUDA device, write them into their table."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    document: Annotated[
        Path,
        Argument(exists=True, dir_okay=False, allow_dash=True, help="Text file to compress; '-' reads standard input."),
    ]
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help="File the compressed cache goes to.")]
    model: Annotated[str, Option(envvar="KVPASS_MODEL", help=MODEL)] = "builtin"
    policy: Annotated[str, Option(help="Policy with its options, such as 'lava' or 'cake:tau1=1.6,tau2=0.4'.")] = "lava"
    budget: Annotated[
        str, Option(help="Entries per KV head per layer (1024), share of the document (0.25) or bytes ('4MiB').")
    ] = "0.25"
    window: Annotated[int | None, Option(help="Last tokens, always kept; the policy's own default.")] = None
    entries: Annotated[
        str, Option(help="How kept entries are held: 'model', 'int8', 'fp8', 'rot4', 'rot3' or 'rot2'.")
    ] = "model"
    backend: Backend = "inductor"
    dtype: Dtype = "auto"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    cache: Annotated[Path, Argument(exists=True, dir_okay=False, help="File that 'kvpass compress' wrote.")]
    question: Annotated[str, Argument(help="Text that follows the document; the model continues it.")]
    model: Annotated[
        str | None,
        Option(
            envvar="KVPASS_MODEL",
            help="The model that compressed it; if not given, the one that the file names if that is 'builtin', "
            "fetched, or a folder or .gguf file here.",
        ),
    ] = None
    policy: Annotated[
        str | None, Option(help="Import a policy of your own that the file was made with: my.module:KeyDiff.")
    ] = None
    new_tokens: NewTokens = 64
    backend: Backend = "inductor"
    device: Device = "cpu"


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    model: Model
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help="File the maps go to.")]
    texts: Annotated[
        Path | None,
        Option(exists=True, file_okay=False, help="Folder with .txt files to fit on; generated texts if not."),
    ] = None
    tokens: Annotated[int, Option(help="Longest piece of text; about the length to be compressed.")] = 1000
    ridge: Annotated[float, Option(help="Added to the diagonal of the system that is solved.")] = 30.0
    dtype: Dtype = "auto"
    device: Device = "cpu"


def read_text(path: Path) -> str:
    """Read a document.

    Raises:
        ValueError: it cannot be read, or is no text.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"document={str(path)!r}: {error}") from None


def names(text: str) -> tuple[str, ...]:
    """Split a text at commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Split the text of an option at commas into ints.

    Raises:
        ValueError: it is none.
    """
    try:
        return tuple(int(name) for name in names(text))
    except ValueError:
        raise ValueError(f"{option}={text!r}: must be whole numbers separated by commas") from None
