"""Names that differ between the versions of transformers that kvpass supports."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"
"""The cache among the arguments and outputs of a model: "cache" from 5.24 on, "past_key_values" before."""
