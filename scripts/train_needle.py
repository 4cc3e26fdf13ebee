"""Train the built-in needle model from scratch: ``.venv/bin/python scripts/train_needle.py --output DIR``.

A small Qwen3 decoder learns the language of :mod:`kvpass.eval.tasks.needle` on texts that grow from 64 to 4096 tokens.
It must first learn to copy, then to match keys; the loss of the first number of each value shows the latter, so it is
kept apart. Batches are drawn from the seed and the step, so a stopped run goes on from its checkpoint as if it had
never stopped: give the same command again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.progress import track
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, Qwen3ForCausalLM

from needle_model import IDS, POSITIONS, Shape, build, tokenizer
from training_text import LONGEST_LIST, Kind, Mix, TrainingText

_WARMUP, _LOG_EVERY, _SAVE_EVERY = 30, 10, 50
"""Steps."""
_FILLER_SHARE = 0.3
_WEIGHTS = {Kind.FIRST: 1.0, Kind.REST: 1.0, Kind.LIST: 1.0, Kind.VARIABLE: 1.0, Kind.FILLER: 0.2}
"""Of the mean loss of each kind."""


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum.

    Attributes:
        length: tokens of each text.
        steps: at most.
        tokens: of one step.
        mix: what the texts are made of.
        gaps: share of texts whose positions jump at sentence starts (PoSE, Zhu et al. 2024), up to ``reach``.
        rate: factor of the learning rates at the start and after ``steps`` steps.
    """

    length: int
    steps: int
    tokens: int = 8192
    mix: Mix = field(default_factory=Mix)
    gaps: float = 0.5
    reach: int = 10240
    rate: tuple[float, float] = (1.0, 1.0)


_FEW_KEYS = Mix(
    copies=0.3,
    lists=0,
    variables=0.15,
    short=0.7,
    density=(0.7, 1),
    attributes=1,
    clash=0,
    two=0.3,
    decoys=0,
    hops=1,
    questions=0.5,
)
_MORE_KEYS = Mix(copies=0.1, lists=0.2, short=0.4, density=(0.4, 1), attributes=2, clash=0.2, decoys=0.1, hops=1)
_ONE_LIST = Mix(copies=0.02, lists=0.9, variables=0.03, density=(0.8, 1), attributes=1, clash=0, decoys=0)
_FEW_LISTS = Mix(copies=0.02, lists=0.85, variables=0.03, density=(0.8, 1), attributes=2, clash=0.1, decoys=0.05)
_MORE_LISTS = Mix(copies=0.02, lists=0.6, variables=0.05, density=(0.3, 1), decoys=0.1)
STAGES = (
    Stage(64, 100, 4096, _FEW_KEYS, gaps=0.2),
    Stage(128, 170, 4096, _MORE_KEYS, gaps=0.3),
    Stage(256, 120, 4096, Mix(lists=0.2, density=(0.2, 1))),
    Stage(512, 130, 4096, Mix(copies=0.05, lists=0.2, density=(0.08, 1))),
    Stage(1024, 60, mix=Mix(copies=0.05, density=(0.04, 1))),
    Stage(2048, 40, mix=Mix(copies=0.02, density=(0.02, 0.6)), rate=(1.0, 0.2)),
    Stage(4096, 15, mix=Mix(copies=0.02, density=(0.01, 0.3)), reach=POSITIONS, rate=(0.2, 0.02)),
    # again, with many lists: they are learned last
    Stage(512, 101, mix=Mix(copies=0.03, lists=0.4, density=(0.08, 1)), rate=(0.5, 0.5)),
    Stage(2048, 32, mix=Mix(copies=0.02, lists=0.25, density=(0.02, 0.6)), rate=(0.5, 0.1)),
    Stage(4096, 12, mix=Mix(copies=0.02, lists=0.2, density=(0.01, 0.3)), reach=POSITIONS, rate=(0.1, 0.01)),
    # not a value twice: learned from texts of little else
    Stage(64, 500, 4096, _ONE_LIST, gaps=0.3, rate=(0.5, 0.1)),
    Stage(64, 250, 4096, _FEW_LISTS, gaps=0.3, rate=(0.4, 0.2)),
    Stage(128, 250, 4096, _MORE_LISTS, rate=(0.4, 0.2)),
    Stage(256, 200, 4096, Mix(copies=0.02, lists=0.5, density=(0.15, 1)), rate=(0.3, 0.2)),
    Stage(512, 120, mix=Mix(copies=0.02, lists=0.4, density=(0.06, 1)), rate=(0.3, 0.15)),
    Stage(1024, 60, mix=Mix(copies=0.02, lists=0.35, density=(0.03, 1)), rate=(0.15, 0.08)),
    Stage(64, 250, 4096, _FEW_LISTS, gaps=0.3, rate=(0.4, 0.2)),
    Stage(128, 150, 4096, _MORE_LISTS, rate=(0.3, 0.15)),
    Stage(512, 70, mix=Mix(copies=0.02, lists=0.4, density=(0.06, 1)), rate=(0.2, 0.1)),
    Stage(128, 80, 4096, _MORE_LISTS, rate=(0.3, 0.15)),
    Stage(512, 110, mix=Mix(copies=0.02, lists=0.5, density=(0.05, 1)), rate=(0.2, 0.05)),
    Stage(1024, 30, mix=Mix(copies=0.02, lists=0.35, density=(0.03, 1)), rate=(0.1, 0.05)),
    Stage(512, 90, mix=Mix(copies=0.02, lists=0.5, density=(0.03, 0.7)), rate=(0.15, 0.03)),
    Stage(256, 50, mix=Mix(copies=0.02, lists=0.5, density=(0.06, 1)), rate=(0.4, 0.35)),
    Stage(512, 110, mix=Mix(copies=0.02, lists=0.5, density=(0.03, 0.7)), rate=(0.35, 0.05)),
    Stage(2048, 16, mix=Mix(copies=0.02, lists=0.35, density=(0.01, 0.4)), rate=(0.05, 0.02)),
    Stage(4096, 8, mix=Mix(copies=0.02, lists=0.3, density=(0.008, 0.2)), reach=POSITIONS, rate=(0.02, 0.002)),
)


