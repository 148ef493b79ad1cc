"""Blocks of fragments as Triton code: positions and masks of the elements that lanes have, and their loads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from fxwrap.loop_ir import GroupedSums, Index, IndirectIndex, Kernel, Load
from fxwrap.printers.triton.fragment_digits import find_digits
from fxwrap.printers.triton.fragments import FRAGMENT_COLUMNS, ROW_LANES, RUN, FragmentBlock, make_fragments, shape_text
from fxwrap.printers.triton.group_sums import GroupSumPrinter
from fxwrap.printers.triton.kernel_text import BodyParameters, TritonIndexPrinter
from fxwrap.printers.triton.tiling import FragmentConfiguration


class FragmentBlockPrinter(GroupSumPrinter):
    """Prints the positions and the loads of the blocks of a kernel of `sum_groups` whose operands are fragments."""

    configuration: FragmentConfiguration

    def __init__(
        self,
        kernel: Kernel,
        configuration: FragmentConfiguration,
        limits: Mapping[str, int],
        parameters: BodyParameters,
        form: GroupedSums,
        row_dtype: torch.dtype,
    ) -> None:
        self.digits = find_digits(form, row_dtype) if configuration.raw_digits else {}
        super().__init__(kernel, configuration, limits, parameters, form, row_dtype)
        self.use_int64 = True  # constant distances are then part of the instructions that load
        self.result_block = "pyx" if any(item.name == "x" for item in self.whole.dimensions) else "py"
        self.fragments = parts = make_fragments(configuration)
        self.digit_names: dict[tuple[str, int], tuple[str, str]] = {}
        self.row_block = FragmentBlock("row", self.result_block.replace("y", "") + "r", (
            ("lane", ROW_LANES // parts.side), ("side", parts.side), ("joined", parts.joined), ("x", parts.rows),
            ("warp", parts.warps), ("part", parts.parts), ("repeat", parts.repeats),
            ("run", parts.lane_bytes // RUN), ("element", RUN),
        ))  # fmt: skip
        self.varying = kernel.varying_along((*form.groups, *form.contraction.summed))
        self.reloads = bool(self.digits) and parts.chunks > 1
        self.chunks = 1 if self.reloads else parts.chunks
        self.column_blocks = [
            FragmentBlock("column" + (f"_{number}" if number else ""), "pyr", (
                ("lane", ROW_LANES // parts.side), ("side", parts.side), ("y", FRAGMENT_COLUMNS), ("warp", parts.warps),
                ("eight", parts.columns // FRAGMENT_COLUMNS), ("part", parts.parts), ("chunk", self.chunks),
                ("repeat", parts.repeats), ("byte", parts.lane_bytes),
            ), number * parts.side)
            for number in range(parts.chunks // self.chunks)
        ]  # fmt: skip
        pair = min(parts.joined, 2)
        self.coefficient_block = FragmentBlock("coefficient", "py", (
            ("joined", parts.joined // pair), ("x", ROW_LANES * pair // parts.joined), ("y", FRAGMENT_COLUMNS),
            ("warp", parts.warps), ("eight", parts.columns // FRAGMENT_COLUMNS),
            *((("part", parts.parts), ("pair", pair)) if pair > 1 else (("part", parts.parts),)),
        ))  # fmt: skip
        self.sum_shape = (parts.parts, parts.warps, parts.columns, FRAGMENT_COLUMNS)
        self.row_mask = self.joined_mask = ""
        self.group_masks: dict[str, str] = {}
        self.block: FragmentBlock | None = None
        self.texts: dict[str, dict[int, str]] = {}
        self.result_text: dict[int, str] = {}
        self.block_indices: dict[str, TritonIndexPrinter] = {}

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _emit_program_offsets(self) -> None:
        """Prints the first column of the program."""
        assert not self.whole.outer, "configurations have blocks of columns and all rows"
        self.cast_symbols()
        self.first = self._stable_name("first")
        block = self._dimension("y").block_constant
        self.line(f"{self.first} = {self.parameters.program}.to(tl.int64) * {block}")

    @contextmanager
    def _inside(self, block: FragmentBlock) -> Iterator[None]:
        """Makes a block the current one: its values, names of axes, and masks."""
        outer = self.text, self.index_printer
        self.side = block.name
        if block.name not in self.block_indices:
            axes = [axis for name in block.loops for axis in self._dimension(name).axes]
            names = {axis: self._stable_name(axis.name) for axis in axes}
            self.block_indices[block.name] = self._indices_at(names)
        self.block, self.text = block, self.texts.setdefault(block.name, {})
        self.index_printer = self.block_indices[block.name]
        self._enter(block.loops)
        masks = {"p": self.group_masks.get(block.name, "")}
        if block is self.row_block:
            masks |= {"x": self.row_mask, "r": self.joined_mask}
        named = [(number, masks.get(item.name)) for number, item in enumerate(self.tile.dimensions)]
        self.masks = {number: mask for number, mask in named if mask}
        yield
        self.block, self.side = None, ""
        self.text, self.index_printer = outer

    def _emit_position(self, name: str, text: str) -> None:
        """Prints the positions along a dimension of the kernel, and along its axes."""
        dimension = self._dimension(name)
        single = len(dimension.axes) == 1
        flat = self.axis_names[dimension.axes[0]] if single else self._stable_name(name)
        self.line(f"{flat} = {text or 'tl.cast(0, tl.int64)'}")
        self.positions[name] = flat
        if not single:
            self._unflatten(dimension.axes, flat, self.axis_names)

    def _emit_fixed_positions(self, block: FragmentBlock) -> None:
        """Prints the positions of a block that are the same in all steps, and the masks of rows."""
        parts, run = self.fragments, ROW_LANES * self.fragments.lane_bytes
        lane = {"lane": parts.lane_bytes, "run": RUN, "element": 1, "repeat": run, "byte": 1}
        if block is not self.row_block:
            if block in self.column_blocks:
                self._emit_position("r", block.position({name: lane[name] for name in ("lane", "repeat", "byte")}))
            columns = block.position({"eight": FRAGMENT_COLUMNS, "y": 1})
            self._emit_position("y", f"{self.first} + {columns}")
            return
        self._emit_position("r", block.position({name: lane[name] for name in ("lane", "run", "element", "repeat")}))
        if "x" in block.loops:
            x = self._dimension("x")
            self._emit_position("x", block.position({"x": 1}))
            if x.masked:
                self.row_mask = self._stable_name("mask")
                self.line(f"{self.row_mask} = {self.positions['x']} < {self.index_printer.size_operand(x.size)}")
        if parts.side > 1:
            self.joined_mask = self._stable_name("own")
            side, joined = block.positions("side"), block.positions("joined")
            self.line(f"{self.joined_mask} = ({side}) == ({joined}) % {parts.side}")

    def _emit_group_positions(self, block: FragmentBlock, start: str) -> None:
        """Prints the positions of a block's groups in a step, and the mask of those that are there."""
        parts, p = self.fragments, self._dimension("p")
        factors = {"warp": parts.parts * parts.joined, "part": parts.joined}
        if block is self.row_block:
            factors["joined"] = 1
        elif block in self.column_blocks:
            factors |= {"chunk": parts.side, "side": 1}
        else:
            factors |= {"joined": 2, "pair": 1}
        first = str(block.first_group or "")
        self._emit_position("p", " + ".join([item for item in (start, block.position(factors), first) if item]))
        if p.masked:
            self.group_masks[block.name] = mask = self._stable_name("group_mask")
            self.line(f"{mask} = {self.positions['p']} < {self.index_printer.size_operand(p.size)}")
            self.masks[self.tile.dimensions.index(p)] = mask

    def _emit_all(self, positions: Collection[int]) -> None:
        """Prints operations that the current block does not have."""
        for position in sorted(positions):
            if position not in self.text:
                self.results.pop(position, None)
                self._operation(position, looped=True)

    def _emit_loads(self, positions: Collection[int]) -> None:
        """Prints the loads at indices that no operation computes, so that all of a step are under way together."""
        for position in sorted(positions):
            load = self.kernel.operations[position]
            if not isinstance(load, Load) or load.mask is not None:
                continue
            if any(isinstance(atom, IndirectIndex) for atom in load.index.atoms()):
                continue
            self._emit_all([position])
            if position in self.schedule.inlined and self.text[position].startswith("tl.load"):
                name = self._name(position, load.buffer)
                self.line(f"{name} = {self.text[position]}", load.origin)
                self.text[position] = name

    # --- memory -------------------------------------------------------------------------------------------------------

    def _eviction_policy(self, operation: Load, again: bool, last_use: bool) -> str:
        """Returns the policy of a load: weights are read once."""
        return "evict_first" if self.block in self.column_blocks else ""

    def _address(self, buffer: str, index: Index, span: frozenset[int], own: frozenset[int]) -> str:
        """Returns an address; those of coefficients have all dimensions of their block, as sums have."""
        if self.block is None:
            return super()._address(buffer, index, span, own)
        if (self.block is not self.coefficient_block and own >= span) or not span:
            return f"{self.pointers[buffer]} + {self._index_text(index)}"
        text = self._index_text(index) if index.constant is None else f"tl.full((), {index.constant}, tl.int64)"
        return f"{self.pointers[buffer]} + tl.broadcast_to({text}, {self.block.shape})"

    def _load_contiguous(self, pair: tuple[int, int], operation: Load) -> str:
        r = self.tile.reduced
        first = self.kernel.operations[pair[0]]
        assert r is not None and isinstance(first, Load) and self.block is self.row_block, "pairs are those of rows"
        dimension, own, block = self.tile.dimensions[r], self._index_dimensions(first.index), self.row_block
        base = self.index_printer(first.index.substitute(dict.fromkeys(dimension.axes, 0)))
        run = ROW_LANES * self.fragments.lane_bytes
        lanes = block.position({"lane": 2 * self.fragments.lane_bytes, "run": 2 * RUN, "repeat": 2 * run})
        terms = [base, *([lanes] if lanes else []), f"tl.arange(0, {2 * RUN})[None, :]"]
        mask = self._mask(own, None)
        wide_shape = shape_text((block.rows, 2 * RUN))
        arguments = [f"{self.pointers[first.buffer]} + tl.broadcast_to({' + '.join(terms)}, {wide_shape})"]
        arguments += [f"mask={mask}", "other=0.0"] if mask else []
        wide = self.names.create_name(first.buffer)
        self.line(f"{wide} = tl.load({', '.join(arguments)})", first.origin)
        return wide

    def _split_pair(self, pair: tuple[int, int], wide: str) -> None:
        first, block = self.kernel.operations[pair[0]], self.row_block
        assert isinstance(first, Load), "pairs are loads"
        texts = [self._name(position, first.buffer) for position in pair]
        self.line(f"{', '.join(texts)} = tl.split(tl.reshape({wide}, {shape_text((block.rows, RUN, 2))}))")
        for position, text in zip(pair, texts, strict=True):
            self.text[position] = text
