"""Tracing of a training step into one functional graph over plain tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from fxwrap.errors import StepError
from fxwrap.fx_passes import decomposition_table
from fxwrap.options import Options
from fxwrap.torch_compat import (
    FakeTensorMode,
    ShapeEnv,
    compiling,
    guard_conditions,
    in_dispatched_fake_mode,
    is_data_dependent_error,
    lazy_graph_modules,
    symbolic_context,
    tree_flatten,
    tree_unflatten,
)
from fxwrap.training.attention_masks import SimplifiedMasks
from fxwrap.training.data_parallel import with_functional_collectives
from fxwrap.training.graph import erase_profiler_ranges, rename_inputs, write_early
from fxwrap.training.recomputation import marked_backwards, recompute
from fxwrap.training.signature import StepSignature
from fxwrap.training.state import Slot, StepState, optimizer_numbers, substituted
from fxwrap.training.subclasses import build, build_all, layout_of, plain_tensors


@dataclass(frozen=True)
class TracedStep:
    """A traced step.

    Fields:
        graph: the functional graph; its inputs are the plain tensors of the state, then those of the step's inputs.
        examples: fake values of the graph's inputs.
        signature: its signature.
    """

    graph: GraphModule
    examples: tuple[Any, ...]
    signature: StepSignature


class _Trace:
    """One run of a step on fake tensors."""

    def __init__(
        self,
        step: Callable[..., object],
        state: StepState,
        inputs: Sequence[object],
        options: Options,
        dynamic: bool | None,
    ) -> None:
        self.step, self.state, self.options = step, state, options
        self.slots = list(state.unique().values())
        tensors = [slot.get() for slot in self.slots]
        self.layouts = [layout_of(tensor) for tensor in tensors]
        self.leaves, self.input_tree = tree_flatten(tuple(inputs))
        for leaf in self.leaves:
            _check_input(leaf)
        self.input_layouts = [layout_of(leaf) for leaf in self.leaves]
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
        everything = zip([*tensors, *self.leaves], [*self.layouts, *self.input_layouts], strict=True)
        self.examples = [
            self._fake(plain, False if position < len(tensors) or layout is not None else dynamic)
            for position, (tensor, layout) in enumerate(everything)
            for plain in plain_tensors(tensor, layout)
        ]
        self.tensors = tensors
        self.counters_are_numbers = True
        self.outputs: Any = None
        self.output_leaves: list[tuple[bool, Any]] = []

    def _fake(self, plain: Tensor, dynamic: bool | None) -> Tensor:
        """Returns the fake tensor of a plain one, with symbolic sizes as `dynamic` says."""
        if dynamic is False:
            return self.mode.from_tensor(plain.detach(), static_shapes=True)
        context = symbolic_context(plain, all_sizes=bool(dynamic))
        return self.mode.from_tensor(plain.detach(), static_shapes=False, symbolic_context=context)

    def run(self, *plain: Tensor) -> list[Tensor]:
        """Runs the step on plain tensors; returns its plain results."""
        source = iter(plain)
        values = [
            _like(tensor, build(layout, source)) for tensor, layout in zip(self.tensors, self.layouts, strict=True)
        ]
        leaves = build_all(self.input_layouts, source)
        fakes = dict(zip(map(id, self.tensors), values, strict=True))
        with substituted(self.state, fakes), _traceable_updates(self.state, self.counters_are_numbers):
            with (
                with_functional_collectives(self.state.parallel), _gradients(values) as gradients,
                SimplifiedMasks(self.options),
            ):  # fmt: skip
                result = self.step(*tree_unflatten(leaves, self.input_tree))
            gradients.check()
            self._check_optimizers()
            with torch.no_grad():
                for slot, value in zip(self.slots, values, strict=True):
                    if slot.get() is not value:  # the step put another tensor there
                        value.copy_(slot.get())
        return self._flat_results(result)

    def input_names(self) -> list[str]:
        """Returns the names of the graph's inputs: those of the state, and `input_0`, `input_1`..."""
        names = []
        for slot, layout in zip(self.slots, self.layouts, strict=True):
            count = len(list(plain_tensors(slot.get(), layout)))
            names += [slot.name] if count == 1 else [f"{slot.name}.{number}" for number in range(count)]
        return [*names, *[f"input_{number}" for number in range(len(self.examples) - len(names))]]

    def _flat_results(self, result: object) -> list[Tensor]:
        leaves, self.outputs = tree_flatten(result)
        flat = []
        for leaf in leaves:
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise StepError("it returns a number that it reads from a tensor", "Return the tensor itself")
            is_tensor = isinstance(leaf, Tensor)
            layout = layout_of(leaf) if is_tensor else None
            self.output_leaves.append((is_tensor, layout if is_tensor else leaf))
            if is_tensor:
                flat += [item.detach() for item in plain_tensors(leaf, layout)]
        return flat

    def _check_optimizers(self) -> None:
        """Raises StepError where the step created state of an optimizer."""
        known = {(id(slot.container), slot.key) for slot in self.state.slots}
        for name, optimizer in self.state.optimizers.items():
            new = {key for items in optimizer.state.values() for key, value in items.items()
                   if isinstance(value, Tensor) and (id(items), key) not in known}  # fmt: skip
            if new:
                raise StepError(
                    f"the optimizer '{name}' ({type(optimizer).__name__}) creates its state {sorted(map(str, new))} "
                    "during the step",
                    "Run the step once before it is compiled, so that the state exists",
                )


