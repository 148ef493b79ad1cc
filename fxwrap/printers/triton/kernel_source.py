"""The statements of a printed Triton kernel: which names they define, and what they compute without memory or order.

Texts of all printers are analysed alike, after printing: a kernel is a function whose statements are assignments,
branches and loops over calls of Triton's functions.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fxwrap.devices.kernel_names import find_function_name

_PURE_FUNCTIONS = frozenset({
    "abs", "arange", "broadcast", "broadcast_to", "cast", "cdiv", "div_rn", "expand_dims", "exp", "exp2", "fma",
    "full", "join", "log", "log2", "maximum", "minimum", "num_programs", "permute", "program_id", "reshape",
    "split", "sqrt", "trans", "where", "zeros",
})  # fmt: skip
"""Functions of `triton.language` whose results depend on their operands alone, and need no other thread."""

_PURE_METHODS = frozenset({"to"})
_LIBRARIES = frozenset({"libdevice"})
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
}  # fmt: skip
_CONSTANT_NAMES = frozenset({"tl", "triton", "libdevice", "float", "True", "False", "None"})


@dataclass(frozen=True)
class KernelSource:
    """A kernel's source with its function.

    Fields: `signature` has the types of the first parameters; `constants` the values of the others by name.
    """

    source: str
    signature: tuple[str, ...]
    constants: Mapping[str, object]

    @cached_property
    def module(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.source)

    @cached_property
    def function(self) -> ast.FunctionDef:
        """The kernel's function."""
        name = find_function_name(self.source)
        return next(item for item in self.module.body if isinstance(item, ast.FunctionDef) and item.name == name)

    @cached_property
    def body(self) -> list[ast.stmt]:
        """The statements of the function."""
        return self.function.body

    @cached_property
    def parameters(self) -> list[str]:
        """The names of the parameters of a launch, in the order of the signature."""
        return [item.arg for item in self.function.args.args][: len(self.signature)]

    @cached_property
    def pointers(self) -> Mapping[str, frozenset[int]]:
        """The positions of the parameters that each name of a pointer may be: a combo kernel selects pointers."""
        entries = zip(self.parameters, self.signature, strict=True)
        roots = {name: frozenset([number]) for number, (name, entry) in enumerate(entries) if entry.startswith("*")}
        for _ in range(len(self.body)):
            before = dict(roots)
            for target, value in self._assigned_pairs():
                items = pointer_names(value, roots)
                if items:
                    roots[target] = roots.get(target, frozenset()).union(*[roots[item] for item in items])
            if roots == before:
                break
        return roots

    def _assigned_pairs(self) -> Iterator[tuple[str, ast.expr]]:
        for node in ast.walk(self.function):
            if isinstance(node, ast.Assign | ast.AugAssign):
                (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                    yield from [(item.id, value) for item, value in pairs if isinstance(item, ast.Name)]
                else:
                    yield from [(item, node.value) for item in target_names(target)]

    @cached_property
    def pure_helpers(self) -> frozenset[str]:
        """The functions of the source that only compute elements from elements."""
        helpers = {
            item.name: item for item in self.module.body
            if isinstance(item, ast.FunctionDef) and item.name != self.function.name
        }  # fmt: skip
        pure = {name for name in helpers if helpers[name].args.args and helpers[name].args.args[0].arg == "_semantic"}
        for _ in helpers:
            pure |= {
                name for name, item in helpers.items()
                if all(self._is_pure_call(call, pure) for call in _calls(item.body))
            }  # fmt: skip
        return frozenset(pure)

    def is_pure(self, node: ast.AST, memory: bool = False) -> bool:
        """Whether a statement or expression accesses no memory; with `memory`, loads are pure, too."""
        calls = _calls([node])
        return all((memory and is_load(call)) or self._is_pure_call(call, self.pure_helpers) for call in calls)

    def _is_pure_call(self, call: ast.Call, helpers: Iterable[str]) -> bool:
        match call.func:
            case ast.Name(name):
                return name in helpers or name == "float"
            case ast.Attribute(ast.Name("tl"), "inline_asm_elementwise"):
                return any(item.arg == "is_pure" and ast.unparse(item.value) == "True" for item in call.keywords)
            case ast.Attribute(ast.Name("tl"), name):
                return name in _PURE_FUNCTIONS
            case ast.Attribute(ast.Name(library), _) if library in _LIBRARIES:
                return True
            case ast.Attribute(_, name):
                return name in _PURE_METHODS
            case _:
                return False

    def integer(self, node: ast.expr) -> int | None:
        """Returns the value of an integer expression over constant parameters; None for another one."""
        if isinstance(node, ast.Constant | ast.Name):
            value = node.value if isinstance(node, ast.Constant) else self.constants.get(node.id)
            return value if type(value) is int else None
        if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
            return None
        left, right = self.integer(node.left), self.integer(node.right)
        return None if left is None or right is None else _OPERATORS[type(node.op)](left, right)

    def is_constant_name(self, name: str) -> bool:
        """Whether a name is the same at each place: a module, a helper or a compile-time parameter."""
        return name in _CONSTANT_NAMES or name in self.constants or name in self.pure_helpers


def _calls(nodes: Iterable[ast.AST]) -> list[ast.Call]:
    return [item for node in nodes for item in ast.walk(node) if isinstance(item, ast.Call)]


def is_load(node: ast.AST) -> bool:
    """Whether a node is a call of `tl.load`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"


def loads(node: ast.AST) -> list[ast.Call]:
    """Returns the calls of `tl.load` in a statement, in the order of the text."""
    return sorted(filter(is_load, _calls([node])), key=lambda item: (item.lineno, item.col_offset))


def target_names(target: ast.expr) -> list[str]:
    """Returns the names that an assignment to a target defines."""
    items: Sequence[ast.expr] = target.elts if isinstance(target, ast.Tuple) else [target]
    return [item.id for item in items if isinstance(item, ast.Name)]


def defined_names(statement: ast.AST) -> set[str]:
    """Returns the names that a statement defines, inside it too."""
    return {item.id for item in ast.walk(statement) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)}


def used_names(node: ast.AST) -> set[str]:
    """Returns the names that a node reads."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Load)}


def pointer_names(node: ast.expr, pointers: Iterable[str]) -> list[str]:
    """Returns the names of pointers that an address is computed from, without those that only loads in it use."""
    if is_load(node):
        return []
    if isinstance(node, ast.Name):
        return [node.id] if node.id in pointers else []
    return [name for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
            for name in pointer_names(child, pointers)]  # fmt: skip
