"""Settings of the bench, checked before anything is built, and its models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from kvpass.eval.options import BenchOptions, names, numbers
from kvpass.eval.policy_spec import parse_formats, parse_policies, parse_prefills, typed
from kvpass.fetch import PACKAGES
from kvpass.loading import located
from kvpass.policies import resolve_budget

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BASELINES = ("hf-eager", "hf-static", "full")
WARM_UP_STEPS = 3
"""Decode steps of the first run of a system, and those before the timed steps of every run on CUDA, where the first
steps on a new cache capture a CUDA graph."""
WARM_UP_TOKENS = 512  # prompt of the first run of a system that compiles nothing then


class BenchModel(NamedTuple):
    """A decoder of the bench; ``context``: prompt tokens when the user names none. Without weights they are random."""

    name: str
    config: PretrainedConfig
    context: int
    has_weights: bool = False


_SMALL = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 32768,
}  # fmt: skip
_8B = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 2**21, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN = {"model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288, "vocab_size": 151936}
_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "llama-3.1-8b": (32768, _8B),
    "qwen3-8b": (32768, _8B | _QWEN),
    "mistral-7b": (32768, _8B | {"model_type": "mistral", "vocab_size": 32768, "sliding_window": None}),
    "small": (16384, _SMALL | {"num_key_value_heads": 2}),
    "small-mha": (16384, _SMALL),
    "tiny": (1024, _SMALL | {
        "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_key_value_heads": 2,
    }),
}  # fmt: skip
"""Usual context and config by name. The published shapes (``mistral-7b`` is v0.3) have more positions than published,
so that prompts of a million tokens and their answers fit in each. Others are files in ``benchmarks/``."""


def find_model(name: str) -> BenchModel:
    """Look up a model of the bench.

    Args:
        name: a shape such as ``llama-3.1-8b`` or ``small``, the path of a transformers ``config.json``, or, with
            weights, a name of ``kvpass fetch`` or a folder.

    Raises:
        ValueError: none of these, or no readable config of a known architecture.
    """
    if name in _MODELS:
        context, fields = _MODELS[name]
        return BenchModel(name, AutoConfig.for_model(**fields), context)
    path = Path(name)
    if has_weights := name in PACKAGES or path.is_dir():
        with located(name) as place:
            config = AutoConfig.from_pretrained(place)
    elif path.suffix != ".json":
        names = ", ".join([*_MODELS, *PACKAGES])
        raise ValueError(f"model={name!r}: expected one of {names}, or a folder or config.json of a model")
    else:
        try:
            config = AutoConfig.for_model(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"model={name!r}: is no configuration of transformers: {error}") from error
    return BenchModel(name, config, min(16384, config.max_position_embeddings // 2), has_weights)


def build(
    model: BenchModel, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Make the decoder in evaluation mode; random weights are made on the device, so the host needs no memory."""
    if model.has_weights:
        with located(model.name) as place:
            built = AutoModelForCausalLM.from_pretrained(place, config=model.config, dtype=dtype)
        return built.to(device).eval()  # type: ignore[arg-type]
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(model.config, dtype=dtype).eval()


class BenchSettings:
    """The options of a bench, checked, and what their texts mean.

    Attributes:
        model: of the name in the options. dtype: of its weights.
        prompts: of ``contexts``, in tokens. rows: of ``batches``. budget: of its text.
        specs: policies of kvpass, each with each of ``formats`` and ``prefills``. window: the longest of theirs.
        baselines: of ``BASELINES``; without ``systems`` all.

    Raises:
        ValueError: a number out of range, an unknown name, or a device this machine does not have.
    """

    def __init__(self, options: BenchOptions) -> None:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda': this machine has no CUDA device")
        self.dtype = _DTYPES[options.dtype or ("bf16" if options.device == "cuda" else "fp32")]
        self.rows = numbers("batches", options.batches)
        if not self.rows or min(self.rows) < 1:
            raise ValueError(f"batches={options.batches}: must be one or more numbers >= 1")
        self.budget = typed(options.budget)
        self.formats = parse_formats(options.entries)
        self.prefills = parse_prefills(options.prefill)
        self.specs = parse_policies(options.policies)
        for spec in self.specs:
            if (policy := spec.resolve()).needs_budget:
                resolve_budget(policy, self.budget)
        self.window = max(spec.resolve().window for spec in self.specs)
        self.baselines = BASELINES if options.systems is None else tuple(dict.fromkeys(names(options.systems)))
        for name in self.baselines:
            if name not in BASELINES:
                raise ValueError(f"systems: {name!r} must be one of {', '.join(BASELINES)}")
        self.model = find_model(options.model)
        self.prompts = numbers("contexts", options.contexts) or (self.model.context,)
        later = 3 * options.new_tokens + WARM_UP_STEPS  # timed steps, and two answers of generate
        longest = self.model.config.max_position_embeddings - later
        for tokens in self.prompts:
            if not self.window < tokens <= longest:
                raise ValueError(
                    f"context={tokens}: must be above window={self.window} and at most {longest}, the positions of "
                    f"the model less {later} for three times --new-tokens and steps to warm up"
                )

    def ids(self, options: BenchOptions, rows: int, tokens: int) -> Tensor:
        """Return prompts of so many tokens, int64 ``[rows, tokens]``: of the text, the same in all rows, or random."""
        if options.text is None:
            generator = torch.Generator().manual_seed(options.seed)
            return torch.randint(self.model.config.vocab_size, (rows, tokens), generator=generator)
        if not self.model.has_weights:
            raise ValueError(f"text={str(options.text)!r}: {self.model.name!r} has random weights and no tokenizer")
        with located(self.model.name) as place:
            tokenizer = AutoTokenizer.from_pretrained(place)
        ids: Tensor = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :tokens]
        if ids.shape[1] < tokens:
            raise ValueError(f"text={str(options.text)!r}: {ids.shape[1]} tokens are fewer than a prompt of {tokens}")
        return ids.expand(rows, -1)
