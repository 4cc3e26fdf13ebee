"""The model ``kvpass`` of lm-evaluation-harness on one tiny decoder, and requests to it."""

from collections.abc import Iterable
from typing import Any

from lm_eval.api.instance import Instance

from eval_models import MODEL, TOKENIZER
from kvpass.eval.harness.model import KVPassLM

TIGHT: dict[str, Any] = {"policy": "lava", "budget": 16, "window": 6}


def build(cls: Any = KVPassLM, *, model: Any = MODEL, tokenizer: Any = TOKENIZER, **arguments: Any) -> Any:
    """A model of the harness; kvpass's own compiles nothing."""
    usual = {"compiler": "eager"} if cls is KVPassLM else {}
    return cls(pretrained=model, tokenizer=tokenizer, **usual | arguments)


def instances(kind: str, arguments: Iterable[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]
