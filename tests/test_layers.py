"""Imports only go down the levels of the design, and torch's private parts are reached through one package.

Every import counts: at module level, inside functions, under TYPE_CHECKING, relative or absolute, and
`importlib.import_module` of a literal name. The rules are functions over source text, so that each is shown
to catch what it forbids.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "fxwrap"
ROOT = Path(__file__).resolve().parent.parent

# From the bottom up. A row may import every row above it in this table, and never its neighbours in the same
# row. Rows that share a level of the design are that level's own order.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "torch_compat", "caching", "garbage_collection", "events", "names"),  # level 0
    ("symbolic",),
    ("devices",),
    ("options",),
    ("wrapper_ir",),  # level 1
    ("lines", "loop_ir"),  # level 2
    ("regions", "signature"),
    ("printers", "user_kernels", "inference"),
    ("fx_passes", "passes", "memory_planning", "matching"),  # level 3
    ("converters", "lowering"),  # level 4
    ("tuning", "user_passes"),  # level 5
    ("artifact", "report"),
    ("debugging",),
    ("compile_cache",),
    ("compile",),
    ("rewrite", "fx", "training"),  # level 6
    ("comparison", "fused_communication"),
    ("profiling",),
    ("testing", "builtin_devices", "integrations"),
    ("cli",),
    ("__main__", "__init__"),
)
RANKS: Mapping[str, int] = {name: rank for rank, row in enumerate(ROWS) for name in row}

# What emitted code needs while it runs stands aside: it knows level 0 only, and few may import it.
RUNTIME = "runtime"
RUNTIME_IMPORTS = frozenset({"errors", "torch_compat", "caching", "devices"})
RUNTIME_USERS_BELOW_COMPILER = ("fxwrap.converters", "fxwrap.memory_planning.native_search")

# The one package that may name torch's private parts.
GATE = "fxwrap.torch_compat."


@dataclass(frozen=True)
class Import:
    """One imported thing: the dotted name as far as the statement tells it, and the line of the statement."""

    target: str
    line: int


def module_name(path: Path) -> str:
    """The dotted name of a file below ROOT, `fxwrap.lines.__init__` for a package's own file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def project_sources() -> dict[str, str]:
    """Source text of every module of the package, by dotted name."""
    return {module_name(path): path.read_text() for path in sorted((ROOT / PACKAGE).rglob("*.py"))}


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """The nodes of a text's syntax tree."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def imports_of(module: str, source: str) -> tuple[Import, ...]:
    """Everything that a module imports, with relative imports resolved; `from a import b` is `a.b`."""
    return tuple(_imports_of(module, source))


def _imports_of(module: str, source: str) -> Iterator[Import]:
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _resolve_base(module, node)
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _called_name(node) in ("import_module", "__import__"):
            yield from _literal_import(node)


def _resolve_base(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")[: -node.level]
    return ".".join([*parts, node.module] if node.module else parts)


def _called_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _literal_import(node: ast.Call) -> Iterator[Import]:
    if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
        yield Import(node.args[0].value, node.lineno)


def target_module(target: str, modules: Mapping[str, str]) -> str | None:
    """The module of ours that an import reaches (a package is its `__init__`); None for anything else."""
    parts = target.split(".")
    if parts[0] != PACKAGE:
        return None
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for candidate in (name, f"{name}.__init__"):
            if candidate in modules:
                return candidate
    return f"{PACKAGE}.__init__"


def unit_of(module: str) -> str:
    """The row entry that a module belongs to: its file or folder directly below the package."""
    return module.split(".")[1]


def layer_errors(modules: Mapping[str, str]) -> list[str]:
    """Imports that do not go down, one message each."""
    actual = (
        f"{module}:{imported.line} imports {target}: {reason}"
        for module, source in modules.items()
        for imported in imports_of(module, source)
        if (target := target_module(imported.target, modules)) is not None
        and (reason := _forbidden(module, target)) is not None
    )
    return list(dict.fromkeys(actual))  # one statement may import several names of one module


def _forbidden(module: str, target: str) -> str | None:
    source, expected = unit_of(module), unit_of(target)
    if source == expected:
        return None
    if any(part.startswith("_") and not part.startswith("__") for part in target.split(".")):
        return "a private module of another package; import from its package"
    if source == RUNTIME:
        return None if expected in RUNTIME_IMPORTS else "the runtime knows nothing of the compiler"
    if expected == RUNTIME:
        allowed = RANKS[source] > RANKS["lowering"] or module.startswith(RUNTIME_USERS_BELOW_COMPILER)
        return None if allowed else "only converters, the native search and level 5 up use the runtime"
    if RANKS[expected] == RANKS[source]:
        return "siblings never import one another"
    return None if RANKS[expected] < RANKS[source] else "an import must go down"


def import_cycle(modules: Mapping[str, str]) -> list[str] | None:
    """A cycle of modules that import one another, or None."""
    graph = {
        module: {
            target
            for imported in imports_of(module, source)
            if (target := target_module(imported.target, modules)) not in (None, module)
        }
        for module, source in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


@cache
def torch_names(module: str, source: str) -> tuple[Import, ...]:
    """Every dotted name below `torch` that a module imports, or reaches as an attribute of an import."""
    return tuple(_torch_names(module, source))


def _torch_names(module: str, source: str) -> Iterator[Import]:
    imported = [item for item in imports_of(module, source) if item.target.split(".")[0] == "torch"]
    yield from imported
    bound = _bound_torch_names(nodes_of(source))
    for node in nodes_of(source):
        if isinstance(node, ast.Attribute) and (dotted := _dotted_name(node)):
            root, _, rest = dotted.partition(".")
            if root in bound:
                yield Import(f"{bound[root]}.{rest}", node.lineno)


def _bound_torch_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Local names that imports bind to something below torch, with the imported names."""
    bound = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: target for name, target in bound.items() if target.split(".")[0] == "torch"}


