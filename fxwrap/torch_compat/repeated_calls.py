"""Calls that were traced before are copied into the trace, instead of being run again on fake tensors.

Why: layers of a model make the same calls on operands of the same layouts, and torch decomposes and infers each of them
again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from fxwrap.torch_compat.repeated_gradients import DifferentiableCall, Occurrence, record_differentiable
from fxwrap.torch_compat.trace_templates import NotRepeatableError, Storages, Template, TracedTensor, TraceRecorder


@dataclass(frozen=True)
class _Call:
    """The template of a traced call without gradients, and the structure of its results."""

    template: Template
    spec: TreeSpec


class RepeatedCalls:
    """The calls of one trace by their functions, literals and layouts of operands."""

    def __init__(self, tracer: Any) -> None:
        self._recorder = TraceRecorder(tracer)
        self._has_gradients = torch.is_grad_enabled()
        self._state = 0
        self._calls: dict[Any, _Call | DifferentiableCall | None] = {}

    def enter_state(self) -> None:
        """Lets later calls repeat none of the earlier ones, since modes of torch's have changed."""
        self._state += 1

    def functional(self, arguments: Any) -> Any:
        """Returns nested arguments with functional tensors, which calls take that are not repeated."""
        return tree_map_only(TracedTensor, lambda item: item.functional(self._recorder.tracer), arguments)

    def run(self, target: Any, arguments: Any, keywords: Any, call: Callable[..., Any]) -> Any:
        """Returns the results of a call, which may be `TracedTensor`s if it repeats an earlier one, or of `call`."""
        if target is operator.getitem and isinstance(arguments[0], tuple | list):
            return arguments[0][arguments[1]]
        operands: list[TracedTensor] = []
        try:
            describe = partial(self._recorder.key, operands=operands)
            key = (target, self._state, describe(arguments), describe(keywords))
        except NotRepeatableError:
            return call(target, *self.functional((arguments, keywords)))
        if key not in self._calls:
            return self._record(key, operands, arguments, keywords, partial(call, target))
        recorded = self._calls[key]
        if recorded is None:
            return call(target, *self.functional((arguments, keywords)))
        if isinstance(recorded, DifferentiableCall):
            return recorded.call(Occurrence(recorded, operands))
        return self._repeat(recorded, operands)

    def _record(
        self, key: Any, operands: Sequence[TracedTensor], arguments: Any, keywords: Any, call: Callable[..., Any]
    ) -> Any:
        recorder, mark = self._recorder, self._recorder.mark()
        self._calls[key] = None
        if self._has_gradients and any(item.requires_grad for item in operands):
            differentiable, result = record_differentiable(recorder, operands, arguments, keywords, call)
            if differentiable is not None:
                self._calls[key] = None if differentiable.template is None else differentiable
                return result
        else:
            result = call(*self.functional((arguments, keywords)))
        leaves, spec = tree_flatten(result)
        storages = Storages()
        storages.add([item.fake for item in operands], "operand")
        try:
            if not all(isinstance(leaf, FunctionalTensor) for leaf in leaves):
                raise NotRepeatableError
            results = [recorder.traced_tensor(leaf).node for leaf in leaves]
            template = recorder.template(mark, [item.node for item in operands], results, storages, keeps_all=False)
            self._calls[key] = _Call(template, spec)
        except NotRepeatableError:
            pass
        return result

    def _repeat(self, call: _Call, operands: Sequence[TracedTensor]) -> Any:
        """Copies the nodes of a call and returns its results."""
        template, storages = call.template, Storages()
        storages.add([item.fake for item in operands], "operand")
        sources = dict(zip(template.sources, operands, strict=True))
        copies = {source: item.node for source, item in sources.items()}
        results = {**sources, **self._recorder.copy(template, copies, storages)}
        return tree_unflatten([results[node] for node in template.results if node is not None], call.spec)