def trace_step(
    step: Callable[..., object], state: StepState, inputs: Sequence[object], options: Options, dynamic: bool | None
) -> TracedStep:
    """Traces a step. Nothing is computed, and the state keeps its values. Raises StepError.

    Sizes of inputs are symbols: all from 2 on if `dynamic` is True, those marked by `mark_dynamic` if it is None.
    """
    with lazy_graph_modules():  # no code of the graph or of its earlier forms is called
        return _trace_step(step, state, inputs, options, dynamic)


def _trace_step(
    step: Callable[..., object], state: StepState, inputs: Sequence[object], options: Options, dynamic: bool | None
) -> TracedStep:
    trace = _Trace(step, state, inputs, options, dynamic)
    numbers = [(slot, slot.get()) for slot in state.numbers]
    try:
        try:
            graph = _trace_functional(trace)
        except Exception as error:
            if not _is_data_dependent(error):
                raise
            trace = _Trace(step, state, inputs, options, dynamic)
            trace.counters_are_numbers = False
            graph = _trace_functional(trace)
    except StepError:
        raise
    except Exception as error:  # whatever the user's code raises on fake tensors
        raise _explain(error, step) from error
    finally:
        changed = [slot for slot, number in numbers if slot.get() != number]
        for slot, number in numbers:
            slot.set(number)
    if changed:
        raise _changes_numbers(changed)
    graph = recompute(graph, options)
    write_early(graph)
    rename_inputs(graph, trace.input_names())
    signature = StepSignature(
        tuple([slot.name for slot in trace.slots]), tuple(trace.layouts), trace.input_tree, tuple(trace.input_layouts),
        trace.outputs, tuple(trace.output_leaves), {slot.name: slot.get() for slot in optimizer_numbers(state)},
    )  # fmt: skip
    return TracedStep(graph, tuple(trace.examples), signature)


def _trace_functional(trace: _Trace) -> GraphModule:
    """Returns the graph of a step without mutations, apart from the copies into its inputs at its end."""
    with (
        in_dispatched_fake_mode(trace.mode), compiling(True), preserve_node_meta(), marked_backwards(),
        torch.enable_grad(), torch.autograd.set_multithreading_enabled(False),
    ):  # fmt: skip
        graph = make_fx(trace.run, record_stack_traces=True)(*trace.examples)
    erase_profiler_ranges(graph)
    with in_dispatched_fake_mode(trace.mode), preserve_node_meta():
        functional = functionalize(Interpreter(graph).run, remove="mutations")
        inputs = len(trace.examples) - len(trace.leaves)

        def checked(*plain: Tensor) -> object:
            for condition, text in guard_conditions(trace.mode.shape_env, plain[inputs:]):
                torch.ops.aten._assert_scalar.default(condition, f"the step was compiled for inputs with {text}")
            return functional(*plain)

        return make_fx(checked, decomposition_table=decomposition_table(trace.options))(*trace.examples)


def _is_data_dependent(error: Exception) -> bool:
    """Whether tracing failed since Python code depends on the content of a tensor."""
    return is_data_dependent_error(error) or "data-dependent" in str(error)