def _dotted_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := _dotted_name(node.value)):
        return f"{base}.{node.attr}"
    return None


def is_private(dotted: str) -> bool:
    """Whether a dotted name below torch is private in any part; operators (`torch.ops...`) never are."""
    if dotted.startswith("torch.ops."):
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


SYMBOL_NODE_ATTRIBUTES = frozenset({
    "expr", "shape_env", "hint", "has_hint", "require_hint", "pytype", "constant", "fx_node", "maybe_as_int",
    "is_symbolic", "guard_int", "expect_true",
})  # fmt: skip
"""Attributes of torch's internal SymNode, which `SymInt.node` returns."""

DOCUMENTED_UNDERSCORED = frozenset({"_exit", "_replace", "_fields", "_asdict"})
"""Public names of the standard library (os, named tuples) that start with an underscore."""


@cache
def foreign_private_attributes(source: str) -> tuple[Import, ...]:
    """Every `x._name` of an object that the module does not define itself, and every `x.node.expr` of a SymInt.

    A private attribute belongs to a module if one of its classes defines or sets it. Operators (`_aten._to_copy`) are
    public whatever their name.
    """
    nodes = nodes_of(source)
    own, operators = _private_attributes_defined_in(nodes), _operator_namespaces(nodes)
    return tuple(item for node in nodes if (item := _foreign_private_attribute(node, own, operators)) is not None)


