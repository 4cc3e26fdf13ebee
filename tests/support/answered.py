"""Records of samples that no model has answered."""

import dataclasses
from typing import Any

import msgspec

from kvpass.eval.records import Question, Record
from kvpass.eval.runner import Kept

ANSWERED = Question(
    task="t", sample="0", policy="p", budget="1", scope="prompt", num_uncompressed_tokens=1, model="m", code="c",
    backend="eager", device="cpu", seed=0, max_new_tokens=3, stops=[4], libraries={"torch": "2"}, prompt="d",
    length=100, chat=True,
)  # fmt: skip
KEPT = Kept(**dict.fromkeys((field.name for field in dataclasses.fields(Kept)), 1))
RUNS = {
    "r": {
        "model": {"name": "tiny", "dtype": "float32"},
        "command": ["kvpass", "eval", "tiny", "--policies", "a,b c"],
        "versions": {"kvpass": "0.1.0", "source": "0123456789"},
    }
}


def record(key: str = "", *, score: float = 1.0, prediction: str = "1", label: str = "p", **asked: Any) -> Record:
    """A record whose question differs from :data:`ANSWERED` in what is asked; without a key, the question's own."""
    cut = asked.pop("cut_tokens", 0)
    question = msgspec.structs.replace(ANSWERED, **{"policy": label, **asked})
    return Record(
        key=key or question.key, label=label, run="r", question=question, question_text="what?", context_end="it is 1",
        prompt_tokens=100 + cut, cut_tokens=cut, answers=["1"], prediction=prediction, score=score, generated_tokens=1,
        kept=KEPT, labels={"depth": 0.25, "length": 3},
    )  # fmt: skip
