"""One block per request for life: a block's size is what is kept, not what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from kvpass.vllm.layout import BlockLayout


class OneBlockManager(SingleTypeKVCacheManager):
    """Gives each request one block, which it keeps until it ends or is preempted."""

    def get_num_blocks_to_allocate(self, request_id: str, *args: Any, **options: Any) -> int:
        return 0 if self.req_to_blocks.get(request_id) else 1

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        held = self.req_to_blocks[request_id]
        if held:
            return []
        held.extend(self.block_pool.get_new_blocks(1))
        return list(held)

    @classmethod
    def find_longest_cache_hit(
        cls, block_hashes: Any, max_length: int, kv_cache_group_ids: list[int], *args: Any, **options: Any
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        return tuple([] for _ in kv_cache_group_ids), 0

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **options: Any
    ) -> None:
        return

    def cache_blocks(self, *args: Any, **options: Any) -> None:
        return


@register_kv_cache_spec(manager_class=OneBlockManager)
@dataclass(frozen=True, kw_only=True)
class KVPassSpec(AttentionSpec):
    """Cache of one layer; ``block_size`` is at least max_model_len, so a request never needs a second block.

    Attributes:
        layout: of a block.
    """

    layout: BlockLayout
    dcp_sharded: bool = False

    @property
    def num_states(self) -> int:
        return self.layout.slots

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        if kernel_block_size != self.block_size:
            raise ValueError(f"kernel_block_size={kernel_block_size}: a block of {self.block_size} is never split")
        return self.layout.slots

    @property
    def block_table_token_alignment(self) -> None:
        return None

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        return False

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return 1
