"""Names that differ between the versions of transformers that kvpass supports."""

from __future__ import annotations

import inspect
from dataclasses import fields

from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""The cache among the arguments and outputs of a model: "cache" from 5.24 on, "past_key_values" before."""

NEXT_LENGTH = "next_sequence_length"
"""Argument of ``prepare_inputs_for_generation`` that says how many of the ids come next."""
SAYS_NEXT_LENGTH = NEXT_LENGTH in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
"""Whether there is one; before, the cache's length said it."""
