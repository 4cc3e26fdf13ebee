"""The attention backend: a prompt is compressed layer by layer, a new token is appended and attends what was kept."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvpass.config import Geometry
from kvpass.kernels import cpu
from kvpass.operands import BITS, BUFFERS, CODES, AppendBuffers, Attention, PrefillBuffers, from_names
from kvpass.ops import entry_formats, reference
from kvpass.ops.compress import compress_layer
from kvpass.vllm import devices, versions
from kvpass.vllm.admission import Rows
from kvpass.vllm.devices import Operators
from kvpass.vllm.documents import Documents
from kvpass.vllm.kept import Kept, Tables
from kvpass.vllm.layout import BlockLayout
from kvpass.vllm.refusals import captures_steps, check_heads, check_layer
from kvpass.vllm.settings import WITHOUT, Settings
from kvpass.vllm.spec import KVPassSpec
from kvpass.vllm.steps import PromptRow, Step, read_step

Buffers = dict[str, Tensor]
"""Pools and tails of blocks, by their names in :data:`kvpass.operands.BUFFERS`."""


class KVPassBackend(AttentionBackend):
    """Backend of one configuration; :func:`bound_backend` sets its attributes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update = True
    config: ClassVar[Any]  # VllmConfig

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN" if versions.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[KVPassImpl]:
        return KVPassImpl

    @staticmethod
    def get_builder_cls() -> type[KVPassBuilder]:
        return KVPassBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)  # the pages of all layers of a block lie side by side: one pool for all layers

    @classmethod
    def customize_spec(cls, spec: Any) -> KVPassSpec:
        if type(spec) is not FullAttentionSpec:
            raise ValueError(f"kvpass does not support layers with {type(spec).__name__} in vLLM: {WITHOUT}")
        check_heads(spec.head_size, spec.head_size_v, versions.head_sizes())
        settings, layout = configured(cls.config, spec.num_kv_heads, spec.head_size)
        sizes = {"key_dim": spec.head_size, "value_dim": spec.head_size, "itemsize": spec.dtype.itemsize}
        geometry = Geometry(layers=layout.layers, kv_heads=spec.num_kv_heads, **sizes)
        geometry.check_format(settings.entry_format, torch.device(cls.config.device_config.device))
        dtype = CODES.get(settings.entry_format, spec.dtype)
        return KVPassSpec(
            block_size=-(-cls.config.model_config.max_model_len // 128) * 128,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            dtype=dtype,
            state_content_bytes=layout.width * dtype.itemsize,
            layout=layout,
        )


def configured(config: Any, kv_heads: int, head_dim: int) -> tuple[Settings, BlockLayout]:
    """Return the settings of an engine and the layout of its largest block, with the KV heads of this process."""
    settings, parallel = Settings.read(config.additional_config), config.parallel_config
    assert settings is not None
    model = config.model_config
    layout = settings.layout(model.get_num_layers(parallel), kv_heads, head_dim, parallel.tensor_parallel_size)
    chunks = config.scheduler_config.enable_chunked_prefill
    staged = layout.units_to_stage(model.max_model_len, model.dtype.itemsize) if chunks else 0
    return settings, replace(layout, one_tail=captures_steps(config), staged=staged)  # what a graph reads stays there


def bound_backend(config: Any) -> type[KVPassBackend]:
    found = type("Backend", (KVPassBackend,), {"config": config})
    found.__module__ = "kvpass.vllm.backend_choice"  # vLLM on CUDA finds a class by its name a second time
    return found


@dataclass
class KVPassMetadata:
    """One step: its rows, what runs on the device, and the index of each layer by its name."""

    step: Step
    run: Operators
    tables: Tables
    order: dict[str, int]
    documents: Documents | None


class KVPassBuilder(AttentionMetadataBuilder[KVPassMetadata]):
    """Makes the metadata of a step.

    What a decode step on CUDA reads is at the same addresses in every step, so that it can be a CUDA graph: ``block``
    and the used slots are written anew, tables of blocks are written when a prompt has been read.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.layout = kv_cache_spec.layout
        layers = self.layout.layers
        if len(layer_names) != layers:
            raise ValueError(
                f"kvpass does not support models in which {len(layer_names)} of {layers} layers have full attention: "
                f"{WITHOUT}"
            )
        self.order = {name: i for i, name in enumerate(layer_names)}
        self.rows = Rows.latest
        self.rows.layout = self.layout
        self.block = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int64, device=device)
        self.staged = b"", 0  # digest of the prompt that waits, and how many of its tokens are there

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Decode steps are CUDA graphs only where the user asks for it: it has not run on a GPU yet."""
        if captures_steps(vllm_config):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return AttentionCGSupport.NEVER

    @functools.cached_property
    def tables(self) -> Tables:
        """Made for the first step: layers have no cache before."""
        units = versions.cache_of(self.vllm_config, self.layer_names[0]).shape[0]
        rows, layers, kv_heads = len(self.block), self.layout.layers, self.layout.kv_heads
        sizes = {"layers": layers, "batch": rows, "kv_heads": kv_heads, "key_dim": self.layout.head_dim}
        means = BUFFERS["key_mean"].new(sizes, self.device) if self.layout.coded else None
        return Tables(units, rows, layers, kv_heads, self.device, means)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> KVPassMetadata:
        """Read a step; no value of the device is read on the host."""
        common, rows, tables = common_attn_metadata, common_attn_metadata.num_reqs, self.tables
        starts = common.query_start_loc_cpu[: rows + 1]
        lengths = common.seq_lens_cpu_upper_bound[:rows]  # exact without speculative decoding
        on_device = (common.query_start_loc[: rows + 1], common.seq_lens[:rows], common.block_table_tensor[:rows, 0])
        step = read_step(starts, lengths, on_device, self.rows, self.layout.shortest)
        if len(step.empty):
            tables.empty(step.empty)
        if tables.means is not None and self.rows.added:
            blocks = on_device[2][self.rows.added].long()
            numbers = [self.rows[row].number for row in self.rows.added]
            tables.renumber(blocks, torch.tensor(numbers, device=blocks.device))
            self.rows.added = []
        documents, going, first = self.rows.documents, [], 0
        for row in step.prompts:
            if row.prompt.document is not None and row.read == row.prompt.document.tokens:
                assert documents is not None
                name = row.prompt.document.name
                known = documents.offsets[name], documents.means.get(name)
                tables.continue_document(row.block, row.prompt.document, *known)
            elif row.appends:
                tables.used[row.block] = row.read - tables.before[row.block]
            elif row.waits:
                if row.read and self.staged != (row.prompt.digest, row.read):
                    raise RuntimeError(f"tokens {row.read} to {row.end} of a prompt whose first ones do not wait")
                self.staged = row.prompt.digest, row.end
        for rows_on in step.going:
            block = self.block[first : first + len(rows_on.block)]
            block.copy_(rows_on.block)
            length = rows_on.length - 1 - tables.before[block]
            tables.used[block] = length.clamp(min=0)  # length 0: it only fills a graph
            going.append(rows_on._replace(block=block))
            first += len(block)
        run = devices.operators(self.device)
        return KVPassMetadata(step._replace(going=going), run, tables, self.order, documents)


class KVPassImpl(AttentionImpl):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        config = get_current_vllm_config()
        check_layer(
            alibi=alibi_slopes is not None,
            sliding_window=sliding_window,
            kind=attn_type,
            shares_cache=kv_sharing_target_layer_name is not None,
        )
        settings, self.layout = configured(config, num_kv_heads, head_size)
        self.policy, self.entries = settings.policy, settings.entries
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = num_heads, num_kv_heads, head_size, float(scale)
        self.softcap, self.sinks = logits_soft_cap or None, sinks
        self.ranks = versions.ranks()
        if versions.is_cpu():
            entries = settings.entry_format
            codes = cpu.CODE_TYPES[CODES[entries], BITS[entries]] if self.layout.coded else ""
            cpu.attend_function(config.model_config.dtype, codes)  # without a compiler: refused at start

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KVPassMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of all rows of a step to ``output`` ``[tokens, H, D]``; q, k and v likewise."""
        if attn_metadata is None:
            return output.zero_()
        meta = attn_metadata
        site = meta.order[layer.layer_name]
        buffers_of = functools.cache(functools.partial(self.layout.buffers, kv_cache, site))
        for row in meta.step.prompts:
            call = self._call(*(x[row.tokens].transpose(0, 1)[None] for x in (query, key, value)))
            buffers, out = buffers_of(row.prompt.size.tail), output[row.tokens]
            prompt, behind = (call.rows(slice(None), part) for part in (slice(row.own), slice(row.own, None)))
            if row.own:
                if row.waits:
                    prompt = self._staged(prompt, kv_cache, site, row.read)
                self._read_prompt(prompt, out[: row.own], buffers, site, row, meta)
            if behind.q.shape[2]:
                continues = row.prompt.document is not None
                attended = self._append(behind, row.place[None].long(), buffers, site, meta, continues)
                out[row.own :] = attended[0].transpose(0, 1)
        for going in meta.step.going:
            call = self._call(*(x[going.tokens][:, :, None] for x in (query, key, value)))
            out = self._append(call, going.block, buffers_of(going.tail), site, meta, going.of_documents)
            output[going.tokens] = out[:, :, 0]
        return output

    def _call(self, q: Tensor, k: Tensor, v: Tensor) -> Attention:
        return Attention(q, k, v, self.scale, self.softcap, self.sinks)

    def _append(
        self, call: Attention, block: Tensor, buffers: Buffers, site: int, meta: KVPassMetadata, of_documents: bool
    ) -> Tensor:
        """New tokens of some rows, in one call of the kernel.

        Args:
            block: of each row, int64. buffers: of all blocks with such tails. of_documents: the tokens attend to what
                documents hold, in place of the pool of their block.
        """
        tables, rows = meta.tables, buffers["tail_k"].shape[1]
        if of_documents:
            assert meta.documents is not None
            buffers = buffers | meta.documents.pools
        in_use = {"offsets": tables.offsets[:rows], "tail_start": tables.start[:rows], "tail_used": tables.used[:rows]}
        in_use |= {"arrivals": tables.arrivals[: len(block) * self.num_kv_heads], "row_index": block}
        held = from_names(AppendBuffers, buffers | in_use)
        if tables.means is not None:
            call = entry_formats.centred(call, tables.means, (site, tables.number[block]))
        return meta.run.attend_blocks(call, held, site)

    def _staged(self, call: Attention, kv_cache: Tensor, site: int, read: int) -> Attention:
        """Have tokens of a prompt wait behind those that were read before; return the call with keys of all of them."""
        end, staged = read + call.q.shape[2], []
        for place, x in zip(self.layout.staging(kv_cache, site, call.k.dtype), call[1:3], strict=True):
            place[read:end] = x[0].transpose(0, 1)
            staged.append(place[:end].transpose(0, 1)[None])
        return call._replace(k=staged[0], v=staged[1])

    def _read_prompt(
        self, call: Attention, out: Tensor, buffers: Buffers, site: int, row: PromptRow, meta: KVPassMetadata
    ) -> None:
        """Attend tokens of a prompt; when they are its last ones, compress it.

        Args:
            call: the tokens, and keys and values of all up to them. out: ``[T, H, D]``.
        """
        n, tables = row.prompt.length, meta.tables
        if row.end < n:
            meta.run.attend_prompt(call, out)
            return
        block = {name: x.narrow(BUFFERS[name].row_dim, row.block, 1) for name, x in buffers.items()}
        block |= {name: x[:, : row.prompt.size.pool] for name, x in block.items() if BUFFERS[name].of_pool}
        if not row.prompt.resumed:
            self._prefill(call, out, block, site, row, meta)
            return
        kept = tables.kept[row.prompt.digest] if n >= self.layout.shortest else tables.nothing
        self._restore(call, block, row.prompt.number, site, kept, tables)
        if site == 0:
            tables.enter(*self._place(row), row.prompt.digest, kept)
            tables.used[row.block] = n - self._before(n)
        meta.run.attend_prompt(call, out)

    def _prefill(
        self, call: Attention, out: Tensor, block: Buffers, site: int, row: PromptRow, meta: KVPassMetadata
    ) -> None:
        """Attend a prompt's last tokens and keep what the policy chooses; after the last layer, note what was kept."""
        layers, ops = self.layout.layers, meta.run.ops
        if row.buffers is None:
            row.buffers = self._buffers(block, meta.tables.offsets[row.block : row.block + 1], call.k.dtype)
            if row.prompt.protected:
                token = torch.arange(row.prompt.length, device=call.k.device)[None]
                row.buffers = row.buffers._replace(protected=token < row.prompt.protected)
        buffers = row.buffers
        start = torch.zeros(1, dtype=torch.int64, device="cpu")
        first = start.to(call.k.device)
        lse = meta.run.attend_prompt(call, out)
        compress_layer(ops, call, lse, start, first, site, self.policy, buffers, self.ranks)
        if site == layers - 1:
            ops.pack(buffers)
            if self.layout.coded:
                window = slice(row.prompt.length - self._before(row.prompt.length))
                floats = {"pool_k": buffers.pool_k, "pool_v": buffers.pool_v}
                floats |= {"tail_k": buffers.tail_k[..., window, :], "tail_v": buffers.tail_v[..., window, :]}
                self._write(floats, buffers.offsets, block, row.prompt.number, slice(None), meta.tables)
            kept = Kept(buffers.slots[reference.POSITION, 0].clone(), buffers.offsets[0].clone())
            meta.tables.enter(*self._place(row), row.prompt.digest, kept)

    def _buffers(self, block: Buffers, offsets: Tensor, dtype: torch.dtype) -> PrefillBuffers:
        """The buffers of a prompt: pool and tails in its block, if that holds no codes; the rest for this step only."""
        sizes = {"batch": 1, "layers": self.layout.layers, "kv_heads": self.layout.kv_heads}
        sizes |= {"pool": block["pool_k"].shape[1], "stat_planes": self.policy.stat_planes}
        sizes["window"] = sizes["tail"] = max(self.policy.window, 1)
        sizes["key_dim"] = sizes["value_dim"] = self.layout.head_dim
        names = ("slots", "slot_stats", "layer_weights", "window_stats")
        made = {name: BUFFERS[name].new(sizes, offsets.device) for name in names}
        entries = torch.tensor([self.entries], device=offsets.device)
        if self.layout.coded:
            block = {
                name: torch.empty(BUFFERS[name].shape(sizes), dtype=dtype, device=offsets.device)
                for name in ("pool_k", "pool_v", "tail_k", "tail_v")
            }
        return PrefillBuffers(**block, **made, offsets=offsets, entries=entries)

    def _place(self, row: PromptRow) -> tuple[int, int, int]:
        """Where a prompt is: the first unit of its block and their number, and its tokens that are not in the tails."""
        return row.block, self.layout.units(row.prompt.size), self._before(row.prompt.length)

    def _before(self, n: int) -> int:
        """How many tokens of a prompt are not in the tails; one of one token is there, whatever the window is."""
        return max(n - self.policy.window, 0) if n >= self.layout.shortest else 0

    def _restore(self, prompt: Attention, block: Buffers, number: int, site: int, kept: Kept, tables: Tables) -> None:
        """Put what this layer's prompt had kept back into its block; nothing is decided anew."""
        kv_heads, before = self.layout.kv_heads, self._before(prompt.k.shape[2])
        offsets = kept.offsets[None, site * kv_heads : (site + 1) * kv_heads + 1]
        segments, floats = list(pairwise(offsets[0].tolist())), {}
        for name, rows in (("k", prompt.k), ("v", prompt.v)):
            of_heads = [rows[0, head, kept.positions[a:b].long()] for head, (a, b) in enumerate(segments)]
            floats[f"pool_{name}"], floats[f"tail_{name}"] = torch.cat(of_heads)[None], rows[None, :, :, before:]
        self._write(floats, offsets, block, number, slice(site, site + 1), tables)

    def _write(
        self, floats: Buffers, offsets: Tensor, block: Buffers, number: int, layers: slice, tables: Tables
    ) -> None:
        """Write what a prompt kept in some layers into its block, as codes if it holds these.

        Args:
            floats: pool and used slots of the tails of these layers. offsets: bounds of their segments in the pool of
                the block, int32 ``[1, P]``. number: of the request.
        """
        first, mean = int(offsets[0, 0]), None
        offsets = offsets - first
        if tables.means is not None and self.softcap is None and self.sinks is None:
            mean = entry_formats.key_mean(floats["pool_k"], offsets, floats["tail_k"], tables.start[:1])
            tables.means[layers, number] = mean[:, 0]
        for name, x in floats.items():
            at: tuple[slice, ...] = (slice(None), slice(first, first + x.shape[1]))
            if name.startswith("tail"):
                at = (layers, slice(None), slice(None), slice(x.shape[3]))
            if self.layout.coded:
                into = block[name][at], block[f"{name}_scale"][at]
                entry_formats.quantise_buffer(name, x, *into, offsets, mean)
            else:
                block[name][at] = x