def _changes_numbers(changed: Sequence[Slot]) -> StepError:
    names = ", ".join([f"'{slot.name}'" for slot in changed[:8]])
    return StepError(
        f"it changes {names}: Python numbers are constants of the program",
        "Use tensors, or change them outside of the step",
    )


def _check_input(leaf: object) -> None:
    if not isinstance(leaf, Tensor):
        raise StepError(
            f"an input is of type {type(leaf).__name__}, which would be a constant of the program",
            "Pass a tensor, or bind the value with functools.partial",
        )


def _like(original: Tensor, value: Tensor) -> Tensor:
    """Returns a fake tensor as a parameter, or with gradients, as the original is."""
    if isinstance(original, nn.Parameter):
        return nn.Parameter(value, requires_grad=original.requires_grad)
    return value.requires_grad_() if original.requires_grad else value


# --- what the user's code sees ----------------------------------------------------------------------------------------


@contextmanager
def _traceable_updates(state: StepState, counters_are_numbers: bool) -> Iterator[None]:
    """Makes optimizers compute with operators on single tensors.

    They read step counters on the CPU as numbers, symbols of the graph: bias corrections have eager's precision. Code
    that branches on them, as RAdam's, gets tensors, as in optimizers with the option `capturable`.
    Fused updates are one operator for all parameters; their counters on other devices are never read.
    """
    with ExitStack() as stack:
        updates = ExitStack()
        for optimizer in state.optimizers.values():
            for group in optimizer.param_groups:
                on_cpu = all(parameter.device.type == "cpu" for parameter in group["params"])
                changes = {"fused": False, "foreach": False} if group.get("fused") else {}
                if not counters_are_numbers or (changes and not on_cpu):
                    changes |= {"capturable": True}
                stack.callback(group.update, {key: group[key] for key in changes if key in group})
                group.update({key: value for key, value in changes.items() if key in group})
            if not counters_are_numbers:
                continue
            for handle in (
                optimizer.register_step_pre_hook(lambda *_: updates.enter_context(compiling(False))),
                optimizer.register_step_post_hook(lambda *_: updates.close()),
            ):
                stack.callback(handle.remove)
        stack.push(updates)
        yield


class _Gradients:
    """Gradients at the begin of a step: a placeholder for those of the call before, which a step may only clear."""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves
        self.before = [torch.empty_like(leaf) for leaf in leaves]
        self.uncleared: set[int] = set()

    def begin(self, stack: ExitStack) -> None:
        for number, (leaf, before) in enumerate(zip(self.leaves, self.before, strict=True)):
            leaf.grad = before
            handle = leaf.register_hook(self._hook(number))  # type: ignore[no-untyped-call]
            stack.callback(handle.remove)

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def before_accumulation(_gradient: Tensor) -> None:
            if self.leaves[number].grad is self.before[number]:
                self.leaves[number].grad = None
                self.uncleared.add(number)

        return before_accumulation

    def check(self) -> None:
        """Raises StepError where gradients of one call would be added to those of the next."""
        remaining = [number for number in self.uncleared if self.leaves[number].grad is not None]
        if remaining:
            raise StepError(
                f"it adds gradients to those of the call before, of {len(remaining)} parameters",
                "Call optimizer.zero_grad() at the begin or the end of the step",
            )


@contextmanager
def _gradients(values: Sequence[Tensor]) -> Iterator[_Gradients]:
    with ExitStack() as stack:
        gradients = _Gradients([value for value in values if value.requires_grad and value.is_leaf])
        gradients.begin(stack)
        yield gradients


def _explain(error: Exception, step: Callable[..., object]) -> StepError:
    """Returns the error for an exception of the user's code."""
    location = _location(error, step)
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    if _is_data_dependent(error):
        return StepError(
            f"its Python code depends on the content of a tensor: {first}",
            "Use torch.where or torch.cond, or read the number outside of the step", location,
        )  # fmt: skip
    if "convert all Tensors to FakeTensors" in str(error):
        return StepError(
            "it reads a tensor that is no input, and not part of a module, an optimizer or a variable that it names: "
            f"{text[-1]}",
            "Pass the tensor as an input, or register it as a buffer", location,
        )  # fmt: skip
    return StepError(f"it fails while it is traced: {type(error).__name__}: {first}", "Mend the step", location)


def _location(error: Exception, step: Callable[..., object]) -> str:
    """Returns the place of the innermost frame in the file of the step, else the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(step, "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""
