"""Policies with options that change what is computed, beside each policy as it is."""

from typing import Any

from kvpass.policies import POLICIES

OF_ONE_MODEL = ("duo_attention", "kvzap")
"""Policies that need an option which is made for one model."""
BUILT_IN = [
    name
    for name, kind in POLICIES.items()
    if kind.__module__.startswith("kvpass.policies.") and name not in OF_ONE_MODEL
]
TAUS = {"tau1": 1.6, "tau2": 0.4}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in BUILT_IN if name not in ("cake", "full", "kvzip_plus")),
    # kvzip_plus is kvzip with another statistic, which test_golden.py compares
    ("cake", TAUS),
    *(("cake", TAUS | {"indicator": indicator}) for indicator in ("mean", "var", "product")),
    ("snapkv", TAUS | {"layer_split": "cake"}),
    ("snapkv", {"layer_split": "random", "seed": 3}),
    ("h2o", TAUS | {"layer_split": "cake"}),
    *(("pyramidkv", {"shape": shape}) for shape in ("geometric", "exponential", "entropy", "gini")),
    ("ada_snapkv", {"normalize": True, "alpha": 0.5}),
    ("lava", {"alpha": 0.3}),
    ("vatp", {"indicator": "h2o", "sinks": 3}),
    ("vatp", {"indicator": "scissorhands"}),
    *(("lagkv", {"sinks": 2, "lag": 5, "cross_scoring": cross}) for cross in (False, True)),
    *(("criticalkv", {"base": "ada_snapkv", "alpha": alpha, "epsilon": 0.01}) for alpha in (0.0, 0.2)),
    ("expected_attention", {"head_split": "adaptive", "epsilon": 0.02, "sinks": 2}),
    ("ada_snapkv", {"critical": True}),
    ("compactor", {"sinks": 2, "chunk": 5, "alpha": 1.0, "blend": 0.5}),
    ("dropkv", {"form": "caote", "alpha": 0.2}),
    *(("chunkkv", {"chunk": 4, "spikes": spikes, "each_head": bool(spikes)}) for spikes in (0, 2)),
    *(("kvzip", {"split": split, "sinks": 2}) for split in ("heads", "none")),
]
