"""Ways in which torch or a library runs a model without the captured graph: an error, never an uncompressed answer."""

import functools
import itertools
import types

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import kvpass
from numeric_checks import assert_close
from pairwise import quick, quick_rows
from small_decoders import raw_decoder
from tiny_models import compiled_once, random_ids, tiny_model

OPTIONS = {"budget": 24, "window": 8, "backend": "eager"}
NOT_RUN = "the captured graph did not run"


@pytest.mark.parametrize("policy", quick(["lava", "h2o"], ["h2o"]))
def test_a_stance_that_runs_the_decoder_eagerly_is_an_error(policy):
    """Nothing ran, so a cache of a policy that evicts is not called interrupted either."""
    fast = kvpass.compile(tiny_model("llama", layers=1), policy=policy, **OPTIONS)
    ids = random_ids(1, 60)
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=NOT_RUN):
        fast(ids)
    cache = fast(ids).past_key_values
    for new in (random_ids(1, 1, seed=1), random_ids(1, 5, seed=2)):
        expected = fast(new, past_key_values=cache.clone()).logits
        with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=NOT_RUN):
            fast(new, past_key_values=cache)
        assert not cache.interrupted and cache.columns == 60
        with torch.compiler.set_stance("eager_on_recompile"):
            assert torch.equal(fast(new, past_key_values=cache.clone()).logits, expected)


def test_a_first_step_that_is_not_captured_leaves_the_cache_as_it_was():
    fast, last = kvpass.compile(tiny_model("llama", layers=1), **OPTIONS), {"logits_to_keep": 1}
    cache = fast(random_ids(1, 60)).past_key_values
    before = cache.clone()
    for tokens in (1, 2):
        new = random_ids(1, tokens, seed=1)
        with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match=NOT_RUN):
            fast(new, past_key_values=cache, **last)
        assert cache.columns == 60
    assert torch.equal(*(fast(new, past_key_values=each, **last).logits for each in (cache, before)))


CONFIG = {"automatic_dynamic_shapes": True, "assume_static_by_default": True}  # torch 2.13 leaves them changed


def test_code_that_another_backend_or_none_compiles_is_an_error():
    fast = kvpass.compile(tiny_model("llama", layers=1), **OPTIONS)
    for elsewhere, said in (
        (torch.compiler.set_stance("default", force_backend="eager"), NOT_RUN),
        (torch._dynamo.config.patch(CONFIG | {"disable": True}), f"{NOT_RUN}|no compiled frames"),
    ):
        with elsewhere, pytest.raises(RuntimeError, match=said):
            fast(random_ids(1, 60))
    assert fast(random_ids(1, 60)).past_key_values.columns == 60


WRAPPERS = ("model", "forward", "nn.Module.compile")


@pytest.mark.parametrize(
    ("wrapper", "fullgraph"),
    quick_rows([*itertools.product(WRAPPERS, [False, True])], [("model", True), ("forward", False)]),
)
def test_torch_compile_around_a_compiled_model_changes_nothing(wrapper, fullgraph):
    model, plain = compiled_once("llama", layers=1, **OPTIONS)
    fast = kvpass.compile(model, **OPTIONS)
    call, options = fast, {"backend": "eager", "fullgraph": fullgraph}
    if wrapper == "model":
        call = torch.compile(fast, **options)
    elif wrapper == "forward":
        fast.forward = torch.compile(fast.forward, **options)
    else:
        fast.compile(**options)
    ids, token = random_ids(1, 60), random_ids(1, 1, seed=1)
    try:
        cache = call(ids).past_key_values
    except torch._dynamo.exc.Unsupported as refused:
        assert fullgraph and "call the model as it is, without torch.compile" in str(refused)
        return
    assert isinstance(cache, kvpass.CompressedCache)
    expected = plain(token, past_key_values=plain(ids).past_key_values).logits
    assert torch.equal(call(token, past_key_values=cache).logits, expected)


# -- forward set on the instance ---------------------------------------------------------------------------------------


def forward_compiled_twice(model):
    for _ in range(2):
        model.forward = torch.compile(model.forward, backend="eager")


def hooks_taken_off_again(model):
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    remove_hook_from_submodules(model)


def hooks_that_move_nothing(model):
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


def compiled_layer_forwards(model):
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="eager")
        layer.mlp.compile(backend="eager")


OFTEN = [hooks_that_move_nothing, compiled_layer_forwards]


@pytest.mark.parametrize("change", quick([*OFTEN, forward_compiled_twice, hooks_taken_off_again], OFTEN))
def test_a_replaced_forward_that_changes_nothing_is_left_out_of_the_copy(change):
    model = tiny_model("llama", layers=1)
    _, plain = compiled_once("llama", layers=1, **OPTIONS)
    change(model)
    before = dict(model.__dict__)
    fast = kvpass.compile(model, **OPTIONS)
    ids, token = random_ids(1, 60), random_ids(1, 1, seed=1)
    caches = [one(ids).past_key_values for one in (fast, plain)]
    assert all(isinstance(cache, kvpass.CompressedCache) for cache in caches)
    logits = [one(token, past_key_values=cache).logits for one, cache in zip((fast, plain), caches, strict=True)]
    assert torch.equal(*logits)
    assert model.__dict__ == before, "the user's model keeps what was set on it"
    assert_close("original", model(ids, use_cache=False).logits, plain(ids, use_cache=False).logits, atol=1e-4)


