"""The code that torch.fx generates for an emitted graph: kernels are launched without the dispatcher.

The function first checks whether the call may bypass the dispatcher. If not (a mode or transform of torch is active, an
input is a fake tensor), it calls the code that torch.fx generates by default, in which everything is an operator.
The generator is the graph's CodeGen, so rewrites, copies and `recompile()` use it too.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

from torch.fx import Node
from torch.fx.graph import CodeGen, PythonCode

from fxwrap import torch_compat
from fxwrap.caching import bounded_cache
from fxwrap.converters.fx.direct import DIRECT_FORMS
from fxwrap.converters.fx.direct_writer import DirectWriter
from fxwrap.runtime.direct import can_bypass_dispatcher
from fxwrap.runtime.unusual_inputs import InputCheck, support_unusual_inputs
from fxwrap.torch_compat import GraphCodeGen

_COUNTER = "# COUNTER: "
_TRITON_LAUNCH = "torch.ops.higher_order.triton_kernel_wrapper_"
_INDENT = "    "

BodyTransform = Callable[[list[str]], list[str]]


class DirectCode(GraphCodeGen):
    """Generates a graph's code twice: the direct code, and a function with the default code as the fallback."""

    boxed = False  # whether the function takes its inputs in a list
    check: InputCheck | None = None  # for calls that do not bypass the dispatcher
    guard = ""  # during generation: the statement that calls the fallback

    def generate_code(
        self,
        nodes: Sequence[Node],
        new_name: Callable[[str], str],
        users: BodyTransform,
        write: Callable[[BodyTransform], PythonCode],
        runs: bool,
    ) -> PythonCode:
        """Returns the code of a graph with its globals."""
        placeholders = [node for node in nodes if node.op == "placeholder"]
        inputs = [str(node.target) for node in placeholders]
        parameters = frozenset(name.lstrip("*") for name in inputs)

        def fresh(name_hint: str) -> str:  # torch.fx avoids the names of nodes, which may differ from their parameters'
            name = new_name(name_hint)
            while name in parameters:
                name = new_name(name_hint)
            return name

        writer = DirectWriter(nodes, fresh, parameters, DIRECT_FORMS)
        fallback_body: list[str] = []
        check, fallback, launch = [fresh(name) for name in ("can_bypass_dispatcher", "by_operators", "launch_triton")]

        def transform(body: list[str]) -> list[str]:
            fallback_body.extend(users(list(body)))
            direct_body = _direct_body(body, nodes, writer)
            if direct_body == body:  # the fallback would be the same
                fallback_body.clear()
                return users(direct_body)
            used = [index for index, node in enumerate(placeholders) if node.users]
            self.guard = self.guard_text(check, fallback, inputs, used)
            return users([*self.begin(self.guard), *direct_body])

        try:
            code = write(transform)
            if not fallback_body or not runs:
                return code
            head = self.fallback_header(fallback, inputs)
        finally:
            self.guard = ""
        namespace = dict(code.globals)
        text = _function(head, fallback_body)
        if _TRITON_LAUNCH in text:
            launches = torch_compat.traceable_triton_launches()
            namespace |= {f"{launch}_{name}": function for name, function in launches.items()}
            text = text.replace(_TRITON_LAUNCH, f"{launch}_")
        exec(compile(text, f"<{fallback}>", "exec"), namespace)  # torch.fx's own text
        run_fallback = support_unusual_inputs(namespace[fallback], boxed=self.boxed, check=self.check)
        code.globals.update({**writer.globals, check: can_bypass_dispatcher, fallback: run_fallback})
        return code

    def guard_text(self, check: str, fallback: str, inputs: Sequence[str], used: Sequence[int]) -> str:
        """Returns the statement that calls the fallback; `used` are the indices of inputs to check."""
        checked = ", ".join(["self", *[inputs[index] for index in used]])
        return f"if not {check}({checked}):\n{_INDENT}return {fallback}({', '.join(['self', *inputs])})\n"

    def begin(self, guard: str) -> list[str]:
        """Returns the first statements of the direct function's body."""
        return [guard]

    def fallback_header(self, name: str, inputs: Sequence[str]) -> str:
        """Returns the head of the fallback function."""
        return f"def {name}({', '.join(['self', *inputs])}):"


class BoxedCode(DirectCode):
    """Code of a function that takes its inputs in a list and empties it, so that each is dropped after its last use."""

    boxed = True

    def __init__(self, unused: frozenset[str], check: InputCheck | None = None) -> None:
        super().__init__()
        self.unused = unused
        self.check = check
        self._names: list[str] = []

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: object) -> str:
        """Returns the head of the function."""
        self._names = [text.split(":")[0].split("=")[0].strip() for text in free_vars if text != "self"]
        head = [f"def {self._func_name}(self, inputs):", *self.guard.splitlines(), *self._unpack_inputs()]
        return f"\n{_INDENT}".join(head)

    def _unpack_inputs(self) -> list[str]:
        """Returns the statements that move the inputs out of the list."""
        lines = [f"{', '.join(self._names)}, = inputs"] if self._names else []
        lines.append("inputs.clear()")
        dropped = [name for name in self._names if name in self.unused]
        return [*lines, f"del {', '.join(dropped)}"] if dropped else lines

    def guard_text(self, check: str, fallback: str, inputs: Sequence[str], used: Sequence[int]) -> str:
        """Returns the statement that calls the fallback before the list is emptied."""
        checked = ["*inputs"] if 2 * len(used) > len(inputs) else [f"inputs[{index}]" for index in used]
        return f"if not {check}({', '.join(['self', *checked])}):\n{_INDENT}return {fallback}(self, inputs)\n"

    def begin(self, guard: str) -> list[str]:
        """Returns no statement: the head contains the guard."""
        return []

    def fallback_header(self, name: str, inputs: Sequence[str]) -> str:
        """Returns the head of the fallback function."""
        return f"\n{_INDENT}".join([f"def {name}(self, inputs):", *self._unpack_inputs()])


