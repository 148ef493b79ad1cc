"""The Python that torch.fx writes for an emitted graph: it launches kernels directly, and calls operators as by hand.

The function first asks whether the call may do so. If not (a mode or a transform of torch's is active, or an input is a
fake tensor and the like) it calls the ordinary code that torch.fx writes for the same graph, in which everything is an
operator. Being a CodeGen of the graph, it is there again after every rewrite, copy and `recompile()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch.fx import Node
from torch.fx.graph import CodeGen, PythonCode

from fxwrap.converters.fx_direct import DIRECT_FORMS
from fxwrap.converters.fx_direct_writer import DirectWriter
from fxwrap.runtime.batched import with_help
from fxwrap.runtime.direct import is_direct
from fxwrap.torch_compat import GraphCode

_COUNTER = "# COUNTER: "
_INDENT = "    "

Change = Callable[[list[str]], list[str]]


class DirectCode(GraphCode):
    """Writes a graph's code twice: the direct one, and the ordinary one as a function that is called instead."""

    boxed = False  # whether the function takes its inputs in a list
    guard = ""  # while code is written: the statement that leaves for the ordinary code

    def written(
        self,
        nodes: Sequence[Node],
        new_name: Callable[[str], str],
        users: Change,
        write: Callable[[Change], PythonCode],
        runs: bool,
    ) -> PythonCode:
        """Returns the code of a graph, with what it refers to."""
        placeholders = [node for node in nodes if node.op == "placeholder"]
        inputs = [str(node.target) for node in placeholders]
        parameters = frozenset(name.lstrip("*") for name in inputs)

        def fresh(wish: str) -> str:  # torch.fx knows the nodes' names, which may be others than their parameters'
            name = new_name(wish)
            while name in parameters:
                name = new_name(wish)
            return name

        writer = DirectWriter(nodes, fresh, parameters, DIRECT_FORMS)
        ordinary: list[str] = []
        check, otherwise = fresh("is_direct"), fresh("by_operators")

        def change(body: list[str]) -> list[str]:
            ordinary.extend(users(list(body)))
            made = _direct_body(body, nodes, writer)
            if made == body:  # nothing to leave for
                ordinary.clear()
                return users(made)
            used = [place for place, node in enumerate(placeholders) if node.users]
            self.guard = self.guard_text(check, otherwise, inputs, used)
            return users([*self.begin(self.guard), *made])

        try:
            code = write(change)
            if not ordinary or not runs:
                return code
            head = self.ordinary_head(otherwise, inputs)
        finally:
            self.guard = ""
        namespace = dict(code.globals)
        exec(compile(_function(head, ordinary), f"<{otherwise}>", "exec"), namespace)  # torch.fx's own text
        code.globals.update(writer.globals)
        code.globals.update({check: is_direct, otherwise: with_help(namespace[otherwise], boxed=self.boxed)})
        return code

    def guard_text(self, check: str, otherwise: str, inputs: Sequence[str], used: Sequence[int]) -> str:
        """Returns the statement that leaves for the ordinary code, for inputs by these names; some are used."""
        looked_at = ", ".join(["self", *[inputs[place] for place in used]])
        return f"if not {check}({looked_at}):\n{_INDENT}return {otherwise}({', '.join(['self', *inputs])})\n"

    def begin(self, guard: str) -> list[str]:
        """Returns what the body of the direct function begins with."""
        return [guard]

    def ordinary_head(self, name: str, inputs: Sequence[str]) -> str:
        """Returns the head of the function that the ordinary code is in."""
        return f"def {name}({', '.join(['self', *inputs])}):"


class BoxedCode(DirectCode):
    """Code of a function that takes its inputs in a list and empties it, so that each is dropped at its last use."""

    boxed = True

    def __init__(self, unused: frozenset[str]) -> None:
        super().__init__()
        self.unused = unused
        self._names: list[str] = []

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        """Returns the head of the function."""
        self._names = [text.split(":")[0].split("=")[0].strip() for text in free_vars if text != "self"]
        head = [f"def {self._func_name}(self, inputs):", *self.guard.splitlines(), *self._taken()]
        return f"\n{_INDENT}".join(head)

    def _taken(self) -> list[str]:
        """Returns the statements that take the inputs out of the list."""
        lines = [f"{', '.join(self._names)}, = inputs"] if self._names else []
        lines.append("inputs.clear()")
        dropped = [name for name in self._names if name in self.unused]
        return [*lines, f"del {', '.join(dropped)}"] if dropped else lines

    def guard_text(self, check: str, otherwise: str, inputs: Sequence[str], used: Sequence[int]) -> str:
        """Returns the statement that leaves for the ordinary code, before the list is emptied."""
        looked_at = ["*inputs"] if 2 * len(used) > len(inputs) else [f"inputs[{place}]" for place in used]
        return f"if not {check}({', '.join(['self', *looked_at])}):\n{_INDENT}return {otherwise}(self, inputs)\n"

    def begin(self, guard: str) -> list[str]:
        """Returns nothing: the guard is in the head."""
        return []

    def ordinary_head(self, name: str, inputs: Sequence[str]) -> str:
        """Returns the head of the function that the ordinary code is in."""
        return f"\n{_INDENT}".join([f"def {name}(self, inputs):", *self._taken()])


def direct_code(own: CodeGen) -> DirectCode:
    """Returns a CodeGen that writes direct code in the calling convention of a graph's own."""
    if isinstance(own, DirectCode):
        return own
    made: DirectCode = object.__new__(_direct_class(type(own)))  # type: ignore[arg-type]
    made.__dict__.update(own.__dict__)
    return made


@cache
def _direct_class(own: type[CodeGen]) -> type[DirectCode]:
    name = f"Direct{own.__name__.lstrip('_')}"
    return DirectCode if own is CodeGen else type(name, (DirectCode, own), {})


def _function(head: str, body: Sequence[str]) -> str:
    lines = [line for line in "".join(body).split("\n") if not line.startswith(_COUNTER)]
    return "\n".join([head, *[_INDENT + line for line in lines]]) + "\n"


def _direct_body(body: list[str], nodes: Sequence[Node], writer: DirectWriter) -> list[str]:
    """Returns the body's pieces with the statements of nodes that have a direct form replaced."""
    made, said = list(body), ""
    starts = [place for place, piece in enumerate(body) if piece.startswith(_COUNTER)]
    for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
        node = nodes[int(body[start].removeprefix(_COUNTER))]
        if node.op not in ("call_function", "call_module"):
            continue
        places = [place for place in range(start + 1, end) if _assigns(body[place], repr(node))]
        text = writer.call(node) if places else None
        if text is None:
            continue
        place, origin = places[-1], str(node.meta.get("fxwrap_origin") or "")
        remark = f"# {origin}\n" if origin and origin != said else ""
        said = origin
        if node.users:
            made[place] = f"{remark}{body[place].partition(' = ')[0]} = {text}"
            continue
        made[place] = remark + text
        if place + 1 < end:
            made[place + 1] = _without(body[place + 1], repr(node))
    return made


def _assigns(piece: str, name: str) -> bool:
    return piece.startswith((f"{name} = ", f"{name}: ", f"{name} : "))


def _without(piece: str, name: str) -> str:
    """Returns the piece that drops values after a node, `;  x = y = None`, without this name."""
    kept = piece.replace(f"{name} = None", "None")
    return kept if " = None" in kept else "\n"