class Batch(NamedTuple):
    """Texts of one step.

    Attributes:
        ids, kinds, positions: int64 ``[B, T]``; kinds as in :class:`~training_text.Kind`, with a
            random part of the filler marked ``IGNORED``.
        others: int64 ``[B, T, 2]``, ids that are as right as that in ``ids``, -1 where there are fewer.
    """

    ids: Tensor
    kinds: Tensor
    positions: Tensor
    others: Tensor


def batch(stage: Stage, seed: int, step: int) -> Batch:
    """The texts of a step, which seed and step alone decide."""
    rng = random.Random(f"{seed}/{step}")
    ids, kinds, positions, others = [], [], [], []
    for _ in range(max(1, stage.tokens // stage.length)):
        text = TrainingText(stage.length, rng, stage.mix)
        ids.append([IDS[word] for word in text.words])
        kinds.append(
            [Kind.IGNORED if kind == Kind.FILLER and rng.random() > _FILLER_SHARE else kind for kind in text.kinds]
        )
        positions.append(_positions(text, stage, rng))
        others.append([_padded([IDS[word] for word in text.others.get(i, ())]) for i in range(stage.length)])
    return Batch(*map(torch.tensor, (ids, kinds, positions, others)))


def _padded(others: list[int]) -> list[int]:
    return others + [-1] * (LONGEST_LIST - 1 - len(others))


def _positions(text: TrainingText, stage: Stage, rng: random.Random) -> list[int]:
    positions = list(range(stage.length))
    if rng.random() < stage.gaps:
        starts = sorted(rng.sample(text.starts, min(len(text.starts), rng.randint(1, 5))))
        room = rng.randint(0, stage.reach - stage.length)
        cuts = [0, *sorted(rng.randint(0, room) for _ in starts[1:]), room]
        for start, before, after in zip(starts, cuts, cuts[1:], strict=False):
            positions[start:] = [position + after - before for position in positions[start:]]
    return positions


def set_cross_entropy(logits: Tensor, right: Tensor) -> Tensor:
    """Minus the log-probability that any of the right ids is said, fp32 ``[N]``.

    Args:
        logits: fp32 ``[N, vocabulary]``. right: int64 ``[N, R]``, different ids, -1 for none.
    """
    logs = F.log_softmax(logits, -1).gather(1, right.clamp(min=0))
    return -logs.masked_fill(right < 0, float("-inf")).logsumexp(1)


class Run:
    """A training run in a folder, which goes on from the checkpoint there.

    Args:
        output: folder of ``checkpoint.pt``, ``log.jsonl`` and, when done, of the model.
        compiled: compile the decoder, once a length.

    Attributes:
        step: the next one, of all stages together.
    """

    def __init__(
        self,
        output: Path,
        stages: Sequence[Stage] = STAGES,
        shape: Shape = Shape(),  # noqa: B008  # immutable
        seed: int = 0,
        device: str = "cpu",
        compiled: bool = True,
    ) -> None:
        self.seed, self.device, self.compiled = seed, device, compiled
        self.steps = [(stage, step) for stage in stages for step in range(stage.steps)]
        self.step = 0
        self.model = build(shape, seed)
        nn.Module.to(self.model, device)
        self.model.set_attn_implementation("needle_training")
        inner = [p for name, p in self.model.named_parameters() if p.dim() == 2 and ".layers." in name]
        outer = [p for name, p in self.model.named_parameters() if p.dim() == 1 or ".layers." not in name]
        optimizers = [
            torch.optim.Muon(inner, lr=0.02, momentum=0.95, weight_decay=0.05),
            torch.optim.AdamW(outer, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.schedules = [LambdaLR(optimizer, self._rate) for optimizer in optimizers]
        self._stateful: list[Any] = [self.model, *optimizers, *self.schedules]
        output.mkdir(parents=True, exist_ok=True)
        self.output, self._checkpoint = output, output / "checkpoint.pt"
        if self._checkpoint.exists():
            saved = torch.load(self._checkpoint, map_location=device, weights_only=True)
            if saved["run"] != [seed, *shape]:
                raise ValueError(f"{self._checkpoint}: seed and shape are {saved['run']}; asked for {[seed, *shape]}")
            for part, state in zip(self._stateful, saved["states"], strict=True):
                part.load_state_dict(state)
            self.step = saved["step"]
        self._shape = shape

    @property
    def done(self) -> bool:
        return self.step == len(self.steps)

    def save(self) -> None:
        """Write the checkpoint; a kill in between leaves the one before."""
        partial = self._checkpoint.with_suffix(".partial")
        states = [part.state_dict() for part in self._stateful]
        torch.save({"run": [self.seed, *self._shape], "step": self.step, "states": states}, partial)
        partial.replace(self._checkpoint)

    def export(self) -> None:
        """Write config, bf16 weights, generation config and tokenizer, for ``from_pretrained``."""
        exported = Qwen3ForCausalLM(build(self._shape, 0).config)
        exported.load_state_dict(self.model.state_dict())
        exported.generation_config = GenerationConfig(
            bos_token_id=IDS["<bos>"], eos_token_id=IDS["."], pad_token_id=IDS["<pad>"], do_sample=False
        )
        nn.Module.to(exported, torch.bfloat16)
        exported.save_pretrained(self.output)
        tokenizer().save_pretrained(self.output)

    def advance(self, steps: int | None = None) -> None:
        """Train to the end, or for so many steps."""
        end = len(self.steps) if steps is None else min(self.step + steps, len(self.steps))
        forward = None
        with (self.output / "log.jsonl").open("a", buffering=1) as log:
            for step in track(range(self.step, end), description="training"):
                stage, step_of_stage = self.steps[step]
                if forward is None or step_of_stage == 0:
                    torch._dynamo.reset()
                    forward = torch.compile(self._hidden, dynamic=False) if self.compiled else self._hidden
                losses = self._train(batch(stage, self.seed, step), forward)
                self.step = step + 1
                if self.step % _LOG_EVERY == 0:
                    log.write(json.dumps({"step": self.step, "length": stage.length, "losses": losses}) + "\n")
                if self.step % _SAVE_EVERY == 0:
                    self.save()
        self.save()

    def _rate(self, step: int) -> float:
        """Factor of the learning rates, linear within a stage."""
        if step >= len(self.steps):
            return 0.0
        stage, step_of_stage = self.steps[step]
        first, last = stage.rate
        return (first + (last - first) * step_of_stage / stage.steps) * min(1.0, (step + 1) / _WARMUP)

    def _hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return self.model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state

    def _train(self, texts: Batch, forward: Callable[[Tensor, Tensor], Tensor]) -> dict[str, float]:
        """One update; the mean loss of each kind."""
        ids, kinds, positions, others = (x.to(self.device) for x in texts)
        wanted = kinds[:, 1:] != Kind.IGNORED
        hidden = forward(ids, positions)[:, :-1][wanted]
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model.lm_head(hidden)
        loss = set_cross_entropy(logits.float(), torch.cat([ids[..., None], others], -1)[:, 1:][wanted])
        kind = kinds[:, 1:][wanted]
        means = {k: loss[kind == k].mean() for k in _WEIGHTS if (kind == k).any()}
        torch.stack([_WEIGHTS[k] * mean for k, mean in means.items()]).sum().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for schedule in self.schedules:
            schedule.optimizer.step()
            schedule.optimizer.zero_grad()
            schedule.step()
        return {k.name.lower(): round(mean.item(), 4) for k, mean in means.items()}


def main(
    output: Annotated[Path, typer.Option(help="Folder of checkpoint, log and model; an earlier run there goes on.")],
    seed: Annotated[int, typer.Option(help="Of weights and texts.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    compiled: Annotated[bool, typer.Option(help="Compile the decoder; needs a C++ compiler on the CPU.")] = True,
) -> None:
    """Train the built-in needle model and export it."""
    run = Run(output, seed=seed, device=device, compiled=compiled)
    run.advance()
    run.export()


if __name__ == "__main__":
    typer.run(main)