def direct_code(codegen: CodeGen) -> DirectCode:
    """Returns a CodeGen for direct code with the calling convention of a graph's own CodeGen."""
    if isinstance(codegen, DirectCode):
        return codegen
    direct: DirectCode = object.__new__(_direct_class(type(codegen)))
    direct.__dict__.update(codegen.__dict__)
    return direct


@bounded_cache(64)
def _direct_class(base: type[CodeGen]) -> type[DirectCode]:
    name = f"Direct{base.__name__.lstrip('_')}"
    return DirectCode if base is CodeGen else type(name, (DirectCode, base), {})


def _function(head: str, body: Sequence[str]) -> str:
    lines = [line for line in "".join(body).split("\n") if not line.startswith(_COUNTER)]
    return "\n".join([head, *[_INDENT + line for line in lines]]) + "\n"


def _direct_body(body: list[str], nodes: Sequence[Node], writer: DirectWriter) -> list[str]:
    """Returns the pieces of a body with the statements of nodes that have a direct form replaced."""
    pieces, last_origin = list(body), ""
    dropped_later: dict[Node, str] = {}  # what a folded view is the last user of
    starts = [index for index, piece in enumerate(body) if piece.startswith(_COUNTER)]
    for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
        node = nodes[int(body[start].removeprefix(_COUNTER))]
        if node.op not in ("call_function", "call_module"):
            continue
        name = repr(node)
        assignments = [
            i for i in range(start + 1, end) if body[i].startswith((f"{name} = ", f"{name}: ", f"{name} : "))
        ]
        base = node.args[0] if node.args else None
        if assignments and node.target is operator.getitem and base in writer.unpacked:
            remaining = _remove_name(pieces[assignments[-1] + 1], repr(base)).removeprefix(";  ")
            pieces[start + 1 : end] = [remaining.lstrip("\n"), *[""] * (end - start - 2)]
            continue
        text = writer.call(node) if assignments else None
        if text is None:
            pieces[start + 1 : end] = _with_own_names(pieces[start + 1 : end], node, writer)
            continue
        index, origin = assignments[-1], str(node.meta.get("fxwrap_origin") or "")
        if isinstance(base, Node) and base in dropped_later:
            pieces[index + 1] = _remove_name(pieces[index + 1], repr(base), dropped_later[base])
        if node in writer.folded_views:
            dropped_later[node] = _dropped_names(pieces[index + 1])
            pieces[start + 1 : end] = [""] * (end - start - 1)
            continue
        comment = f"# {origin}\n" if origin and origin != last_origin else ""
        last_origin = origin
        if node.users and node not in writer.unpacked:
            text = f"{body[index].partition(' = ')[0]} = {text}"
        pieces[index] = comment + text
        if index + 1 < end:
            pieces[index + 1] = _drops(pieces[index + 1], node, writer)
    return pieces


def _with_own_names(pieces: list[str], node: Node, writer: DirectWriter) -> list[str]:
    """Returns the pieces of a node without a direct form, which use the names of nodes."""
    for operand in node.all_input_nodes:
        if operand in writer.renamed:
            definition = f"{operand!r} = {writer.text(operand)}"
            pieces = [
                f"{definition}\n{pieces[0]}",
                *[_remove_name(piece, repr(operand), f"{definition} = ") for piece in pieces[1:]],
            ]
    return pieces


def _drops(piece: str, node: Node, writer: DirectWriter) -> str:
    """Returns the piece that drops values after the direct text of a node."""
    if not node.users:
        piece = _remove_name(piece, repr(node))
    for operand in node.all_input_nodes:
        if operand in writer.retained:
            piece = _remove_name(piece, repr(operand))
        elif operand in writer.renamed:
            piece = _remove_name(piece, repr(operand), f"{writer.text(operand)} = ")
    return piece


def _dropped_names(piece: str) -> str:
    """Returns the names in the piece that drops values after a node, `;  x = y = None`, as `x = y = `."""
    names, is_drop, _ = piece.removeprefix(";  ").partition("None")
    return names if is_drop else ""


def _remove_name(piece: str, name: str, instead: str = "") -> str:
    """Returns the piece that drops values after a node, `;  x = y = None`, without a name, or with others instead."""
    start = r"(?:(?<!\w)|(?<=\x1b\[2m))"  # torch.fx's colour of such pieces ends in a letter
    remaining = re.sub(rf"{start}{re.escape(name)} = ", lambda _: instead, piece)
    return remaining if " = None" in remaining else "\n"
