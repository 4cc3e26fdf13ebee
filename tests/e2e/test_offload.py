"""Models of which accelerate keeps weights on the host; here the device that computes is the CPU too."""

from __future__ import annotations

import accelerate
import pytest
import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from torch.fx import Graph, GraphModule

import kvpass
from kvpass import host_weights
from kvpass.graphs.host_weights import take_host_weights_pass
from kvpass.graphs.split import CannotSplitError, split_graph
from kvpass.host_weights import HostCopies
from pairwise import quick_rows
from tiny_models import FAMILIES, compiled_once, random_ids, tiny_model

OPTIONS = {"budget": 24, "window": 8, "backend": "eager", "prefill_block": 32}
CPU = torch.device("cpu")


def offloaded(family, **changes):
    model = tiny_model(family, **changes)
    accelerate.cpu_offload(model, execution_device=CPU)
    return model


def partly_offloaded(**changes):
    """The second layer and the head on the host, the rest on the device."""
    model = tiny_model("llama", **changes)
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    for module in (model.model.layers[1], model.lm_head):
        remove_hook_from_submodules(module)
        attach_align_device_hook(module, CPU, offload=True)
    return model


def answers(model, ids, mask):
    """Logits of a prompt, a token and a second turn, and generated tokens."""
    said = [model(ids, attention_mask=mask)]
    cache = said[0].past_key_values
    said += [model(random_ids(len(ids), tokens, seed=tokens), past_key_values=cache) for tokens in (1, 1, 5)]
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    return [one.logits for one in said], tokens


LLAMA = [
    {"policy": "h2o"},
    {"policy": "tova"},
    {"policy": "cake", "tau1": 1.6, "tau2": 0.4},
    {"policy": "criticalkv"},
    {"backend": "inductor"},
]
"""Policies that evict while decoding or read a weight, and compiled code."""


@pytest.mark.parametrize(
    ("family", "options"),
    quick_rows([*((family, {}) for family in FAMILIES), *(("llama", options) for options in LLAMA)], [("gemma3", {})]),
    ids=str,
)
def test_a_model_with_weights_on_the_host_gives_what_it_gives_without(family, options):
    fast = kvpass.compile(offloaded(family, layers=2), **{**OPTIONS, **options})
    _, plain = compiled_once(family, layers=2, **{"budget": 24, "window": 8, **options, "backend": "eager"})
    rows = 1 if family in {"gpt2", "opt"} else 2
    ids, mask = random_ids(rows, 100), torch.ones(rows, 100, dtype=torch.int64)
    if rows > 1:
        mask[0, :7] = 0
    (expected, tokens), (logits, found) = answers(plain, ids, mask), answers(fast, ids, mask)
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    assert torch.equal(found, tokens)


def test_each_weight_is_copied_once_a_call_into_two_buffers(monkeypatch):
    """Whatever the number of blocks; what is on the device is shared, and the user's model still works."""
    model = partly_offloaded(layers=2)
    expected = model(random_ids(1, 100), use_cache=False).logits
    fast = kvpass.compile(model, **OPTIONS)
    made, groups = [], []

    class Counted(HostCopies):
        def __init__(self, device, rooms):
            super().__init__(device, rooms)
            made.append([buffer.numel() for buffer in self._buffers])

        def next(self, weights):
            groups.append(len(weights))
            return super().next(weights)

    for module in ("compiler.parts", "compiler.replays"):
        monkeypatch.setattr(f"kvpass.{module}.HostCopies", Counted)
    cache = fast(random_ids(1, 100)).past_key_values  # four blocks
    assert groups == [8], "the second layer with the head"
    fast(random_ids(1, 1), past_key_values=cache)
    layer = sum(
        weight.numel() * 4 for weight in tiny_model("llama", layers=2).model.layers[1].parameters() if weight.ndim > 1
    )
    head = model.config.vocab_size * model.config.hidden_size * 4
    assert groups == [8, 3, 5], "q, k, v after the first attention; the others after the second"
    assert [sum(buffers) for buffers in made] == [layer + head] * 2
    assert fast.report().on_host == layer + head and "weights stay on the host" in str(fast.report())
    kept, own = model.model.layers[0].mlp.up_proj.weight, fast.model.layers[0].mlp.up_proj.weight
    assert own is kept, "weights on the device are shared"
    assert not fast.model.layers[1].mlp.up_proj.weight.is_meta, "reading one gives a copy"
    assert torch.equal(model(random_ids(1, 100), use_cache=False).logits, expected)


