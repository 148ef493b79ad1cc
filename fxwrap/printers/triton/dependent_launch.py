"""Programmatic dependent launch (compute capability 9.0): a kernel begins before the launch before it has ended.

The kernel signals at once that its successor may start, computes indices, reads or prefetches memory that no launch
before it writes, and then waits. All other statements, which stay as they were printed, run after the wait: that a
program waits once, whatever it computes, follows from the form of the text.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from fxwrap.printers.triton.helpers import helper_sources
from fxwrap.printers.triton.kernel_source import (
    KernelSource,
    defined_names,
    is_load,
    loads,
    pointer_names,
    target_names,
    used_names,
)

_LOADED_BYTES = 128
"""The bytes that each thread loads before the wait at most: 32 registers, which it would need soon after."""

_PREFETCHED_BYTES = 4096
"""The bytes that each warp prefetches at most: as many warps as run at once then prefetch less than half a cache."""

_PREFETCHES = 8
"""The prefetch instructions of a thread for a load of a loop at most."""

_LINE_BYTES = 128
"""The bytes that one prefetch moves."""


def add_dependent_launch(
    source: str, signature: tuple[str, ...], options: Sequence[tuple[str, object]], unwritten: Collection[int]
) -> tuple[str, tuple[int, ...]]:
    """Returns a printed kernel's source with both instructions, and the parameters that it reads before the wait.

    Args:
        source: the kernel's source.
        signature: of the kernel.
        options: of the kernel.
        unwritten: the positions of tensors that no launch writes which may run while the kernel starts.
    """
    kernel = KernelSource(source, signature, {name: item for name, item in options if name.isupper()})
    warps = dict(options).get("num_warps", 4)
    assert isinstance(warps, int), "the number of warps is an integer"
    return _Prelude(kernel, frozenset(unwritten), warps).text()


class _NotEarlyError(Exception):
    """A value that cannot be computed before the wait."""


@dataclass(frozen=True, eq=False)
class _Definition:
    """The statement that defines a name where it is used, with the definitions before it.

    `depth` is the number of loops around it in the prelude. Without a statement, the name has several values, or, with
    `text`, that of the prelude.
    """

    statement: ast.stmt | None = None
    before: Mapping[str, _Definition] = field(default_factory=dict)
    depth: int = 0
    text: str = ""


_UNKNOWN = _Definition()
_Definitions = dict[str, _Definition]
_Thin = Mapping[int, ast.expr]
"""Ranges of the loop that the prelude replaces by ranges with one element a line of memory, by identity."""


class _Prelude:
    """The statements before the wait, which repeat those that addresses are computed from."""

    def __init__(self, kernel: KernelSource, unwritten: frozenset[int], warps: int) -> None:
        self.kernel = kernel
        self.unwritten = unwritten
        self.warps = warps
        self.names = defined_names(kernel.function) | used_names(kernel.function) | {*kernel.parameters}
        self.levels: list[list[str]] = [[]]
        self.copies: dict[tuple[_Definition, str, tuple[int, ...]], str] = {}
        self.loaded: dict[int, str] = {}  # by the identity of the load
        self.loaded_bytes = 0.0
        self.read: set[int] = set()
        self.prefix = self._pure_prefix()
        self.definitions: _Definitions = {}
        for statement in kernel.body[: self.prefix]:
            self._define(self.definitions, statement, 0)

    def text(self) -> tuple[str, tuple[int, ...]]:
        """Returns the kernel's new source and the parameters that it reads early."""
        replaced: list[tuple[ast.Call, str]] = []
        current = dict(self.definitions)
        for statement in self.kernel.body[self.prefix :]:
            if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr):
                for load in loads(statement):
                    with suppress(_NotEarlyError), self._attempt():
                        replaced.append((load, self._load(load, current)))
            elif isinstance(statement, ast.For):
                self._prefetch_loop(statement, current)
            self._define(current, statement, 0)
        return self._inserted(replaced), tuple(sorted(self.read))

    def _pure_prefix(self) -> int:
        """Returns the number of statements before the first one that accesses memory."""
        kinds = (ast.Assign, ast.AugAssign, ast.If)
        count = 0
        for statement in self.kernel.body:
            if not isinstance(statement, kinds) or not self.kernel.is_pure(statement):
                break
            count += 1
        return count

    def _define(self, definitions: _Definitions, statement: ast.stmt, depth: int) -> None:
        """Records the names that a statement defines."""
        is_copied = isinstance(statement, ast.Assign) and self.kernel.is_pure(statement, memory=True)
        definition = _Definition(statement, dict(definitions), depth) if is_copied else _Definition(depth=depth)
        definitions |= dict.fromkeys(defined_names(statement), definition)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Restores the prelude if its body raises."""
        saved = [list(level) for level in self.levels], dict(self.copies), dict(self.loaded), set(self.read)
        size = self.loaded_bytes
        try:
            yield
        except _NotEarlyError:
            self.levels, self.copies, self.loaded, self.read = saved
            self.loaded_bytes = size
            raise

    # --- values -------------------------------------------------------------------------------------------------------

    def _load(self, load: ast.Call, definitions: Mapping[str, _Definition]) -> str:
        """Prints a load unless it is printed, and returns the name of its result."""
        if id(load) not in self.loaded:
            roots = self._roots(load)
            if load.lineno != load.end_lineno:
                raise _NotEarlyError
            size = self._elements(load, definitions) * self._itemsize(roots) / (32 * self.warps)
            self.loaded_bytes += size if size > 4 else 0  # one element a thread is no more than an index
            if self.loaded_bytes > _LOADED_BYTES:
                raise _NotEarlyError
            arguments = [ast.unparse(self._rewrite(item, definitions, {})) for item in load.args]
            arguments += [
                f"{item.arg}={ast.unparse(self._rewrite(item.value, definitions, {}))}" for item in load.keywords
            ]
            pointer = pointer_names(load.args[0], self.kernel.pointers)[0]
            name = self._fresh(f"{pointer.removesuffix('_ptr')}_early")
            self.levels[0].append(f"{name} = tl.load({', '.join(arguments)})")
            self.read |= roots
            self.loaded[id(load)] = name
        return self.loaded[id(load)]

    def _roots(self, load: ast.Call) -> frozenset[int]:
        """Returns the parameters that a load may read. Raises for those that may be written."""
        names = pointer_names(load.args[0], self.kernel.pointers)
        roots = frozenset[int]().union(*[self.kernel.pointers[name] for name in names])
        if not roots or not roots <= self.unwritten:
            raise _NotEarlyError
        return roots

    def _rewrite(self, node: ast.AST, definitions: Mapping[str, _Definition], thin: _Thin) -> ast.AST:
        """Returns a copy of an expression that has its value before the wait."""
        if id(node) in thin:
            return thin[id(node)]
        if isinstance(node, ast.Call) and is_load(node):
            return ast.Name(self._load(node, definitions), ast.Load())
        if isinstance(node, ast.Name):
            return ast.Name(self._name(node.id, definitions.get(node.id), thin), ast.Load())
        if isinstance(node, ast.Call) and not self.kernel.is_pure(node, memory=True):
            raise _NotEarlyError
        fields: dict[str, object] = {}
        for name, content in ast.iter_fields(node):
            if isinstance(content, list):
                fields[name] = [self._rewrite(item, definitions, thin) for item in content]
            else:
                is_node = isinstance(content, ast.AST) and not isinstance(content, ast.expr_context | ast.operator)
                fields[name] = self._rewrite(content, definitions, thin) if is_node else content
        return type(node)(**fields)

    def _expression(self, node: ast.expr, definitions: Mapping[str, _Definition], thin: _Thin) -> ast.expr:
        rewritten = self._rewrite(node, definitions, thin)
        assert isinstance(rewritten, ast.expr), "expressions become expressions"
        return rewritten

    def _name(self, name: str, definition: _Definition | None, thin: _Thin) -> str:
        """Returns the name of a value before the wait; prints its statement again if it is not there yet."""
        if definition is None or self.kernel.is_constant_name(name):
            return name
        if definition.text:
            return definition.text
        if self.definitions.get(name) is definition and not self._is_thinned(definition, thin):
            return name
        statement = definition.statement
        if not isinstance(statement, ast.Assign):
            raise _NotEarlyError
        key = (definition, name, tuple(sorted(thin)) if self._is_thinned(definition, thin) else ())
        if key not in self.copies:
            value = self._rewrite(statement.value, definition.before, thin)
            for item in target_names(statement.targets[0]):
                self.copies[definition, item, key[2]] = self._fresh(f"{item}_early")
            names = [self.copies[definition, item, key[2]] for item in target_names(statement.targets[0])]
            self.levels[definition.depth].append(f"{', '.join(names)} = {ast.unparse(value)}")
        return self.copies[key]

    def _is_thinned(self, definition: _Definition, thin: _Thin) -> bool:
        """Whether a value is computed from a range that is thinned."""
        statement = definition.statement
        if not thin or not isinstance(statement, ast.Assign):
            return False
        if any(id(item) in thin for item in ast.walk(statement.value)):
            return True
        inner = [definition.before.get(name) for name in used_names(statement.value)]
        return any(item is not None and self._is_thinned(item, thin) for item in inner)

    def _fresh(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.names:
            number += 1
            name = f"{wanted}_{number}"
        self.names.add(name)
        return name

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _itemsize(self, roots: Collection[int]) -> int:
        bits = "".join([item for item in self.kernel.signature[min(roots)] if item.isdigit()])
        return max(int(bits) // 8, 1)

    def _elements(self, node: ast.AST, definitions: Mapping[str, _Definition]) -> int:
        """Returns the number of elements of a block: the product of the ranges that it varies along."""
        product = 1
        for _, size in self._ranges(node, definitions):
            product *= size
        return product

    def _ranges(self, node: ast.AST, definitions: Mapping[str, _Definition]) -> frozenset[tuple[str, int]]:
        """Returns the ranges that an expression varies along, by the text of their dimension, with their sizes."""
        texts = frozenset[tuple[str, int]]()
        subscripts = {id(item.value): item for item in ast.walk(node) if isinstance(item, ast.Subscript)}
        for item in ast.walk(node):
            if isinstance(item, ast.Call) and _is_arange(item):
                size = self.kernel.integer(item.args[1])
                if size is None:
                    raise _NotEarlyError
                texts |= {(ast.unparse(subscripts[id(item)].slice) if id(item) in subscripts else "", size)}
            elif isinstance(item, ast.Name) and (definition := definitions.get(item.id)) is not None:
                if isinstance(definition.statement, ast.Assign):
                    texts |= self._ranges(definition.statement.value, definition.before)
        return texts

    # --- loops --------------------------------------------------------------------------------------------------------

    def _prefetch_loop(self, loop: ast.For, definitions: Mapping[str, _Definition]) -> None:
        """Prints prefetches of what a loop loads in its first iterations, without the loads of the others."""
        with suppress(_NotEarlyError), self._attempt():
            if not isinstance(loop.iter, ast.Call) or ast.unparse(loop.iter.func) != "tl.range":
                raise _NotEarlyError
            bounds = [self._expression(item, definitions, {}) for item in loop.iter.args]
            bounds = [*([ast.Constant(0)] if len(bounds) == 1 else []), *bounds]
            first, last, step = [*bounds, ast.Constant(1)][:3]
            width = self.kernel.integer(step)
            moved = self._loop_body(loop, definitions, 1)
            if not moved or width is None:
                raise _NotEarlyError
            count = max(_PREFETCHED_BYTES * self.warps // moved, 1) * width
            begin, end = self.kernel.integer(first), self.kernel.integer(last)
            if begin is not None and end is not None:
                limit = str(min(end, begin + count))
            else:
                limit = f"tl.minimum({ast.unparse(last)}, {ast.unparse(first)} + {count})"
            self._close_level(f"tl.range({ast.unparse(first)}, {limit}, {ast.unparse(step)})")

    def _loop_body(self, loop: ast.For, definitions: Mapping[str, _Definition], depth: int) -> int:
        """Prints the prefetches of a loop's body, and returns the bytes that an iteration of them moves."""
        assert isinstance(loop.target, ast.Name), "printed loops have one variable"
        variable = self._fresh(f"{loop.target.id}_early")
        current = {**definitions, **dict.fromkeys(defined_names(loop), _UNKNOWN)}
        current[loop.target.id] = _Definition(depth=depth, text=variable)
        del self.levels[depth:]
        self.levels.append([variable])
        moved = 0
        for statement in loop.body:
            if isinstance(statement, ast.For) and ast.unparse(statement.iter).startswith("tl.static_range("):
                with suppress(_NotEarlyError), self._attempt():
                    moved += self._static_loop(statement, current, depth)
            elif isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr):
                for load in loads(statement):
                    with suppress(_NotEarlyError), self._attempt():
                        moved += self._prefetch(load, current, depth)
            self._define(current, statement, depth)
        return moved

    def _static_loop(self, loop: ast.For, definitions: Mapping[str, _Definition], depth: int) -> int:
        """Prints the prefetches of an unrolled loop, and returns their bytes."""
        assert isinstance(loop.iter, ast.Call), "printed loops run over ranges"
        count = self.kernel.integer(loop.iter.args[0])
        moved = self._loop_body(loop, definitions, depth + 1)
        if not moved or count is None or len(loop.iter.args) > 1:
            raise _NotEarlyError
        self._close_level(ast.unparse(loop.iter))
        return count * moved

    def _close_level(self, iterated: str) -> None:
        variable, *lines = self.levels.pop()
        self.levels[-1] += [f"for {variable} in {iterated}:", *[f"    {line}" for line in lines]]

    def _prefetch(self, load: ast.Call, definitions: Mapping[str, _Definition], depth: int) -> int:
        """Prints the prefetch of a load, one instruction for each line of memory, and returns the bytes of the load."""
        roots = self._roots(load)
        itemsize, elements = self._itemsize(roots), self._elements(load.args[0], definitions)
        arange, thin, addresses = self._unit_range(load.args[0], definitions), dict[int, ast.expr](), elements
        if arange is not None:
            size = self.kernel.integer(arange.args[1])
            assert size is not None, "the elements of the block are counted"
            lines = max(size * itemsize // _LINE_BYTES, 1)
            addresses = elements // size * lines
            thin[id(arange)] = ast.parse(
                f"tl.arange(0, {lines}) * {_LINE_BYTES // itemsize}" if lines > 1 else "tl.arange(0, 1)", mode="eval"
            ).body
        if addresses > _PREFETCHES * 32 * self.warps:
            raise _NotEarlyError
        operands = [load.args[0], *[item.value for item in load.keywords if item.arg == "mask"]]
        texts = [ast.unparse(self._rewrite(item, definitions, thin)) for item in operands]
        self.levels[depth].append(f"prefetch({', '.join(texts)})")
        self.read |= roots
        return elements * itemsize

    def _unit_range(self, address: ast.expr, definitions: Mapping[str, _Definition]) -> ast.Call | None:
        """Returns the range along which an address has consecutive elements; None if there is none."""
        names = [item.id for item in ast.walk(address) if isinstance(item, ast.Name)]
        for term in _terms(address):
            inner = [term]
            if isinstance(term, ast.Name):
                definition = definitions.get(term.id, _UNKNOWN)
                if names.count(term.id) > 1 or not isinstance(definition.statement, ast.Assign):
                    continue
                inner = _terms(definition.statement.value)
            ranges = [item.value if isinstance(item, ast.Subscript) else item for item in inner]
            calls = [item for item in ranges if isinstance(item, ast.Call) and _is_arange(item)]
            if len(calls) == 1:
                return calls[0]
        return None

    # --- the text -----------------------------------------------------------------------------------------------------

    def _inserted(self, replaced: Sequence[tuple[ast.Call, str]]) -> str:
        """Returns the source with the prelude and the wait, and loads replaced by the names of their results."""
        lines = [line.encode() for line in self.kernel.source.splitlines()]
        for load, name in sorted(replaced, key=lambda item: (item[0].lineno, item[0].col_offset), reverse=True):
            line = lines[load.lineno - 1]
            lines[load.lineno - 1] = line[: load.col_offset] + name.encode() + line[load.end_col_offset :]
        texts = [line.decode() for line in lines]
        first, waiting = self._line_before(self.kernel.body[0]), self._line_before(self.kernel.body[self.prefix])
        prelude = [*self.levels[0], "wait_for_launches()"]
        texts[waiting:waiting] = [f"    {line}" for line in prelude]
        texts.insert(first, "    launch_dependents()")
        head = self.kernel.function.decorator_list[0].lineno - 1
        helpers = "\n\n\n".join(helper_sources(["wait_for_launches", "launch_dependents", *self._prefetch_helper()]))
        texts[head:head] = [*helpers.splitlines(), "", ""]
        return "\n".join(texts) + "\n"

    def _prefetch_helper(self) -> list[str]:
        return ["prefetch"] if any("prefetch(" in line for line in self.levels[0]) else []

    def _line_before(self, statement: ast.stmt) -> int:
        """Returns the index of the first line of a statement, with the comments above it."""
        lines, position = self.kernel.source.splitlines(), statement.lineno - 1
        while lines[position - 1].strip().startswith("#"):
            position -= 1
        return position


def _is_arange(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "tl.arange"


def _terms(node: ast.expr) -> list[ast.expr]:
    """Returns the summands of an expression."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]
