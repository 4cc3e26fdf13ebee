"""Models divided among the processes of a fake group: this one is the first, and no other is ever asked.

What kvpass does not run is refused with a sentence; compiled code meets the others as often as it must.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

import kvpass
from kvpass import ranks
from kvpass.transformers_compat import CACHE
from tiny_models import random_ids, tiny_model
from versions import DIVIDED, STATES

pytestmark = DIVIDED


@pytest.fixture
def group(request, monkeypatch) -> Iterator[int]:
    """A group of so many processes."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": request.param}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def divided(
    folder: Any,
    family: str,
    layers: int = 1,
    quantised: dict[str, str] | None = None,
    changes: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    from transformers.distributed import DistributedConfig

    model = tiny_model(family, layers=layers, **(changes or {}))
    if quantised is not None:
        model.config.quantization_config = quantised
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**given)).eval()


@pytest.mark.parametrize(
    ("group", "family", "layers", "given", "said"),
    [
        (4, "llama", 1, {"tp_size": 4}, "4 processes cannot share the 2 heads of LlamaForCausalLM"),
        (2, "qwen3_moe", 1, {"tp_size": 2, "ep_size": 2}, "is divided among processes by ep_size=2: .* tp_size alone"),
        (4, "llama", 1, {"tp_size": 2, "fsdp_size": 2}, "is divided among processes by fsdp_size=2: .* tp_size alone"),
        (2, "llama", 1, {"fsdp_size": 2}, "is divided among processes by fsdp_size=2: .* tp_size alone"),
        (2, "llama", 1, {"pp_size": 2}, "is divided among processes by pp_size=2: .* tp_size alone"),
        pytest.param(
            *(2, "granitemoehybrid", 2, {"tp_size": 2}),
            "has recurrent layers, whose states several processes cannot share yet",
            marks=STATES,
        ),
        # its plan has the head only, whose weight is that of the embedding: transformers itself cannot run it so
        (2, "lfm2", 2, {"tp_size": 2}, r"tp_size=2\) divided no weight of Lfm2ForCausalLM"),
        (
            *(2, "llama", 1, {"tp_size": 2, "tp_plan": {"model.layers.*.mlp.up_proj": "packed_colwise"}}),
            r"mlp\.up_proj is divided among processes as 'packed_colwise' .*: supported are",
        ),
    ],
    indirect=["group"],
)
def test_what_processes_cannot_share_is_refused(group, family, layers, given, said, tmp_path):
    model = divided(tmp_path, family, layers=layers, **given)
    with pytest.raises(ValueError, match=said):
        kvpass.compile(model, policy="lava", budget=64)


@pytest.mark.parametrize("group", [4], indirect=True)
def test_processes_that_share_no_heads_can_be_more(group, tmp_path):
    """transformers does not divide the attention of gpt_oss."""
    kvpass.compile(divided(tmp_path, "gpt_oss", tp_size=group), policy="lava", budget=64)


@pytest.mark.parametrize("group", [2], indirect=True)
def test_a_quantised_model_on_several_processes_is_refused(group, tmp_path):
    """The scale of a weight of BitNet is the mean of the whole: a process cannot know it from its part."""
    pytest.importorskip("accelerate")
    how = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    model = divided(tmp_path, "llama", quantised=how, tp_size=group)
    with pytest.raises(ValueError, match=r"q_proj is a divided AutoBitLinear: must be a plain .* quantised model yet"):
        kvpass.compile(model, policy="lava", budget=64)


@pytest.mark.parametrize("group", [2], indirect=True)
def test_compiled_code_meets_the_others_once_for_each_reason(group, tmp_path, monkeypatch):
    """Inductor neither drops nor repeats it; prompts of another length compile nothing."""
    model = divided(tmp_path, "llama", tp_size=group)
    fast = kvpass.compile(model, policy="lava", budget=24, window=8)
    met: list[tuple[int, ...]] = []

    def gathered(found: list[Tensor], x: Tensor, group: Any) -> None:
        met.append(tuple(x.shape))
        for part in found:
            part.copy_(x)

    monkeypatch.setattr(ranks.dist, "all_gather", gathered)
    monkeypatch.setattr(ranks.dist, "all_reduce", lambda x, group: met.append(tuple(x.shape)))
    hidden, logits = model.config.hidden_size, (1, 1, model.config.vocab_size // group)
    for tokens in (60, 45):
        met.clear()
        with torch.no_grad():
            cache = fast(random_ids(1, tokens), logits_to_keep=1)[CACHE]
            prompt = met[:5]
            met.clear()
            fast(random_ids(1, 1), cache=cache, logits_to_keep=1)
        assert prompt == [*[(1, tokens, hidden)] * 3, logits, (1, 1, tokens - 8)], "embedding, attention, MLP; scores"
        assert met == [*[(1, 1, hidden)] * 3, logits]
        assert len(fast.report().compiled) == 2


@pytest.mark.parametrize("group", [2], indirect=True)
@pytest.mark.parametrize("padding", [3, 100])
def test_a_padding_id_may_be_a_row_of_another_process(group, padding, tmp_path):
    """As that of Qwen, whose token of padding is one of the last; it has no part in a forward."""
    model = divided(tmp_path, "llama", changes={"pad_token_id": padding}, tp_size=group)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path).get_input_embeddings()
    embedding = kvpass.compile(model, policy="lava", budget=64).get_input_embeddings()
    assert whole.padding_idx == padding < whole.num_embeddings and embedding.weight.shape[0] == 64
    ids = torch.tensor([[3, 7, 63, 64, 100]])
    assert torch.equal(embedding(ids), whole(ids).where((ids < 64)[..., None], 0)), "the first process has these rows"
    assert model.get_input_embeddings().padding_idx == padding, "the user's own model is as it was"
