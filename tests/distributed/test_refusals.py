"""Models that are divided among processes in a way that kvpass does not run: each is refused with a sentence.

The processes are a fake group: this one is the first, and the others are never asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

import kvpass
from tiny_models import tiny_model

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"), reason="transformers divides models otherwise"
)


@pytest.fixture
def group(request, monkeypatch) -> Iterator[int]:
    """A group of so many processes."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": request.param}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def divided(folder: Any, family: str, layers: int = 1, **given: Any) -> Any:
    from transformers.distributed import DistributedConfig

    tiny_model(family, layers=layers).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**given)).eval()


@pytest.mark.parametrize("group", [4], indirect=True)
def test_processes_that_outnumber_the_kv_heads_are_refused(group, tmp_path):
    model = divided(tmp_path, "llama", tp_size=group)
    with pytest.raises(ValueError, match="4 processes cannot share the 2 heads of LlamaForCausalLM"):
        kvpass.compile(model, policy="lava", budget=64)


@pytest.mark.parametrize(
    ("group", "family", "given"),
    [
        (2, "qwen3_moe", {"tp_size": 2, "ep_size": 2}),
        (4, "llama", {"tp_size": 2, "fsdp_size": 2}),
        (2, "llama", {"fsdp_size": 2}),
        (2, "llama", {"pp_size": 2}),
    ],
    indirect=["group"],
)
def test_parallelism_other_than_that_of_heads_is_refused(group, family, given, tmp_path):
    model = divided(tmp_path, family, **given)
    name, size = list(given.items())[-1]
    with pytest.raises(ValueError, match=f"is divided among processes by {name}={size}: .* tp_size alone"):
        kvpass.compile(model, policy="lava", budget=64)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.22"), reason="states have no methods")
@pytest.mark.parametrize("group", [2], indirect=True)
def test_a_hybrid_on_several_processes_is_refused(group, tmp_path):
    model = divided(tmp_path, "granitemoehybrid", layers=2, tp_size=group)
    with pytest.raises(ValueError, match="has recurrent layers, whose states several processes cannot share yet"):
        kvpass.compile(model, policy="lava", budget=64)


@pytest.mark.parametrize("group", [2], indirect=True)
def test_groups_of_keys_on_several_processes_are_refused(group, tmp_path):
    model = divided(tmp_path, "llama", tp_size=group)
    with pytest.raises(ValueError, match="entries='int4': several processes cannot divide groups of keys in files yet"):
        kvpass.compile(model, policy="lava", budget=64, entries="int4")
