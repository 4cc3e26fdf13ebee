"""The model that ships with kvpass loads without a network and answers from its prompt."""

import huggingface_hub.constants
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpass import builtin
from kvpass.eval.tasks.needle import Task, hide


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    return builtin.load()


def test_the_dtype_is_the_one_asked_for_and_the_folder_holds_model_tokenizer_and_card(loaded):
    assert {p.dtype for p in loaded[0].parameters()} == {torch.float32}
    assert not loaded[0].training
    bf16, _ = builtin.load(dtype=torch.bfloat16)
    assert {p.dtype for p in bf16.parameters()} == {torch.bfloat16}
    for (name, stored), (_, widened) in zip(bf16.named_parameters(), loaded[0].named_parameters(), strict=True):
        assert torch.equal(stored.float(), widened), name
    names = {file.name for file in builtin.path().iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "MODEL_CARD.md"} <= names


def test_it_answers_about_names_it_has_never_seen(loaded):
    """From its prompt: the codes are drawn."""
    model, tokenizer = loaded
    assert model.config.num_hidden_layers >= 6 and model.config.num_key_value_heads >= 4
    right = []
    for seed in range(3):
        for sample in hide(Task(keys=8, questions=8), 512, seed):
            prompt = tokenizer(sample.context + sample.question, return_tensors="pt", return_token_type_ids=False)
            assert tokenizer.unk_token_id not in prompt["input_ids"]
            tokens = model.generate(**prompt, max_new_tokens=sample.max_new_tokens, do_sample=False)
            right.append(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :]) == f"{sample.answers[0]} .")
    assert sum(right) >= 0.95 * len(right), f"{sum(right)} of {len(right)}"
