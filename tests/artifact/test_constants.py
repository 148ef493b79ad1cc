"""Constants inside and outside the file: storage sharing is preserved, and constants passed by a caller are checked."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fxwrap
from fxwrap.artifact.constants import layout_of
from fxwrap.artifact.tensor_file import header_bytes
from fxwrap.errors import ArtifactError
from fxwrap.options import EMITTERS
from fxwrap.torch_compat import DTYPE_NAMES
from fxwrap.wrapper_ir import ConstantStore, contiguous_strides
from tests.artifact.programs import Small, batch, compiled


def program_of(constants: dict[str, Tensor], written: str = "") -> fxwrap.Program:
    """A program that returns copies of its constants, after it has doubled one of them in place."""
    lines, declared = [], []
    for name, tensor in constants.items():
        strides = "" if tensor.stride() == contiguous_strides(tuple(tensor.shape)) else _listed(" | ", tensor.stride())
        type_ = f"{DTYPE_NAMES[tensor.dtype]}[{_listed('', tensor.shape)}{strides}]@cpu"
        lines.append(f"  %{name}_copy = extern.call @aten.clone.default(%{name}) : {type_}\n")
        declared.append(f"constant %{name}: {'mutable ' if written == name else ''}{type_}\n")
    if written:
        lines.insert(0, f"  extern.mutate @aten.mul_.Tensor(%{written}, %{written}) writes=(%{written})\n")
    results = ", ".join([f"%{name}_copy" for name in constants])
    text = f"program @f() {{\n{''.join(lines)}  control.return({results})\n}}\n{''.join(declared)}"
    return fxwrap.parse(text).replace(store=ConstantStore(constants))


def _listed(before: str, numbers: tuple[int, ...]) -> str:
    return before + ", ".join(map(str, numbers))


def test_every_dtype_round_trips_bitwise(tmp_path: Path) -> None:
    constants = {}
    for dtype in (torch.bool, torch.uint16, torch.float16, torch.bfloat16, torch.float8_e5m2fnuz, torch.complex128):
        content = torch.arange(48, dtype=torch.uint8) * 5 % (2 if dtype == torch.bool else 251)
        constants[str(dtype).removeprefix("torch.")] = content.view(dtype)
    constants["empty"] = torch.empty(0, 3)
    constants["number"] = torch.tensor(7.5)
    fxwrap.save(program_of(constants), tmp_path / "f.fxw")
    for mmap in (True, False):
        tensors = fxwrap.load(tmp_path / "f.fxw", emitter="interpreter", mmap=mmap).program.store.tensors
        assert list(tensors) == list(constants)
        for name, tensor in constants.items():
            assert (tensors[name].dtype, tensors[name].shape) == (tensor.dtype, tensor.shape)
            assert tensors[name].view(torch.uint8).equal(tensor.view(torch.uint8)) if tensor.dim() else True


@pytest.mark.parametrize("mmap", [True, False])
def test_storage_sharing_is_preserved(mmap: bool, tmp_path: Path) -> None:
    base = torch.randn(8, 6)
    constants = {
        "row": base[1], "whole": base, "transposed": base.t(), "part": base[2:5, 1:4], "alone": torch.randn(3),
        "spread": torch.randn(4, 1).expand(4, 5), "channels": torch.randn(1, 2, 3, 4).contiguous(
            memory_format=torch.channels_last), "bits": base.view(torch.int32)[0],
    }  # fmt: skip
    wanted = {name: tensor.clone() for name, tensor in constants.items()}
    fxwrap.save(program_of(constants, written="part"), tmp_path / "f.fxw")
    assert (tmp_path / "f.fxw").stat().st_size < 20_000
    loaded = fxwrap.load(tmp_path / "f.fxw", mmap=mmap)
    tensors = loaded.program.store.tensors
    for name, tensor in constants.items():
        assert tensors[name].equal(wanted[name]) and tensors[name].stride() == tensor.stride()
        same = tensors[name].untyped_storage().data_ptr() == tensors["whole"].untyped_storage().data_ptr()
        assert same == (name in ("row", "whole", "transposed", "part", "bits"))
    results = loaded()
    base[2:5, 1:4] *= base[2:5, 1:4].clone()
    for result, tensor in zip(results, constants.values(), strict=True):
        assert result.equal(tensor)
    again = fxwrap.load(tmp_path / "f.fxw", mmap=mmap)
    assert again.program.store.tensors["whole"].equal(wanted["whole"])  # writes stay in the process


def test_only_the_visible_part_of_a_storage_is_saved() -> None:
    layout = layout_of({"a": torch.zeros(1 << 20)[1000:1010], "b": torch.zeros(4, 4)})
    assert [(memory.key, memory.size) for memory in layout.storages] == [("b", 64), ("a", 40)]


def test_safetensors_interoperability(tmp_path: Path) -> None:
    saved = compiled()
    saved.save(tmp_path / "small.fxw")
    with zipfile.ZipFile(tmp_path / "small.fxw") as archive:
        archive.extract("constants.safetensors", tmp_path)
    read = load_file(tmp_path / "constants.safetensors")
    assert set(read) == {"p_weight", "p_bias", "b_calls"}
    assert read["p_weight"].equal(saved.program.store.tensors["p_weight"])
    loaded = fxwrap.load(tmp_path / "small.fxw")
    save_file({"p_weight": torch.eye(16), "b_calls": torch.tensor(9), "p_bias": torch.ones(16)}, tmp_path / "other")
    loaded.load_constants(tmp_path / "other")
    torch.testing.assert_close(loaded(batch()), torch.nn.functional.gelu(batch() + 1) + 10)


@pytest.mark.parametrize("emitter", EMITTERS)
def test_weights_can_be_loaded_separately(emitter: str, tmp_path: Path) -> None:
    path = tmp_path / "small.fxw"
    fxwrap.save(compiled(emitter), path, constants=False)
    loaded = fxwrap.load(path, binaries="required")
    with pytest.raises(ArtifactError, match=r"saved without its 3 constants \('p_weight', 'p_bias', 'b_calls'\)"):
        loaded(batch())
    state = {name: tensor.clone() for name, tensor in Small().state_dict().items()}
    loaded.load_constants(state)
    wanted = Small()
    torch.testing.assert_close(loaded(batch()), wanted(batch()))
    state["bias"].zero_()  # not copied: the caller's own tensor
    wanted.bias.data.zero_()
    torch.testing.assert_close(loaded(batch()), wanted(batch()))
    flat = loaded.flat
    loaded.update_constants({"weight": torch.eye(16)})
    wanted.weight.data.copy_(torch.eye(16))
    torch.testing.assert_close(flat(batch())[0], wanted(batch()))
    if emitter == "fx":
        assert loaded.graph_module.p_bias.equal(torch.zeros(16))
    loaded.save(path)
    torch.testing.assert_close(fxwrap.load(path)(batch()), wanted(batch()))


def test_mismatched_weights_are_rejected_without_side_effects(tmp_path: Path) -> None:
    compiled("interpreter", fuse=False).save(tmp_path / "small.fxw")
    loaded = fxwrap.load(tmp_path / "small.fxw")
    before = dict(loaded.program.store.tensors)
    state = Small().state_dict()
    with pytest.raises(ArtifactError) as caught:
        loaded.load_constants({"weight": torch.eye(16), "bias": torch.ones(15), "calls": torch.tensor(1.0), "x": None})
    for text in ("unexpected: 'x'", "'p_bias' is f32[15], not f32[16]", "'b_calls' is f32[], not i64[]"):
        assert text in caught.value.reason
    with pytest.raises(ArtifactError, match="missing: 'p_bias'"):
        loaded.load_constants({name: tensor for name, tensor in state.items() if name != "bias"})
    with pytest.raises(ArtifactError, match="unexpected: 'other'"):
        loaded.update_constants({"weight": torch.eye(16), "other": torch.ones(1)})
    with pytest.raises(ArtifactError, match="both name the constant 'p_bias'"):
        loaded.load_constants({**state, "p_bias": state["bias"]})
    with pytest.raises(ArtifactError, match="'p_bias' is a list"):
        loaded.update_constants({"bias": [1.0]})
    with pytest.raises(ArtifactError, match="cannot be read"):
        loaded.load_constants(tmp_path / "absent.safetensors")
    with pytest.raises(ArtifactError, match="table of tensors"):
        loaded.load_constants(tmp_path / "small.fxw")
    assert all(loaded.program.store.tensors[name] is tensor for name, tensor in before.items())
    assert before["p_weight"].equal(Small().weight)
    loaded.load_constants({**state, "unexpected": torch.ones(1)}, strict=False)


def test_constants_that_share_storage_are_passed_together(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    program = program_of({"whole": base, "transposed": base.t(), "row": base[1]}, written="row")
    fxwrap.save(program, tmp_path / "f.fxw", constants=False)
    loaded = fxwrap.load(tmp_path / "f.fxw")
    with pytest.raises(ArtifactError, match=r"missing: 'whole', 'transposed'\."):
        loaded.load_constants({"row": base[1]})
    with pytest.raises(ArtifactError, match="share memory in the program, and their tensors differ"):
        loaded.load_constants({"whole": base, "row": torch.ones(4)})
    wanted = base.clone()
    wanted[1] **= 2
    shared, apart = base.clone(), base.clone()
    for replacements, adopted in (
        ({"whole": base.clone()}, True),
        ({"whole": shared, "transposed": shared.t(), "row": shared[1]}, True),
        ({"whole": apart, "transposed": apart.t().clone(), "row": apart[1].clone()}, False),
        ({"whole": base.t().contiguous().t()}, False),
    ):
        loaded.load_constants(replacements)
        assert (loaded.program.store.tensors["row"].data_ptr() == replacements["whole"][1].data_ptr()) == adopted
        whole, transposed, row = loaded()
        assert whole.equal(wanted) and transposed.equal(wanted.t()) and row.equal(wanted[1])
        assert replacements["whole"].equal(wanted if adopted else base)


def test_a_tensor_file_is_memory_mapped(tmp_path: Path) -> None:
    """Tensors map the file's memory copy-on-write; unaligned tensors are copied."""
    tensors = {"a": torch.arange(5, dtype=torch.uint8), "b": torch.randn(3, 4), "c": torch.empty(0, 2)}
    names = [(name, item.dtype, tuple(item.shape)) for name, item in tensors.items()]
    content = header_bytes(names) + b"".join([item.numpy().tobytes() for item in tensors.values()])
    fxwrap.save(program_of(tensors, written="b"), tmp_path / "f.fxw", constants=False)
    (tmp_path / "weights").write_bytes(content)
    for mmap in (True, False):
        loaded = fxwrap.load(tmp_path / "f.fxw")
        loaded.load_constants(tmp_path / "weights", mmap=mmap)
        results = loaded()
        assert results[0].equal(tensors["a"]) and results[1].equal(tensors["b"] ** 2) and results[2].shape == (0, 2)
        assert loaded.program.store.tensors["b"].data_ptr() % 4 == 0
        assert (tmp_path / "weights").read_bytes() == content
    for length in (0, 7, len(content) - 1):
        (tmp_path / "weights").write_bytes(content[:length])
        for mmap in (True, False):
            with pytest.raises(ArtifactError, match=r"table of tensors|bytes, and|tensors have"):
                loaded.load_constants(tmp_path / "weights", mmap=mmap)


