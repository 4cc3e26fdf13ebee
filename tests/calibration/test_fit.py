"""``kvpass.calibrate``: y against a brute force, the fit against another solver."""

import copy

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import kvpass
from command_line import invoke
from eval_models import model_folder
from kvpass.calibration import fit
from kvpass.calibration.texts import generated_texts
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from tiny_models import random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("compile_once")
PIECE = fit.Piece([3, 4, 5], random_ids(1, 30, seed=1)[0].tolist(), [9, 8])


class Letters:
    """A tokenizer of one token a character."""

    chat_template = None
    bos_token_id = 1

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(char) % 120 + 3 for char in text]}


class Chat(Letters):
    chat_template = "one"

    def apply_chat_template(self, messages, **_: object) -> str:
        return f"<user>{messages[0]['content']}<answer>"


def layers_of(model, *pieces: fit.Piece) -> list[list[fit._Layer]]:
    with fit._observed(model) as run:
        return [run(piece) for piece in pieces]


def brute_force(model, piece: fit.Piece) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What enters attention, y and maxima, by token, from transformers' attention weights and cached values."""
    n, first, found = len(piece.prompt), piece.first, []
    entered: list[Tensor] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, given: entered.append(given["hidden_states"][0]), with_kwargs=True
        )
    with torch.no_grad():
        ids = torch.tensor([piece.prompt + piece.request + piece.prompt[first:]])
        out = model(ids, output_attentions=True, use_cache=True)
        for layer, (attention, x) in enumerate(zip(out.attentions, entered, strict=True)):
            values = out.past_key_values.layers[layer].values[0]
            if values.shape[1] < n:
                continue  # a sliding window
            weight, heads = model.model.layers[layer].self_attn.o_proj.weight, attention.shape[1]
            dim, group = values.shape[2], heads // len(values)
            y, most = torch.full((n - first, len(values)), -torch.inf), torch.zeros(len(values))
            for head in range(heads):
                for i in range(first, n):
                    worth = (weight[:, head * dim : (head + 1) * dim] @ values[head // group, i]).norm()
                    paid = (attention[0, head, n:, i] * worth / x[n:].norm(dim=-1)).max().log()
                    y[i - first, head // group] = torch.maximum(y[i - first, head // group], paid)
                    most[head // group] = torch.maximum(most[head // group], attention[0, head, n:, i].max())
            found.append((x[first:n], y, most))
    return found


@pytest.mark.parametrize("family", quick(["llama", "olmo2", "gpt_oss"], ["gpt_oss"]))
def test_y_is_the_most_that_the_repetition_pays(family):
    """olmo2 does not normalise what enters attention; gpt_oss has sinks, and a first layer with a sliding window."""
    wanted = brute_force(tiny_model(family, attn_implementation="eager", layers=2), PIECE)
    (found,) = layers_of(tiny_model(family, layers=2), PIECE)
    for layer, (x, y, most) in zip(found, wanted, strict=True):
        assert_close("x", layer.x.float(), x, atol=1e-5, rtol=1e-4)
        assert_close("y", layer.y.float(), y, atol=1e-3, rtol=1e-4)
        assert_close("maxima", layer.most.float(), most, atol=1e-5, rtol=1e-4)
    assert len(found) == (1 if family == "gpt_oss" else 2)


def test_the_maps_are_those_of_least_squares_and_r2_is_of_other_texts():
    model, texts = tiny_model("llama", layers=2), [text[:200] for text in generated_texts(words=60, rounds=2)]
    made = kvpass.calibrate(model, Letters(), texts=texts, tokens=90, ridge=2.0)
    pieces = fit._pieces(Letters(), texts, 90)
    fitted = [piece for number, piece in enumerate(pieces) if number % 4 != 3]
    every = layers_of(model, *fitted, *pieces[3::4])
    seen, other = every[: len(fitted)], every[len(fitted) :]
    assert made.fitted == sum(len(piece.prompt) - piece.first for piece in fitted)
    for layer in range(2):
        x, y = (torch.cat([run[layer][part] for run in seen]) for part in (0, 1))
        x, y, mean_x, mean_y = x - x.mean(0), y - y.mean(0), x.mean(0), y.mean(0)
        stacked = torch.cat([x, 2.0**0.5 * torch.eye(x.shape[1], dtype=x.dtype)])  # ridge as further rows
        wanted = torch.linalg.lstsq(stacked, torch.cat([y, y.new_zeros(x.shape[1], y.shape[1])])).solution.T
        torch.testing.assert_close(made.weight[layer], wanted, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(made.bias[layer], mean_y - wanted @ mean_x, atol=1e-6, rtol=1e-5)
        x, y = (torch.cat([run[layer][part] for run in other]) for part in (0, 1))
        error = (y - x @ made.weight[layer].T - made.bias[layer]).square().sum(0)
        torch.testing.assert_close(made.r2[layer], 1 - error / (y - y.mean(0)).square().sum(0))
    best = torch.zeros(2, 2)
    for run in seen:
        y = torch.stack([layer.y.T for layer in run])
        threshold = y.flatten().sort(descending=True).values[y.numel() // 4]
        best += (y > threshold).sum(2) / (y > threshold).sum() / len(seen)
    torch.testing.assert_close(made.head_shares.float(), best, atol=1e-2, rtol=0)


@torch.no_grad()
def before_rope(model, piece: fit.Piece, names: tuple[str, str]) -> list[tuple[Tensor, Tensor]]:
    """Queries and keys of the text in each layer, complex ``[heads, N, D / 2]``, by modules before RoPE."""
    made: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(lambda _, args, out, name=name: made[name].append(out))
        for layer in model.model.layers
        for name in names
    ]
    model(torch.tensor([piece.prompt]))
    for hook in hooks:
        hook.remove()
    dim = model.model.layers[0].self_attn.head_dim
    found = ([x[0].reshape(len(piece.prompt), -1, dim)[piece.first :].transpose(0, 1) for x in made[n]] for n in names)
    return [tuple(torch.complex(*x.double().chunk(2, -1)) for x in layer) for layer in zip(*found, strict=True)]


BEFORE_ROPE = [("llama", ("q_proj", "k_proj")), ("qwen3", ("q_norm", "k_norm"))]


@pytest.mark.parametrize(("family", "names"), quick_rows(BEFORE_ROPE, BEFORE_ROPE[:1]))
def test_distances_are_those_by_complex_numbers_before_rope(family, names):
    model = tiny_model(family, layers=2)
    (found,) = layers_of(model, PIECE)
    speeds = model.model.rotary_emb.inv_freq.double()
    for layer, (q, k) in zip(found, before_rope(model, PIECE, names), strict=True):
        heads, dim = len(q), 2 * len(speeds)
        for head in range(len(k)):
            wanted = 0.0
            for query in q.mean(1)[head * heads // len(k) :][: heads // len(k)]:
                asking, key = query * torch.polar(torch.ones_like(speeds), 499 * speeds), k[head].mean(0)
                turned = [key * torch.polar(torch.ones_like(speeds), at * speeds) for at in range(500)]
                logits = torch.stack([(asking * one.conj()).sum().real / dim**0.5 for one in turned])
                shares = [a * (500 - at) / 500 for at, a in enumerate(logits.softmax(0).tolist())]
                wanted += sum(shares) / (heads // len(k))
            assert float(layer.queries.distances[head]) == pytest.approx(wanted, abs=1e-5)


def test_statistics_are_of_all_fitted_tokens_and_numbers_of_heads_are_means_of_texts():
    model, texts = tiny_model("llama", layers=2), [text[:150] for text in generated_texts(words=60, rounds=2)]
    made = kvpass.calibrate(model, Letters(), texts=texts, tokens=90)
    fitted = [piece for number, piece in enumerate(fit._pieces(Letters(), texts, 90)) if number % 4 != 3]
    assert len({len(piece.prompt) for piece in fitted}) > 1, "tokens count, not texts"
    runs = layers_of(model, *fitted)
    every = [before_rope(model, piece, ("q_proj", "k_proj")) for piece in fitted]
    for layer in range(2):
        q = torch.cat([one[layer][0] for one in every], 1)
        rows, heads = torch.cat([q.real, q.imag], -1), len(q)
        found = {name: x[layer].flatten(0, 1) for name, x in made.queries.items() if name.startswith("query")}
        torch.testing.assert_close(found["query_mean"], rows.mean(1), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found["query_modulus"], q.abs().mean(1), atol=1e-5, rtol=1e-4)
        spread = torch.stack([torch.cov(rows[head].T, correction=0) for head in range(heads)])
        torch.testing.assert_close(found["query_covariance"], spread, atol=1e-5, rtol=1e-4)
        of_texts = [run[layer] for run in runs]
        most = sum(one.most for one in of_texts) / len(runs)
        torch.testing.assert_close(made.head_maxima[layer], most)
        distances = sum(one.queries.distances for one in of_texts) / len(runs)
        torch.testing.assert_close(made.queries["head_distances"][layer], distances)


def test_a_file_serves_its_model_in_other_dtypes_and_no_other_model(tmp_path):
    model, path = tiny_model("llama", layers=1), tmp_path / "kvzap.safetensors"
    before = model.config._attn_implementation
    made = kvpass.calibrate(model, Chat(), texts=generated_texts(words=100, rounds=1), tokens=64)
    made.save(path)
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    with safe_open(path, "pt") as file:
        told = file.metadata()
        assert torch.equal(file.get_tensor("r2"), made.r2.float())
        assert torch.equal(file.get_tensor("head_maxima"), made.head_maxima.float())
    assert (told["kvpass_model"], told["kvpass_texts"]) == (made.model, made.texts)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    own, others = (kvpass.compile(one, policy="full", backend="eager") for one in (model.bfloat16(), other))
    served = [
        ("kvzap", {"weights": str(path)}),
        ("kvzap", {"weights": str(path), "split": "file"}),
        ("duo_attention", {"head_map": str(path), "sinks": 2}),
        ("duo_attention", {"head_map": str(path), "rule": "distances", "sinks": 2}),
        ("expected_attention", {"statistics": str(path)}),
        ("triattention", {"statistics": str(path)}),
        ("lava", {"decode_policy": "triattention", "decode_statistics": str(path), "decode_window": 4}),
    ]
    for policy, options in served:
        own.set_policy(policy, 20, window=4, **options)
        assert int(own.compress(random_ids(1, 50)).lengths.sum()) == 2 * 20
        reader = options.get("decode_policy", policy)
        with pytest.raises(ValueError, match=f"'{reader}' was given a file that was made for another model"):
            kvpass.compile(other, policy=policy, budget=20, window=4, backend="eager", **options)
        with pytest.raises(ValueError, match="made for another model"):
            others.set_policy(policy, 20, window=4, **options)


def test_a_model_whose_rotary_embedding_is_not_found_has_no_statistics_of_queries(tmp_path):
    model, path = tiny_model("phi", layers=1), tmp_path / "kvzap.safetensors"
    with pytest.warns(UserWarning, match="no statistics of queries and no head_distances: .*rotary embedding"):
        kvpass.calibrate(model, Letters(), texts=generated_texts(words=50, rounds=1), tokens=64).save(path)
    assert not [name for name in load_file(path) if name.startswith(("query", "head_distances"))]
    fast = kvpass.compile(model, policy="full", backend="eager")
    for policy, options in (("kvzap", {"weights": str(path)}), ("duo_attention", {"head_map": str(path), "sinks": 2})):
        fast.set_policy(policy, 20, window=4, **options)
        assert int(fast.compress(random_ids(1, 50)).lengths.sum()) == 2 * 20
    with pytest.raises(ValueError, match="holds no head_distances"):
        fast.set_policy("duo_attention", 20, window=4, head_map=str(path), rule="distances")
    with pytest.raises(ValueError, match="lacks query_mean or query_modulus, which"):
        fast.set_policy("triattention", 20, statistics=str(path))


def test_pieces_have_the_chat_template_around_them_and_generated_texts_are_the_same_in_every_run():
    (piece, last), text = fit._pieces(Chat(), ["x" * 70], 50), Letters()("x")["input_ids"]
    assert (piece.text, last.text) == (text * 50, text * 20)
    assert piece.header == Letters()("<user>")["input_ids"]
    assert piece.request == Letters()("\n\nRepeat the previous context exactly.<answer>")["input_ids"]
    assert piece.first == len(piece.header) == 6
    (plain,) = fit._pieces(Letters(), ["x" * 50, "x" * 5], 50)
    assert (plain.header, plain.first) == ([1], 4)
    texts = generated_texts()
    assert texts == generated_texts() and len(set(texts)) == 25
    assert sum(map(len, texts)) < 1 << 20


def test_contract_10_what_cannot_be_fitted_is_refused():
    model = tiny_model("llama", layers=1)
    for subject, options, said in (
        (model, {"texts": ["too short"]}, "0 pieces of 1000 tokens; at least 4"),
        (model, {"ridge": 0}, "ridge=0"),
        (model, {"tokens": 5}, "tokens=5"),
        (kvpass.compile(model, policy="full", backend="eager"), {}, "compiled by kvpass"),
    ):
        with pytest.raises(ValueError, match=said):
            kvpass.calibrate(subject, Letters(), **options)


def test_a_file_of_the_command_is_an_option_of_the_policy(tmp_path):
    """The command ``kvpass calibrate``; bad input is one line."""
    folder, output = tmp_path / "texts", tmp_path / "made" / "kvzap.safetensors"
    folder.mkdir()
    for number, text in enumerate(generated_texts(words=40, rounds=1)):
        (folder / f"{number}.txt").write_text(text)
    call = ["calibrate", model_folder(), "--output", output, "--texts", folder, "--tokens", "48"]
    made = invoke(*call)
    assert made.exit_code == 0, made.output
    assert "R2 " in made.output and f"written: {output}, {output.stat().st_size} bytes" in made.output.replace("\n", "")
    spec = f"kvzap:weights={output},window=8"
    how = "--budgets 64 --samples 1 --scope context --length 256 --backend eager"
    scored = invoke("eval", model_folder(), "--policies", spec, *how.split(), "--output", tmp_path / "eval")
    assert scored.exit_code == 0 and "kvzap" in scored.output, scored.output
    (folder / "0.txt").write_bytes(b"\xff")
    refused = invoke(*call)
    assert refused.exit_code == 2 and "is no UTF-8 text" in refused.output