def _private_attributes_defined_in(nodes: Iterable[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
                names |= {item.name} if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) else set()
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own_object(node.value):
            names.add(node.attr)
    return names


def _is_own_object(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return _called_name(node) == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _operator_namespaces(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names that a module binds to `torch.ops` or a namespace below it."""
    return {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and f"{_dotted_name(node.value)}.".startswith("torch.ops.")
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _foreign_private_attribute(node: ast.AST, own: set[str], operators: set[str]) -> Import | None:
    if isinstance(node, ast.Call) and _called_name(node) in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
        base, name = node.args[0], getattr(node.args[1], "value", None)
    elif isinstance(node, ast.Attribute):
        base, name = node.value, node.attr
        if name in SYMBOL_NODE_ATTRIBUTES and isinstance(base, ast.Attribute) and base.attr == "node":
            return Import(f"node.{name}", node.lineno)
    else:
        return None
    if not isinstance(name, str) or not name.startswith("_") or name.endswith("__"):
        return None
    if name in own or name in DOCUMENTED_UNDERSCORED:
        return None
    root = (_dotted_name(base) or "").split(".")
    is_operator = root[0] in operators or root[:2] == ["torch", "ops"]
    return None if is_operator or _is_own_object(base) else Import(name, node.lineno)


def is_inductor(dotted: str) -> bool:
    """Whether a dotted name is TorchInductor or a part of it."""
    return f"{dotted}.".startswith("torch._inductor.")


SOURCES = project_sources()


def test_every_module_has_a_level() -> None:
    units = {unit_of(module) for module in SOURCES}
    assert units, "no module found: the test looks in the wrong place"
    unknown = units - set(RANKS) - {RUNTIME}
    assert not unknown, f"give {sorted(unknown)} a row in ROWS, and a level in docs/overview.md"


def test_imports_respect_levels() -> None:
    assert not (errors := layer_errors(SOURCES)), "\n".join(errors)


def test_no_import_cycle() -> None:
    assert (cycle := import_cycle(SOURCES)) is None, " -> ".join(cycle or [])


def test_no_import_of_inductor() -> None:
    actual = [
        f"{module}:{name.line} names {name.target}"
        for module, source in SOURCES.items()
        for name in torch_names(module, source)
        if is_inductor(name.target)
    ]
    assert not actual, "\n".join(actual)


def test_private_torch_only_through_torch_compat() -> None:
    actual = [
        f"{module}:{name.line} names {name.target}: add it to fxwrap/torch_compat with its reason"
        for module, source in SOURCES.items()
        if not module.startswith(GATE)
        for name in torch_names(module, source)
        if is_private(name.target)
    ]
    assert not actual, "\n".join(actual)


def test_foreign_private_attributes_only_in_torch_compat() -> None:
    uses = {
        (module, attribute.target): f"{module}:{attribute.line} uses '{attribute.target}'"
        for module, source in SOURCES.items()
        if not module.startswith(GATE)
        for attribute in foreign_private_attributes(source)
    }
    assert not uses, "\n".join([f"{text}: add a function to torch_compat, or make it public" for text in uses.values()])


EMPTY = {f"fxwrap.{name}.__init__": "" for row in ROWS for name in row} | {
    "fxwrap.runtime.__init__": "",
    "fxwrap.__init__": "",
    "fxwrap.lines._private": "",
    "fxwrap.lines.memory": "",
}


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("fxwrap.lines.kernel", "from fxwrap.passes import fold", "must go down"),
        ("fxwrap.lines.kernel", "from ..passes import fold", "must go down"),
        ("fxwrap.lines.kernel", "from .. import passes", "must go down"),
        ("fxwrap.lines.kernel", "def f():\n    import fxwrap.lowering", "must go down"),
        ("fxwrap.lines.kernel", "if TYPE_CHECKING:\n    from fxwrap.compile.compiler import run", "must go down"),
        ("fxwrap.lines.kernel", "importlib.import_module('fxwrap.compile.compiler')", "must go down"),
        ("fxwrap.compile.compiler", "from fxwrap import Program", "must go down"),
        ("fxwrap.compile.compiler", "import fxwrap", "must go down"),
        ("fxwrap.passes.fold", "from fxwrap.matching import match", "siblings"),
        ("fxwrap.lines.kernel", "import fxwrap.loop_ir", "siblings"),
        ("fxwrap.passes.fold", "from fxwrap.lines import _private", "private module"),
        ("fxwrap.runtime.launch", "from fxwrap.wrapper_ir import Program", "knows nothing of the compiler"),
        ("fxwrap.lowering.calls.nodes", "from fxwrap.runtime import launch", "only converters"),
    ],
)
def test_upward_import_is_caught(module: str, source: str, reason: str) -> None:
    (error,) = layer_errors({**EMPTY, module: source})
    assert reason in error


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fxwrap.lines.kernel", "from fxwrap.wrapper_ir import Program\nfrom .memory import A\nimport torch"),
        ("fxwrap.lines.kernel", "from . import _private"),
        ("fxwrap.printers.triton", "from fxwrap.loop_ir import Body"),
        ("fxwrap.converters.fx.converter", "from fxwrap.runtime import launch"),
        ("fxwrap.converters.interpreter.interpreter", "from fxwrap.runtime import launch"),
        ("fxwrap.compile.compiler", "from fxwrap.runtime import launch"),
        ("fxwrap.runtime.launch", "from fxwrap.errors import InputError"),
        ("fxwrap.__init__", "from fxwrap.compile.compiler import compile_graph"),
    ],
)
def test_downward_import_is_allowed(module: str, source: str) -> None:
    assert layer_errors({**EMPTY, module: source}) == []


def test_cycle_inside_a_package_is_caught() -> None:
    chain = {**EMPTY, "fxwrap.lines.a": "from .b import x", "fxwrap.lines.b": ""}
    assert import_cycle(chain) is None
    cycle = import_cycle({**chain, "fxwrap.lines.b": "def f():\n    from . import a"})
    assert set(cycle or []) == {"fxwrap.lines.a", "fxwrap.lines.b"}


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor",
        "from torch import _inductor",
        "from torch._inductor.ir import Buffer",
        "import torch\ntorch._inductor.config",
        "importlib.import_module('torch._inductor.config')",
    ],
)
def test_inductor_is_caught(source: str) -> None:
    assert any(is_inductor(name.target) for name in torch_names("fxwrap.compile.backend", source))


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import torch._dynamo", True),
        ("from torch.utils._pytree import tree_map", True),
        ("from torch.fx import _symbolic_trace", True),
        ("import torch.fx as fx\nfx._lazy_graph_module", True),
        ("import torch\ndef f():\n    return torch._C._get_tracing_state()", True),
        ("from torch import Tensor\nTensor._make_subclass", True),
        ("import torch\ntorch.ops.aten._to_copy.default\ntorch.__version__", False),
        ("import torch\nTEXT = 'torch._C._cuda_getCurrentRawStream(0)'", False),
        ("def f(self):\n    return self._torch", False),
    ],
)
def test_private_torch_names_are_recognised(source: str, private: bool) -> None:
    assert any(is_private(name.target) for name in torch_names("fxwrap.compile.backend", source)) is private


@pytest.mark.parametrize(
    ("source", "attribute"),
    [
        ("def f(tensor):\n    return tensor._cdata", "_cdata"),
        ("def f(node):\n    return node.target._schema.name", "_schema"),
        ("def f(x):\n    return getattr(x, '_base', None)", "_base"),
        ("def f(call):\n    call._boxed_call = True", "_boxed_call"),
        ("def f(size):\n    return size.node.expr", "node.expr"),
        ("class A:\n    def f(self, x):\n        return self._a + x._b", "_b"),
    ],
)
def test_foreign_private_attribute_is_caught(source: str, attribute: str) -> None:
    assert [item.target for item in foreign_private_attributes(source)] == [attribute]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    _a: int\n    def f(self, other):\n        return other._a",
        "class A:\n    def __init__(self):\n        self._a = 1\n    def g(self):\n        return copy(self)._a",
        "class A(B):\n    def f(self):\n        return super()._inherited()",
        "import torch\n_aten = torch.ops.aten\n_aten._to_copy.default",
        "import torch\ntorch.ops.aten._softmax.default",
        "def f(x):\n    return x.__class__, x.node.name",
    ],
)
def test_own_private_attribute_is_allowed(source: str) -> None:
    assert not foreign_private_attributes(source)
