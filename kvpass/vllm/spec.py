"""One block per request for life: a block's size is what the request keeps and may append, not what was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from kvpass.vllm.admission import block_size
from kvpass.vllm.layout import SLOTS, BlockLayout


class OneBlockManager(SingleTypeKVCacheManager):
    """Gives each request one block, a run of vLLM's, which it keeps until it ends or is preempted.

    Short runs lie at the begin of the memory and the longest at its end, so that those leave no gaps among these. A
    request waits until there is a run for it; others that run never need more. One that would come in chunks also
    waits while the chunks of another come.

    Attributes:
        requests: of the scheduler, by id. taken: whether each of vLLM's blocks is, one byte each. unread: the request
            of which some tokens come in later steps, "" for none.
    """

    requests: Mapping[str, Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layout: BlockLayout = self.kv_cache_spec.layout
        self.taken = bytearray(len(self.block_pool.blocks))
        self.taken[: self.layout.reserved] = bytes([1]) * self.layout.reserved
        self.unread = ""

    def units(self, request_id: str) -> int:
        """Return how many of vLLM's blocks a request needs."""
        request = self.requests[request_id]
        return self.layout.units(block_size(self.layout, request.num_prompt_tokens, request.sampling_params))

    def first_free(self, units: int) -> int:
        """Return where a free run of so many begins at which the longest would not pass the end; -1 without one."""
        most = self.layout.units(self.layout.largest)
        find = self.taken.rfind if units == most else self.taken.find
        return find(bytes(units), 0, len(self.taken) - most + units)

    def is_unread(self, request_id: str, num_tokens: int) -> bool:
        """Whether a request has tokens behind its first ``num_tokens``."""
        return num_tokens < self.requests[request_id].num_tokens

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **options: Any) -> int:
        if self.req_to_blocks.get(request_id):
            return 0
        units = self.units(request_id)
        if self.first_free(units) < 0 or (self.unread and self.is_unread(request_id, num_tokens)):
            return self.block_pool.get_num_free_blocks() + 1  # then vLLM has the request wait
        return units

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        if self.is_unread(request_id, num_tokens):
            self.unread = request_id
        elif self.unread == request_id:
            self.unread = ""
        held = self.req_to_blocks[request_id]
        if held:
            return []
        units = self.units(request_id)
        first = self.first_free(units)
        run = self.block_pool.blocks[first : first + units]
        if first < 0 or any(block.ref_cnt for block in run):
            raise RuntimeError(f"no {units} free blocks side by side for request {request_id!r}")
        self.block_pool.touch(run)
        self.taken[first : first + units] = bytes([1]) * units
        held.extend(run)
        return run

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        found = super().pop_blocks_for_free(request_id)
        self.unread = "" if self.unread == request_id else self.unread
        for block in found:
            self.taken[block.block_id] = 0
        return found

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args: Any, **options: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0

    def cache_blocks(self, *args: Any, **options: Any) -> None:
        return

    add_local_computed_blocks = cache_blocks  # nothing to do there either


@register_kv_cache_spec(manager_class=OneBlockManager)
@dataclass(frozen=True, kw_only=True)
class KVPassSpec(AttentionSpec):
    """Cache of one layer; ``block_size`` is at least max_model_len, so vLLM asks for more only when a request begins.

    Attributes:
        layout: of the largest block of a request.
    """

    layout: BlockLayout
    dcp_sharded: bool = False

    num_states = SLOTS
    block_table_token_alignment = None
    prefix_cacheable = False
    uses_slot_mapping = False

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        if kernel_block_size != self.block_size:
            raise ValueError(f"kernel_block_size={kernel_block_size}: a block of {self.block_size} is never split")
        return SLOTS

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return (self.layout.reserved + self.layout.units(self.layout.largest)) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return self.layout.units(self.layout.largest)
