"""The lm-evaluation-harness model."""
