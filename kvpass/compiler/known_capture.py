"""Captures that an earlier process made of the same model: Dynamo need not trace it again.

A capture is kept as the canonical graph in JSON, under a digest of all that it depends on
(:mod:`kvpass.compiler.model_text`). Where all is equal, its values are recorded anew, and what its checks have shown
holds. What has no exact text (hooks, objects of unknown classes, code outside of torch, transformers and kvpass) is
captured in each process.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Sequence

import sympy  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.fx import GraphModule

from kvpass.compiler.backend import Capture, PhaseCompiler
from kvpass.compiler.model_text import ModelText, code_digest, code_objects, traced_modules
from kvpass.compiler.step import Call, GraphCall, ModuleState
from kvpass.graphs.bind_state import backend_mode, ids_and_positions, placeholders
from kvpass.graphs.canonical import batch_and_tokens, find_sites
from kvpass.graphs.fx_utils import symbols_of
from kvpass.graphs.graph_json import fake_inputs_like, graph_from_json, graph_to_json, inputs_of
from kvpass.graphs.passes import PassRecord
from kvpass.graphs.record_values import record_values
from kvpass.graphs.verify.graph_text import NoTextError
from kvpass.remembered import keep, recall

_KIND = "capture"
_LOG = logging.getLogger(__name__)


def keep_capture(text: ModelText, gm: GraphModule, *, repeatable: bool) -> None:
    """Keep a capture for later processes, unless something has no exact text. To be called in its trace.

    Args:
        text: of its model. gm: its graph. repeatable: Dynamo's code does nothing but to call the graph.
    """
    try:
        if not repeatable or len(gm.graph.output_node().all_input_nodes) != 1:
            raise NoTextError("Dynamo's code does more than to call the graph")
        _check_guards(gm)
        modules, graph = traced_modules(), graph_to_json(gm, text.paths)
        keep(_KIND, [text.digest], {"modules": modules, "code": code_digest(modules), "graph": graph})
    except NoTextError as reason:
        _LOG.debug("the capture is not kept for later processes: %s", reason)


def recall_capture(text: ModelText, model: nn.Module, ids: Tensor, compiler: PhaseCompiler) -> KnownCapture | None:
    """Return a capture of an earlier process; None if there is none for this model, ids and code.

    To be called in ``tracing`` with a fake mode of its own; ``ids``: an example ``[B, T]``, or embeddings.
    """
    began = time.perf_counter()
    kept = recall(_KIND, [text.digest])
    if kept is None:
        return None
    try:
        if code_digest(kept["modules"]) != kept["code"]:
            return None
        gm = graph_from_json(kept["graph"], model)
        inputs = fake_inputs_like(gm, ids, backend_mode())
        record_values(gm, inputs, backend_mode())
        _check_guards(gm)
    except (NoTextError, KeyError, OSError) as reason:  # a module is not imported
        _LOG.debug("the capture of an earlier process is not used: %r", reason)
        return None
    gm.recompile()
    passes = [PassRecord(name="recall", sites=len(find_sites(gm)), seconds=time.perf_counter() - began, op_diff="")]
    return KnownCapture(Capture(gm, passes, inputs, compiler), kept["modules"], model)


def _check_guards(gm: GraphModule) -> None:
    """Check that a capture takes nothing for granted but of the number of tokens: kvpass knows where it ends."""
    shapes, tokens = backend_mode().shape_env, symbols_of([batch_and_tokens(gm)[1]])
    assert shapes is not None
    for guard in shapes.guards:
        expression = shapes.replace(guard.expr)
        if expression != sympy.true and expression.free_symbols != tokens:
            raise NoTextError(f"the capture takes {expression} for granted")


class KnownCapture:
    """The capture of an earlier process. Instead of Dynamo's guards, it compares what it was made for.

    Args:
        modules: of Python, whose code was traced.
    """

    def __init__(self, decoder: Capture, modules: Sequence[str], model: nn.Module) -> None:
        self.decoder, self._modules, self._given = decoder, modules, ids_and_positions(decoder.gm)
        held = [node.meta["grapharg"].example for node in placeholders(decoder.gm) if "grapharg" in node.meta]
        self._state = ModuleState(model, held)
        self._lists = self._state.lists()
        self._code = code_objects(modules)

    def holds(self, tokens: int) -> bool:
        """Whether model and torch are as they were; with several tokens also lists in the model and the traced code."""
        return self._state.holds() and (tokens == 1 or (self._state.lists() == self._lists and self._same_code()))

    def _same_code(self) -> bool:
        now = code_objects(self._modules)
        return len(now) == len(self._code) and all(map(operator.is_, now, self._code))

    def __call__(self, call: Call, ids: Tensor, positions: Tensor) -> Tensor:
        """Run a call with ids, or embeddings, and positions ``[B, T]``; return the logits."""
        inputs = inputs_of(self.decoder.gm, ids, positions)
        (logits,) = outputs = self.decoder(call, *inputs)
        call.made = GraphCall(self.decoder, tuple(inputs), outputs, self._given)
        return logits
