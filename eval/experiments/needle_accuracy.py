"""How many questions of the needle tasks a model answers: ``python -m kvpass.eval.experiments.needle_accuracy FOLDER``.

Answers are decoded greedily and must be right to the last token, full stop included. A compressed model compresses the
prompt without its last token, so that also the first token of the answer comes from the compressed cache. Several
questions of one context are asked in sequence, each behind the answers to those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

import kvpass
from kvpass.eval.needle.text import TASKS, Question, Sample, sample
from kvpass.frontends.transformers import CompressedModel

_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Accuracy:
    """Right answers of one task at one length."""

    questions: int
    right: int

    @property
    def share(self) -> float:
        return self.right / self.questions


def compress_all_but_last(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Arguments of ``generate``: a compressed model compresses the prompts without their last token.

    A prefill computes with full attention, also the first token of an answer: with the last token left to ``generate``
    every token of an answer is computed against the compressed cache. Any other model gets the prompts whole.

    Args:
        ids: int64 ``[B, N]``, no padding.
    """
    given: dict[str, Any] = {"input_ids": ids}
    if isinstance(model, CompressedModel):
        given = {"input_ids": ids[:, -1:], "past_key_values": model.compress(ids[:, :-1])}
    return given | {"attention_mask": torch.ones_like(given["input_ids"])}


@torch.inference_mode()
def answer(model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
    """Greedy answers, up to the full stop, to prompts of equal length."""
    given = compress_all_but_last(model, torch.tensor(tokenizer(list(prompts))["input_ids"], device=model.device))
    out = model.generate(**given, max_new_tokens=max_new_tokens, do_sample=False, use_cache=True)
    said = out[:, given["input_ids"].shape[1] :]
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in said]


def measure(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    tokens: int,
    samples: int,
    *,
    held_out: bool = True,
) -> Accuracy:
    """Ask every question of ``samples`` texts.

    Args:
        model: anything with ``generate``: a transformers model or what ``kvpass.compile`` returns.
        task, tokens, held_out: as in :func:`~kvpass.eval.needle.text.sample`; seeds count up from 0.
    """
    texts = [sample(task, tokens, seed, held_out=held_out) for seed in range(samples)]
    size = 1 if TASKS[task].questions > 1 else max(1, _BATCH_TOKENS // tokens)
    right = 0
    for start in range(0, samples, size):
        right += _right_in(model, tokenizer, texts[start : start + size])
    return Accuracy(samples * TASKS[task].questions, right)


def _right_in(model: Any, tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sample]) -> int:
    """Right answers; more than one text only where each has one question."""
    right = 0
    so_far = [text.context for text in texts]
    for questions in zip(*(text.questions for text in texts), strict=True):
        so_far = [f"{before} {question.text}" for before, question in zip(so_far, questions, strict=True)]
        said = answer(model, tokenizer, so_far, max(question.max_new_tokens for question in questions))
        right += sum(map(Question.answered_by, questions, said))
        so_far = [f"{before} {words}" for before, words in zip(so_far, said, strict=True)]
    return right


def main(
    folder: Annotated[Path, typer.Argument(help="Of the model and its tokenizer.")],
    tasks: Annotated[str, typer.Option(help="Names separated by commas.")] = ",".join(TASKS),
    lengths: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "128,256,512,1024,2048,4096",
    samples: Annotated[int, typer.Option(min=1, help="Texts a cell.")] = 100,
    seen: Annotated[bool, typer.Option(help="Names of the training texts instead of held-out ones.")] = False,
    policy: Annotated[str | None, typer.Option(help="Compress with this policy; full cache when left out.")] = None,
    budget: Annotated[float, typer.Option(help="Of that policy, as a fraction of the prompt.")] = 0.12,
    autocast: Annotated[bool, typer.Option(help="bf16 matrix products, twice as fast; fp32 otherwise.")] = True,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Print a line for every task and length that fits."""
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval().to(device)
    if policy is not None:
        model = kvpass.compile(model, policy=policy, budget=budget, backend="eager")
    cells = [(int(length), task) for length in lengths.split(",") for task in tasks.split(",")]
    with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        for length, task in track(cells, description=policy or "full cache"):
            try:
                sample(task, length, 0)
            except ValueError as error:
                print(f"left out: {error}")
                continue
            found = measure(model, tokenizer, task, length, samples, held_out=not seen)
            print(f"{length:6} {task:12} {found.share:.3f} of {found.questions}", flush=True)


if __name__ == "__main__":
    typer.run(main)
