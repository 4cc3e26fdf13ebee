"""What ``kvpass.compile`` refuses of policies and of what goes with them, in what words."""

import pytest

import kvpass
from tiny_models import tiny_model

TAUS = {"tau1": 1.0, "tau2": 1.0}
KVZAP = {"policy": "kvzap", "weights": "never read"}
EVERY_TURN = {"budget": 40, "window": 8, "recompress": "every_turn"}
AGAIN = [
    ({"recompress": "sometimes"}, "recompress='sometimes': must be one of never, when_full, every_turn"),
    ({"policy": "full", "budget": None}, "keeps everything"),
    ({"parity": "code"}, "know only a prompt"),
    ({"policy": "h2o", "evict_during_decode": False}, "more than the window's queries"),
    ({"policy": "vatp", "indicator": "h2o", "evict_during_decode": False}, "more than the window's queries"),
    ({"policy": "tova", "evict_during_decode": False}, "each KV head by itself"),
    ({"policy": "chunkkv"}, "defined for a prompt, not for the entries that are left of one"),
    ({"policy": "lagkv"}, "defined for a prompt, not for the entries that are left of one"),
    ({"policy": "criticalkv"}, "reads the output projection, which only a prompt has at hand"),
    ({"policy": "compactor"}, "only a prompt has queries of all its tokens"),
    ({"policy": "expected_attention"}, "only a prompt has queries of all its tokens"),
    ({"policy": "kvzip"}, "runs the prompt once more behind all its entries"),
    (KVZAP, "what enters attention"),
]
"""What cannot be compressed again."""
COMPACT = [
    ({"policy": "tova"}, "compact=True with policy 'tova': it evicts while decoding"),
    ({"decode_policy": "r_kv"}, "compact=True goes with policies that only append"),
    ({"policy": "full", "budget": None}, "compact=True with policy 'full': it drops nothing"),
    ({"recompress": "every_turn"}, "runs the prompt once more"),
    ({"compact": 1}, "compact=1: must be one of True, False"),
]
TWO = [
    ({"policy": "full", "budget": None, "decode_policy": "r_kv"}, "'full' keeps the whole prompt"),
    ({"policy": "h2o", "decode_policy": "r_kv"}, "'h2o' evicts while decoding itself: give evict_during_decode=False"),
    ({"decode_policy": "snapkv"}, "'snapkv' only appends"),
    ({"decode_policy": "tova"}, "'tova' keeps one set of entries in all heads"),
    ({"decode_policy": "r_kv", "decode_parity": "code"}, "give decode_parity='paper'"),
    ({"decode_policy": "r_kv", "window": 4}, "decode_window=8 must be at most the window of 'lava', 4"),
    (
        {**KVZAP, "decode_policy": "kvzap", "decode_evict_during_decode": True, "decode_weights": "x"},
        "give evict_during_decode=True to the first",
    ),
    ({"decode_buffer": 5}, "decode_buffer is an option of decode_policy, which is not given"),
    ({"decode_policy": "r_vk"}, "did you mean 'r_kv'"),
    ({"decode_policy": "r_kv", "decode_bufer": 5}, "bufer=5: not an option of policy 'r_kv'"),
]
"""Two policies."""
REFINED = [
    ({"policy": "snapkv", "layer_split": "cake", **TAUS}, "CakeLayers divides the budget among layers later"),
    ({"policy": "snapkv", "layer_split": "random"}, "RandomLayers divides the budget among layers later"),
    ({"policy": "expected_attention"}, "by the norm of the value already; give value_norm=False"),
    ({"policy": "lava"}, "not an option of policy 'lava'"),
]
REFUSED = [
    *((EVERY_TURN | given, said) for given, said in AGAIN),
    *(({"compact": True, **given}, said) for given, said in COMPACT),
    *TWO,
    *((given | {"critical": True}, f"critical=True.*{said}") for given, said in REFINED),
    ({"policy": "snapkv", "threshold": -5}, "threshold=-5: not an option of policy 'snapkv'"),
    *(
        (KVZAP | {"split": split, "threshold": -5}, f"threshold=-5 with split='{split}': must be with split='layers'")
        for split in ("heads", "none", "file")
    ),
    (
        KVZAP | {"split": "file", "evict_during_decode": True},
        "evict_during_decode=True with split='file': must be with another split",
    ),
    *(({"policy": "kvzip", "prompt_ids": bad}, "must be a list of token ids") for bad in ("12", (1, -2), (True,), 5)),
    ({"entries": "int3"}, "entries='int3': must be one of model, int8, fp8, rot4, rot3, rot2"),
    ({"budget": 32}, r"budget=32: must be at least window \+ 1 = 33"),
    ({"budget": None}, "budget=None"),
    ({"policy": "cake"}, "no published CAKE temperatures .* give both as options, for instance tau1=1.6, tau2=0.4"),
    ({"backend": "cuda"}, "backend='cuda'"),
]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=1)


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=str)
def test_contract_10_what_does_not_go_together_is_refused_with_the_reason(model, given, said):
    with pytest.raises(ValueError, match=said):
        kvpass.compile(model, **{"budget": 40, **given})
