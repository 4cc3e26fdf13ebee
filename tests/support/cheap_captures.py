"""Settings of Dynamo for processes that make many small captures."""

import gc

import torch._dynamo


def cheap_captures() -> None:
    """Leave out what takes a third of the time of a small capture."""
    # After every capture Dynamo flushes the caches of the processor, to measure how long its guards take for a log that
    # nobody reads here: a fifth of the time.
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    # The cache of what operators give for fake tensors pays from many equal layers on. Captures of one or two are a
    # sixth faster without it.
    torch._dynamo.config.fake_tensor_cache_enabled = False
    # Dynamo makes many objects and few cycles: looking for garbage every 700 objects takes five percent of the time.
    gc.set_threshold(100_000, 20, 100)
