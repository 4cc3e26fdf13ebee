"""Contract 5: with parity="code", kvpass.plan keeps what the authors' released code kept.

Compared as follows. Scores to 2e-4. Counts per head exactly; in scenarios made of ties, where the reference chose
arbitrarily between equal heads, per layer up to the rounding of the head counts. Nothing dropped scores above something
kept (2e-5). Kept sets exactly, wherever the boundary of a head does not fall inside a group of equal scores.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvpass.cache.plan import Plan, plan
from kvpass.operands import PolicyInputs
from kvpass.policies import resolve
from kvpass.policies.observation import Observation, with_rope
from kvpass.policies.replay import Replayed

SHIPPED = Path(__file__).resolve().parents[1] / "golden"
POLICIES_PAGE = Path(__file__).resolve().parents[2] / "docs" / "which-policy.md"
WHOLE = Path(__file__).resolve().parents[3] / "shared" / "golden"
ROOT = WHOLE if WHOLE.is_dir() else SHIPPED
CASES = sorted(
    p for p in ROOT.glob("*/*.json") if p.parent.name != "inputs" and not p.parent.name.startswith("kvpress")
)
OF_KEYS = ("keydiff", "knorm", "lagkv")
"""Policies whose cases lie a folder deeper, with other parameters: kvpress counts all that a head keeps."""
CRITICAL = ("criticalkv_snapkv", "criticalkv_ada_snapkv")


def cases_of(*folders: str) -> pytest.MarkDecorator:
    """Parametrize a test by cases that lie a folder deeper, but those of OF_KEYS without a budget, or in blocks."""
    found = [path for folder in folders for path in sorted(ROOT.glob(f"{folder}/cases/*.json"))]
    left_out = {path for path in found if path.parents[1].name in OF_KEYS and re.search("_block|authors", path.stem)}
    found = [path for path in found if path not in left_out]
    return pytest.mark.parametrize("path", found, ids=lambda path: f"{path.parents[1].name}-{path.stem}")


POOLS = {"maxpool": "max", "avgpool": "avg", "max": "max", "avg": "avg", None: None}
POLICY_OF = {
    "ada_snapkv_normalized_kvcf": "ada_snapkv",
    **dict.fromkeys(CRITICAL, "criticalkv"),
    **dict.fromkeys(("h2o_prefill", "h2o_decode"), "h2o"),
    "pyramidkv_adakv_repo": "pyramidkv",
    "snapkv_kvcf": "snapkv",
    "streaming_llm_kvcf": "streaming_llm",
    **dict.fromkeys(("vatp_snapkv", "vatp_h2o", "vatp_scissorhands"), "vatp"),
}


def arguments(folder: str, params: dict[str, Any]) -> tuple[str, int, dict[str, object]]:
    """Policy, budget and options of kvpass.plan for one golden case."""
    policy = POLICY_OF.get(folder, folder)
    options: dict[str, object] = {"parity": "code"}
    if "heavy_entries" in params:
        options |= {"window": params["recent_entries"]}
        if policy == "vatp":
            options |= {"sinks": params["sinks_protected"], "indicator": folder.removeprefix("vatp_")}
        return policy, params["heavy_entries"] + params["recent_entries"], options
    names = {"window": "window", "sinks": "sinks", "floor_alpha": "alpha"}
    options |= {ours: params[theirs] for theirs, ours in names.items() if theirs in params}
    if policy not in ("tova", "streaming_llm"):
        options["pool"] = POOLS[params["pool"]]
        if params["kernel"]:
            options["kernel_size"] = params["kernel"]
        if params["gqa"] in ("mean", "max"):
            options["group"] = params["gqa"]
    names = {"pyramid_beta": "beta", "normalize": "normalize"}
    options |= {ours: params[theirs] for theirs, ours in names.items() if params.get(theirs)}
    if policy == "cake":
        options |= {name: params[name] for name in ("gamma", "tau1", "tau2")}
    if folder == "pyramidkv_adakv_repo":
        options["short_uniform"] = False
    return policy, params["budget_total_per_layer_mean"], options


class Case:
    """One golden case, with its inputs in the shapes that kvpass.plan takes."""

    def __init__(self, path: Path) -> None:
        about = json.loads(path.read_text())
        self.folder, self.params, self.about = path.parent.name, about["params"], about
        self.policy, self.budget, self.options = arguments(self.folder, self.params)
        self.ties = about["scenario"].endswith("_ties")
        self.want = load_file(path.with_suffix(".safetensors"))
        x = {k: v.float() for k, v in load_file(ROOT / "inputs" / f"{about['scenario']}.safetensors").items()}
        q, k, v = (x[name].unsqueeze(1) for name in "qkv")
        dq, dk, dv = (x[f"decode_{name}"].unsqueeze(2) for name in "qkv")
        if str(self.params.get("gqa")).startswith("none"):
            group = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
            dk, dv = dk.repeat_interleave(group, 3), dv.repeat_interleave(group, 3)
        self.prompt = q, k, v
        self.decode = (dq, dk, dv) if "decode_keep_mask" in self.want else None


def assert_ordered(name: str, keep: Tensor, scores: Tensor) -> None:
    """In no head does a dropped entry score above a kept one."""
    worst = torch.where(keep, scores, torch.inf).amin(-1)
    best = torch.where(keep, -torch.inf, scores).amax(-1)
    assert (best <= worst * (1 + 2e-5)).all(), name


@pytest.mark.parametrize("path", CASES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_contract_5_parity_with_the_released_code(path):
    case = Case(path)
    want = case.want
    found = plan(case.policy, *case.prompt, budget=case.budget, decode=case.decode, **case.options)
    keep, lengths, scores = found.keep[:, 0], found.lengths[:, 0], found.scores[:, 0].nan_to_num(nan=torch.inf)

    layer_budgets, length = found.layer_budgets[:, 0], keep.shape[2]
    if case.policy == "cake" and length <= case.budget + found.policy.window:  # spared, and recorded as if it were not
        assert bool((layer_budgets == length - found.policy.window).all())
        layer_budgets = torch.full_like(layer_budgets, case.budget - found.policy.window)
    assert torch.equal(layer_budgets, want["layer_budgets"].double())
    if case.ties:
        assert ((lengths.sum(1) - want["head_kept"].sum(1)).abs() <= keep.shape[1]).all()
    else:
        assert torch.equal(lengths, want["head_kept"])
    if "scores" not in want:
        assert torch.equal(keep, want["keep_mask"])
        return
    m = want["scores"].shape[2]
    expected = want["scores"]
    if case.folder == "snapkv_kvcf":
        expected = expected / case.params["window"]
    if case.folder == "pyramidkv_adakv_repo":
        expected = expected * case.params["window"]
    torch.testing.assert_close(scores[..., :m], expected, rtol=2e-4, atol=1e-12)
    assert_ordered("found", keep, scores)
    assert keep[..., m:].all()
    if not case.ties:
        clear = want["cut_lowest_kept"] != want["cut_highest_dropped"]
        assert torch.equal(keep[clear], want["keep_mask"][clear])
    if found.decode_keep is not None and not case.ties and not case.params.get("cache_order_depends_on_tie_breaking"):
        assert torch.equal(found.decode_keep[:, :, 0], want["decode_keep_mask"])


def golden(path: Path) -> tuple[dict[str, Any], dict[str, Any], tuple[Tensor, ...], dict[str, Tensor]]:
    """What a case of kvpress is about, its parameters, q, k and v of the prompt, and what the reference gave."""
    about = json.loads(path.read_text())
    inputs = load_file((path.parent / about["inputs"]).resolve())
    prompt = tuple(inputs[name].float().unsqueeze(1) for name in "qkv")
    return about, about["params"], prompt, load_file(path.with_suffix(".safetensors"))


def budget_of(params: dict[str, Any], prompt: tuple[Tensor, ...]) -> int:
    return max(1, int(prompt[1].shape[3] * (1 - params["compression_ratio"])))


def assert_same_kept(found: Plan, want: dict[str, Tensor]) -> None:
    assert torch.equal(found.lengths[:, 0], want["head_kept"])
    assert torch.equal(found.keep[:, 0], want["keep_mask"])


@cases_of(*OF_KEYS)
def test_contract_5_policies_that_read_no_query_keep_what_kvpress_keeps(path):
    about, params, prompt, want = golden(path)
    names = {"n_sink": "sinks", "lag_size": "lag", "cross_scoring": "cross_scoring"}
    options = {ours: params[theirs] for theirs, ours in names.items() if theirs in params}
    found = plan(about["policy"], *prompt, budget=budget_of(params, prompt), **options)
    keep, scores = found.keep[:, 0], found.scores[:, 0]
    torch.testing.assert_close(scores, want["scores"], rtol=2e-4, atol=1e-6)
    assert torch.equal(found.lengths[:, 0], want["head_kept"])
    clear = want["cut_lowest_kept"] != want["cut_highest_dropped"]
    assert torch.equal(keep[clear], want["keep_mask"][clear])
    worst, best = torch.where(keep, scores, torch.inf).amin(-1), torch.where(keep, -torch.inf, scores).amax(-1)
    assert (best <= worst).all()


def extra_input(path: Path, about: dict[str, Any], name: str) -> Tensor:
    files = [load_file((path.parent / extra).resolve()) for extra in about["extra_inputs"]]
    (found,) = [tensors[name] for tensors in files if name in tensors]
    return found.float()


@cases_of(*CRITICAL)
def test_contract_5_criticalkv_keeps_what_kvpress_and_the_authors_keep(path):
    about, params, prompt, want = golden(path)
    weights = extra_input(path, about, "wo")
    budget = budget_of(params, prompt)
    options = {"base": path.parents[1].name.removeprefix("criticalkv_"), "kernel_size": params["kernel"]}
    options |= {"first_stage": params["first_stage_ratio"], "epsilon": params["epsilon"], "window": params["window"]}
    options |= {"alpha": params["alpha_safeguard"]} if "alpha_safeguard" in params else {}
    found = plan("criticalkv", *prompt, budget=budget, output_weights=weights, **options)
    assert_same_kept(found, want)
    sites = zip(*prompt, weights, strict=True)
    norms = [Observation(q, k, v, 1.0, 0, 0, 1, asked=PolicyInputs(w)).projected_value_norm[0] for q, k, v, w in sites]
    torch.testing.assert_close(torch.stack(norms), want["value_output_norm"], rtol=2e-4, atol=0)


@cases_of("defensivekv")
def test_contract_5_defensivekv_keeps_what_the_authors_keep(path):
    about, params, prompt, want = golden(path)
    policy = "layer_defensivekv" if path.stem.endswith("_layers") else "defensivekv"
    budget = round(prompt[1].shape[3] * (1 - params["compression_ratio"]) - 0.5 + 1e-6)
    options = {"kernel_size": params["kernel"], "window": params["window"], "parity": "code"}
    found = plan(policy, *prompt, budget=budget, output_weights=extra_input(path, about, "wo"), **options)
    assert_same_kept(found, want)
    m = prompt[1].shape[3] - params["window"]
    torch.testing.assert_close(found.scores[:, 0, :, :m], want["scores"][..., :m], rtol=2e-4, atol=0)


@cases_of("expected_attention")
def test_contract_5_expected_attention_keeps_what_kvpress_keeps(path):
    about, params, prompt, want = golden(path)
    frequencies = extra_input(path, about, "inv_freq")
    layers, length = prompt[1].shape[0], prompt[1].shape[3]
    options = {"n_future": params["n_future_positions"], "sinks": params["n_sink"], "epsilon": params["epsilon"]}
    options |= {"covariance": params["use_covariance"], "value_norm": params["use_vnorm"]}
    if params["head_split"] != "uniform":
        options |= {"head_split": "adaptive", "alpha": params["alpha_safeguard"]}
    budget = budget_of(params, prompt)
    turns = frequencies.expand(layers, -1)
    found = plan("expected_attention", *prompt, budget=budget, rope_frequencies=turns, **options)
    torch.testing.assert_close(found.scores[:, 0], want["scores"], rtol=2e-4, atol=1e-9)
    assert_same_kept(found, want)
    for layer, (q, k, v) in enumerate(zip(*prompt, strict=True)):
        obs = Observation(q, k, v, 1.0, 0, 0, 1, asked=PolicyInputs(frequencies=frequencies))
        queries = torch.cat([obs.unrotated_queries(head, params["n_sink"])[0] for head in range(k.shape[1])])
        mean = queries.mean(1)
        torch.testing.assert_close(mean, want["query_mean"][layer], rtol=2e-4, atol=2e-6)
        if "query_cov" in want:
            covariance = torch.stack([x.T.cov(correction=0) for x in queries])
            torch.testing.assert_close(covariance, want["query_cov"][layer], rtol=2e-4, atol=2e-5)
        future = torch.arange(length, length + params["n_future_positions"])
        ahead = with_rope(mean, *(part.mean(0) for part in obs.rotation(future)))
        torch.testing.assert_close(ahead, want["query_mean_rotated"][layer], rtol=2e-4, atol=2e-6)


def replays_of(path: Path, about: dict[str, Any], sinks: int) -> list[Replayed]:
    """What a reconstruction pass produces, chunk by chunk, beside at most so many first entries."""
    (file,) = [path.parent / extra for extra in about["extra_inputs"] if "__replay" in extra]
    rows = load_file(file.resolve())
    q, k = rows["replay_q"].float().unsqueeze(1), rows["replay_k"].float().unsqueeze(1)
    norms = rows["hidden_norm"].unsqueeze(1)
    found = []
    for chunk in json.loads(file.resolve().with_suffix(".json").read_text())["chunks"]:
        own = slice(chunk["first_row"], chunk["first_row"] + chunk["rows"])
        kept = min(sinks, chunk["start"])
        found.append(Replayed(chunk["start"], chunk["end"], kept, q[..., own, :], k[..., own, :], norms[..., own]))
    return found


@cases_of("kvzip")
def test_contract_5_kvzip_keeps_what_kvpress_keeps(path):
    about, params, prompt, want = golden(path)
    sinks = params["n_sink"]
    budget = round(prompt[1].shape[3] * (1 - params["compression_ratio"]), 6)
    assert budget == int(budget)
    options = {"sinks": sinks, "split": "heads" if params["layerwise"] else "layers"}
    given = {"replays": replays_of(path, about, sinks)}
    if params["kvzip_plus"]:
        given["output_weights"] = extra_input(path, about, "wo")
    found = plan("kvzip_plus" if params["kvzip_plus"] else "kvzip", *prompt, budget=int(budget), **given, **options)
    assert_same_kept(found, want)
    torch.testing.assert_close(found.scores[:, 0, :, sinks:], want["scores"][..., sinks:], rtol=2e-4, atol=1e-9)


@cases_of("kvzip")
def test_contract_5_kvzip_scores_as_its_authors_who_keep_one_entry_fewer(path):
    """Their rules "pair", all heads and layers, and "uniform", each head; the prefix stays and is in every softmax.

    They have no KVzip+: beside those cases are scores without norms, too.
    """
    about, params, prompt, want = golden(path)
    prefix, ratio = params["prefix_length"], 1 - params["compression_ratio"]
    given = {"replays": replays_of(path, about, prefix), "sinks": prefix}
    each = int((prompt[1].shape[3] - prefix) * ratio)
    alone = plan("kvzip", *prompt, budget=prefix + each, split="none", **given)
    torch.testing.assert_close(alone.scores[:, 0, :, prefix:], want["authors_scores"], rtol=2e-4, atol=1e-9)
    assert alone.keep[..., :prefix].all()
    assert torch.equal(alone.keep[:, 0, :, prefix:], want["authors_keep_uniform"])
    if each == (prompt[1].shape[3] - prefix) * ratio:
        together = plan("kvzip", *prompt, budget=prefix + each, **given).keep[:, 0, :, prefix:]
        assert not (want["authors_keep_pair"] & ~together).any()
        assert (together & ~want["authors_keep_pair"]).sum() == 1


@cases_of("r_kv")
def test_contract_5_r_kv_keeps_what_the_authors_keep_of_a_prompt_and_after_every_token(path):
    about, params, prompt, want = golden(path)
    decode = tuple(extra_input(path, about, f"decode_{name}").unsqueeze(2) for name in "qkv")
    options = {"importance": params["mix_lambda"], "threshold": params["similarity_threshold"], "parity": "code"}
    options |= {"kernel_size": params["kernel"], "window": params["window"], "buffer": params["divide_length"]}
    found = plan("r_kv", *prompt, budget=params["budget"], decode=decode, **options)
    assert torch.equal(found.keep[:, 0], want["keep_mask"])
    assert torch.equal(found.decode_keep[:, :, 0], want["decode_keep_mask"])
    if "scores" in want:
        torch.testing.assert_close(found.scores[:, 0, :, : -params["window"]], want["scores"], rtol=0, atol=1e-6)


@cases_of("triattention")
def test_contract_5_triattention_keeps_what_the_authors_keep(path, tmp_path):
    about, params, prompt, want = golden(path)
    real, imaginary, modulus = (
        extra_input(path, about, name).unflatten(1, (prompt[1].shape[2], -1))
        for name in ("q_mean_real", "q_mean_imag", "q_abs_mean")
    )
    save_file({"query_mean": torch.cat([real, imaginary], -1), "query_modulus": modulus}, tmp_path / "statistics")
    turns = extra_input(path, about, "inv_freq").expand(prompt[1].shape[0], -1)
    options = {"aggregate": params["score_aggregation"], "group": params["group_aggregation"], "parity": "code"}
    options |= {"longest": params["offset_max_length"], "statistics": str(tmp_path / "statistics")}
    budget = budget_of(params, prompt)
    found = plan("triattention", *prompt, budget=budget, rope_frequencies=turns, **options)
    assert torch.equal(found.keep[:, 0], want["keep_mask"])
    largest = float(want["scores"].abs().max())
    torch.testing.assert_close(found.scores[:, 0], want["scores"], rtol=0, atol=1e-3 * largest)
    own = plan("triattention", *prompt, budget=budget, rope_frequencies=turns, **options | {"statistics": None})
    torch.testing.assert_close(own.scores[:, 0], want["scores"], rtol=0, atol=1e-3 * largest)


STAGED = [p for p in CASES if p.parent.name in ("cake", "lava") and not p.stem.endswith("_once")]


@pytest.mark.parametrize("path", STAGED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_contract_5_layer_weights_and_budgets_at_every_stage_of_the_cascade(path):
    case = Case(path)
    policy = resolve(case.policy, **case.options)
    q, k, v = case.prompt
    layers, _, kv_heads, length, dim = k.shape
    weights = torch.zeros(1, layers, dtype=torch.float64)
    entries, available = torch.tensor([case.budget - policy.window]), torch.tensor([length - policy.window])
    whole = policy.name == "cake" and length <= case.budget + policy.window
    for layer in range(layers):
        obs = Observation(q[layer], k[layer], v[layer], dim**-0.5, policy.window, layer, layers)
        weights[:, layer] = policy.layer_weight(obs, policy.score(obs))
        if not whole:
            budgets = policy.layer_budgets(weights, entries, available, kv_heads, layer + 1)
            assert torch.equal(budgets[0, : layer + 1], case.want["budget_after_stage"][layer, : layer + 1] * kv_heads)
    name = "preference" if policy.name == "cake" else "entropy_normalised"
    torch.testing.assert_close(weights[0], case.want[name].double(), rtol=2e-4, atol=0)


def test_the_policies_page_gives_the_number_of_shipped_cases_of_every_published_policy():
    shipped = [path for path in SHIPPED.glob("*/*.json") if path.parent.name != "inputs"]
    second = [*SHIPPED.glob("*/cases/*.json")]
    cases = Counter(POLICY_OF.get(path.parent.name, path.parent.name) for path in shipped)
    folders = [path.parents[1].name + "_plus" * path.stem.endswith("_plus") for path in second]
    cases += Counter(POLICY_OF.get(folder, folder) for folder in folders)
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", POLICIES_PAGE.read_text(), re.MULTILINE)
    assert cases == {policy: int(count) for policy, count in rows}
    assert f"{len(shipped) + len(second)} files in `tests/golden`" in POLICIES_PAGE.read_text()
    formulas = [path for path in shipped if not json.loads(path.read_text())["produced_by_running_reference_code"]]
    assert sorted(path.parent.name for path in formulas) == ["lava", "lava_nohead", "vatp_snapkv", "vatp_snapkv"]
    assert cases.keys() == {
        *("lava", "lava_uniform", "lava_pyramid", "lava_nohead", "snapkv", "pyramidkv", "ada_snapkv"),
        *("ada_pyramidkv", "cake", "h2o", "tova", "streaming_llm", "vatp", "criticalkv", "defensivekv"),
        *("expected_attention", "kvzip", "kvzip_plus", "r_kv", "triattention", *OF_KEYS),
    }
    assert sum(p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()) <= 3_400_000
