"""Types of the arguments of ``kvpass.compile``: names of policies, and the options that each takes.

Each class declares to type checkers what the policies of the same fields declare at run time; a test compares them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

from kvpass.compiler.backend import Compiler
from kvpass.compiler.parts import Regions
from kvpass.config import Block, Budget, EntryFormat
from kvpass.policies.cake import Indicator
from kvpass.policies.duo_attention import HeadMap
from kvpass.policies.layer_splits import Parity, Shape
from kvpass.policies.rules import Recompress
from kvpass.policies.scores import Group, Pool
from kvpass.policies.triattention import Aggregate

BudgetLike: TypeAlias = Budget | int | float | str | None

PolicyName = Literal[
    "ada_pyramidkv",
    "ada_snapkv",
    "cake",
    "criticalkv",
    "defensivekv",
    "duo_attention",
    "expected_attention",
    "full",
    "h2o",
    "keydiff",
    "knorm",
    "kvzip",
    "kvzip_plus",
    "lagkv",
    "lava",
    "layer_defensivekv",
    "lava_nohead",
    "lava_pyramid",
    "lava_uniform",
    "pyramidkv",
    "r_kv",
    "random",
    "snapkv",
    "streaming_llm",
    "tova",
    "triattention",
    "vatp",
]
"""Policies of kvpass; of your own, give an instance: a type checker does not know its name."""


class Options(TypedDict, total=False):
    """Arguments of ``kvpass.compile`` that go with every policy; all that ``"full"`` takes."""

    budget: BudgetLike
    window: int | None
    parity: Parity
    backend: Compiler
    recompress: Recompress
    cuda_graphs: bool
    compile_regions: Regions
    prefill_block: Block
    entries: EntryFormat


class EvictingOptions(Options, total=False):
    evict_during_decode: bool


class RandomOptions(Options, total=False):
    seed: int


class StreamingLLMOptions(EvictingOptions, total=False):
    sinks: int


class LagKVOptions(Options, total=False):
    sinks: int
    lag: int
    cross_scoring: bool


class KVzipOptions(Options, total=False):
    sinks: int
    chunk: int
    overlap: int
    prompt_ids: tuple[int, ...]
    again_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    split: Literal["layers", "heads", "none"]


class RKVOptions(Options, total=False):
    kernel_size: int
    importance: float
    threshold: float
    buffer: int


class TriAttentionOptions(Options, total=False):
    statistics: str | None
    longest: int
    aggregate: Aggregate
    group: Group
    buffer: int


class ScoreOptions(Options, total=False):
    pool: Pool
    kernel_size: int
    group: Group


class LavaOptions(ScoreOptions, total=False):
    alpha: float | None


class LavaPyramidOptions(LavaOptions, total=False):
    beta: int


class PyramidKVOptions(ScoreOptions, total=False):
    beta: int
    shape: Shape
    short_uniform: bool


class AdaSnapKVOptions(ScoreOptions, total=False):
    critical: bool
    alpha: float
    normalize: bool


class AdaPyramidKVOptions(ScoreOptions, total=False):
    alpha: float
    beta: int


class CriticalKVOptions(ScoreOptions, total=False):
    base: Literal["snapkv", "ada_snapkv"]
    alpha: float
    first_stage: float
    epsilon: float


class DefensiveKVOptions(Options, total=False):
    kernel_size: int


class DuoAttentionOptions(Options, total=False):
    head_map: str | HeadMap
    sinks: int


class ExpectedAttentionOptions(Options, total=False):
    critical: bool
    n_future: int
    sinks: int
    epsilon: float
    covariance: bool
    value_norm: bool
    head_split: Literal["uniform", "adaptive"]
    alpha: float


class LayerSplitOptions(ScoreOptions, total=False):
    layer_split: Literal["uniform", "cake"]
    tau1: float | None
    tau2: float | None


class SnapKVOptions(LayerSplitOptions, total=False):
    critical: bool


class H2OOptions(LayerSplitOptions, EvictingOptions, total=False):
    pass


class VatpOptions(ScoreOptions, EvictingOptions, total=False):
    indicator: Literal["snapkv", "h2o", "scissorhands"]
    sinks: int


class CakeOptions(ScoreOptions, EvictingOptions, total=False):
    gamma: float
    tau1: float | None
    tau2: float | None
    indicator: Indicator