def offloaded_to_the_host(model):
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def on_another_device(model):
    with FakeTensorMode():  # as it is with a build of torch for that device
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = torch.nn.Parameter(torch.empty(weight.shape, device="mps"))
            for name, buffer in module._buffers.items():
                module._buffers[name] = torch.empty(buffer.shape, device="mps")


def own_forward(model):
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)


def own_method(model):
    def forward(self, *args, **kwargs):
        return type(self).forward(self, *args, **kwargs)

    model.forward = types.MethodType(forward, model)


HEAD_IS_AWAY = r"are on cpu, meta: 1 of \d+ are not on cpu, the first is lm_head.weight on meta"
REPLACED = "forward of this LlamaForCausalLM was replaced on the instance"
CHANGES = {
    "no weights": (lambda m: m.to("meta"), "weights of LlamaForCausalLM are on .*meta.*one device in device_map"),
    "a head without weights": (lambda m: m.lm_head.to("meta"), HEAD_IS_AWAY),
    "offloaded": (offloaded_to_the_host, "12 of 14 are not on cpu, .* offloaded by accelerate.*quantised .*tensor-par"),
    "another device": (on_another_device, "LlamaForCausalLM are on mps:0: kvpass runs on CPUs and CUDA devices"),
    "a hook": (
        lambda m: add_hook_to_module(m.model.layers[0], ModelHook()),
        r"model\.layers\.0 has the accelerate hook ModelHook",
    ),
    "a forward": (own_forward, REPLACED),
    "a method": (own_method, REPLACED),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_replaced_forward_that_may_change_something_is_refused(name):
    model = tiny_model("llama", layers=1)
    change, message = CHANGES[name]
    change(model)
    with pytest.raises(ValueError, match=message) as refused:
        kvpass.compile(model, **OPTIONS)
    assert "\n" not in str(refused.value)


def timed(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def calling_a_global(*args, **kwargs):
    return ORIGINAL(*args, **kwargs)  # noqa: F821  # set by a test


WRAPS = {"timer": timed, "mode": torch.inference_mode(), "partial": functools.partial}


@pytest.mark.parametrize("name", quick([*WRAPS], ["timer"]))
def test_a_wrapped_generate_calls_that_of_the_copy(name):
    model, plain = tiny_model("llama", layers=1), compiled_once("llama", layers=1, **OPTIONS)[1]
    model.generate = WRAPS[name](model.generate)
    model.model.layers[0].mlp.forward = timed(model.model.layers[0].mlp.forward)
    fast, before = kvpass.compile(model, **OPTIONS), model.generate
    ids, call = random_ids(1, 60), {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(fast.generate(ids, budget=20, **call), plain.generate(ids, budget=20, **call))
    fast.model.layers[0].mlp.up_proj = torch.nn.Linear(*fast.model.layers[0].mlp.up_proj.weight.T.shape, bias=False)
    assert not torch.equal(fast(ids).logits, plain(ids).logits), "the layer of the copy is called"
    assert model.generate is before and not torch.equal(model(ids).logits, fast(ids).logits)


def test_a_function_that_calls_the_original_by_another_name_is_refused(monkeypatch):
    model = tiny_model("llama", layers=1)
    monkeypatch.setitem(globals(), "ORIGINAL", model.generate)
    holder = types.SimpleNamespace(original=model.generate)
    functions = {"ORIGINAL": calling_a_global, "holder": lambda *args, **kwargs: holder.original(*args, **kwargs)}
    for reach, model.generate in functions.items():
        with pytest.raises(ValueError, match=f"generate was replaced on the instance .* calls this model by '{reach}'"):
            kvpass.compile(model, **OPTIONS)


def test_a_layer_that_is_divided_as_transformers_divides_none_is_refused(tmp_path):
    model = tiny_model("llama", num_hidden_layers=2)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        projection = model.model.layers[1].self_attn.q_proj
        projection.weight = torch.nn.Parameter(distribute_tensor(projection.weight, mesh, [Shard(1)]))
        said = r"model.layers.1.self_attn.q_proj is divided .* as 'colwise' .*'weight': 1"
        with pytest.raises(ValueError, match=said):
            kvpass.compile(model, **OPTIONS)
    finally:
        torch.distributed.destroy_process_group()


# -- raw modules -------------------------------------------------------------------------------------------------------


def test_no_session_under_a_stance_that_may_run_modules_eagerly_and_generate_notices_a_step_that_ran_so():
    (_, compiled), steps = raw_decoder(), []
    for stance in ("force_eager", "eager_on_recompile", "eager_then_compile"):
        with torch.compiler.set_stance(stance):
            with pytest.raises(RuntimeError, match="default stance"), kvpass.session():
                pass
            with pytest.raises(RuntimeError, match="default stance"):
                kvpass.generate(compiled, random_ids(1, 40), max_new_tokens=3, positions=True)

    def changing(ids, positions):
        steps.append(ids)
        if len(steps) < 2:
            return compiled(ids, positions)
        with torch.compiler.set_stance("force_eager"):
            return compiled(ids, positions)

    with pytest.raises(RuntimeError, match="ran no graph of kvpass"):
        kvpass.generate(changing, random_ids(1, 40), max_new_tokens=3, positions=True)
    assert len(steps) == 2