def test_a_cache_file_is_valid_with_and_without_offloading(tmp_path):
    _, plain = compiled_once("llama", layers=2, backend="eager", budget=24, window=8)
    fast = kvpass.compile(offloaded("llama", layers=2), **OPTIONS)
    plain.compress(random_ids(1, 100)).save(tmp_path / "cache")
    cache = kvpass.load_cache(tmp_path / "cache", fast)
    expected = plain(random_ids(1, 1), past_key_values=kvpass.load_cache(tmp_path / "cache", plain)).logits
    torch.testing.assert_close(fast(random_ids(1, 1), past_key_values=cache).logits, expected, rtol=0, atol=2e-5)


class _Log:
    """Stands in for streams and events of CUDA: notes what waits for what."""

    def __init__(self):
        self.done = []

    def stream(self, name):
        log = self

        class Stream:
            def record_event(self):
                log.done.append((name, "record"))
                return len(log.done) - 1

            def wait_event(self, event):
                log.done.append((name, "wait", event))

            def wait_stream(self, other):
                log.done.append((name, "wait for copies"))

            def __enter__(self):
                log.done.append((name, "copy"))

            def __exit__(self, *failure):
                pass

        return Stream()


def test_on_cuda_a_buffer_is_written_when_its_readers_are_done(monkeypatch):
    """The wait before copy k is for an event recorded before copy k - 1 began: after all that reads copy k - 2."""
    log = _Log()
    main, copying = log.stream("main"), log.stream("copying")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    buffers = [torch.empty(256, dtype=torch.uint8) for _ in range(2)]
    monkeypatch.setattr(host_weights.torch, "empty", lambda *size, **given: buffers.pop())
    copies = HostCopies(torch.device("cuda", 0), [256, 256, 256])
    for step in range(4):
        (copy,) = copies.next([torch.full((4, 4), float(step))])
        assert torch.equal(copy, torch.full((4, 4), float(step)))
        log.done.append(("main", "read", step))
    reads = [place for place, what in enumerate(log.done) if what[1] == "read"]
    waits = [what[2] for what in log.done if what[1] == "wait"]
    assert [log.done[place - 1] for place in reads] == [("main", "wait for copies")] * 4
    assert all(log.done[event] == ("main", "record") for event in waits)
    for step in (2, 3):
        assert reads[step - 2] < waits[step] < reads[step - 1], "not for the kernels that run beside the copy"


def test_a_view_of_a_weight_on_the_host_does_not_leave_its_part():
    """It would show the weights of another layer, once the buffer is written again."""
    graph, weight = Graph(), torch.ones(4, 4)
    given = graph.placeholder("weight")
    copy = graph.call_function(torch.ops.kvpass.to_device.default, (given, CPU))
    view = graph.call_method("t", (copy,))
    site = graph.call_function(torch.ops.kvpass.site.default, (view, view, view, 1.0))
    graph.output((graph.call_function(torch.add, (site, view)),))
    on_device = weight.clone()
    for node, value in zip(graph.nodes, (weight, on_device, on_device.t(), weight, weight), strict=False):
        node.meta["example_value"] = value
    gm = GraphModule({}, graph)
    assert take_host_weights_pass(gm) == 1
    with pytest.raises(CannotSplitError, match="a view of a weight that stays on the host"):
        split_graph(gm)


# -- refused -----------------------------------------------------------------------------------------------------------


def on_disk(model, folder):
    accelerate.disk_offload(model, folder, execution_device=CPU)


def on_two_devices(model, folder):
    accelerate.cpu_offload(model, execution_device=CPU)
    model.lm_head._hf_hook.execution_device = "meta"


def quantised(model, folder):
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    accelerate.cpu_offload(model, execution_device=CPU)


def lost(model, folder):
    accelerate.cpu_offload(model.model.layers, execution_device=CPU)
    model.lm_head.to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (on_disk, "offloaded to disk: kvpass copies weights from host memory only; have 'cpu' in device_map"),
        (on_two_devices, "computes on cpu, meta: .*name one device and 'cpu' in device_map"),
        (quantised, "weight of a Linear: weights of torch.int8 cannot stay on the host"),
        (lost, "lm_head.weight of LlamaForCausalLM has no content"),
    ],
)
def test_what_cannot_be_copied_is_refused(tmp_path, change, message):
    model = tiny_model("llama", layers=2)
    change(model, tmp_path)
    with pytest.raises(ValueError, match=message):
        kvpass.compile(model, **OPTIONS)


def test_it_runs_in_parts_only():
    with pytest.raises(ValueError, match="compile_regions=False: a model with weights on the host runs in parts"):
        kvpass.compile(offloaded("llama", layers=2), budget=24, compile_regions=False)