def test_layouts_are_converted(tmp_path: Path) -> None:
    """A constant in another layout is copied into the layout that the program was compiled for."""
    constants = {
        "channels": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "spread": torch.randn(3, 1).expand(3, 4),
    }
    fxwrap.save(program_of(constants), tmp_path / "f.fxw", constants=False)
    loaded = fxwrap.load(tmp_path / "f.fxw")
    contiguous = {name: tensor.contiguous().clone() for name, tensor in constants.items()}
    loaded.load_constants(contiguous)
    for name, tensor in loaded.program.store.tensors.items():
        assert tensor.stride() == constants[name].stride() and tensor.equal(contiguous[name])


def test_unsavable_constants_are_rejected(tmp_path: Path) -> None:
    program = program_of({"a": torch.ones(3), "b": torch.ones(3)})
    for tensors, text in (
        ({"a": torch.ones(3)}, "no payload for its constant 'b'"),
        ({"a": torch.ones(3), "b": torch.ones(3, device="meta")}, "constant 'b' is a Tensor that is more than"),
        ({"a": torch.ones(3), "b": torch.ones(3).to_sparse()}, "constant 'b' is a Tensor that is more than"),
    ):
        with pytest.raises(ArtifactError, match=text):
            fxwrap.save(program.replace(store=ConstantStore(tensors)), tmp_path / "f.fxw")
        assert not list(tmp_path.iterdir())


class Tied(torch.nn.Module):
    """A language model whose embedding and head are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.embed.weight
        self.transposed = torch.nn.Buffer(self.embed.weight.detach().t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.lm_head(self.embed(tokens)) + self.transposed[:, tokens].sum()
        return result


@pytest.mark.parametrize(
    "names", [["embed.weight"], ["lm_head.weight"], ["transposed"], ["lm_head.weight", "embed.weight"]]
)
def test_tied_weights_by_any_of_their_names(names: list[str], tmp_path: Path) -> None:
    tokens, weight = torch.tensor([1, 2]), torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    compiled = fxwrap.compile_graph(torch.export.export(Tied(), (tokens,)))
    compiled.save(tmp_path / "tied.fxw", constants=False)
    program = fxwrap.load(tmp_path / "tied.fxw")
    program.load_constants({name: weight.t() if name == "transposed" else weight for name in names})
    expected = Tied()
    expected.embed.weight.data.copy_(weight)
    torch.testing.assert_close(program(tokens), expected(tokens))
    assert len({constant.untyped_storage().data_ptr() for constant in program.program.store.tensors.values()}) == 1
