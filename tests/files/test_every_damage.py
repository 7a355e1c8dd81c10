"""Whatever happens to a byte of a file that ``fz.save`` wrote: it is refused, or loads as it was."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import factorized as fz
from factorized.files.checksum import TYPES, read_tensors, save_tensors
from tests.models.unchanged import same_bits


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return ``content`` with one damage of some kind at some place."""
    place, other = chance.randrange(len(content)), chance.randrange(len(content))
    data = bytearray(content)
    kind = chance.choice(["flip", "truncate", "zero", "swap", "set", "insert", "append", "repeat"])
    if kind == "flip":
        data[place] ^= 1 << chance.randrange(8)
    elif kind == "truncate":
        del data[place:]
    elif kind == "zero":
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    elif kind == "swap":
        data[place], data[other] = data[other], data[place]
    elif kind == "set":
        data[place] = chance.randrange(256)
    elif kind == "insert":
        data.insert(place, chance.randrange(256))
    elif kind == "append":
        data += chance.randbytes(chance.randrange(1, 64))
    else:
        data[place : place + 16] = data[other : other + 16]
    return bytes(data)


def outcomes(folder: Path, seeds: range) -> dict[str, int]:
    """Count what becomes of a checkpoint whose files are damaged, one at a time."""
    model = fz.factorize(dense(), rank=2)
    fz.save(model, folder)
    expected = model.state_dict()
    counts = {"refused": 0, "identical": 0}
    messages = []
    paths = sorted(folder.iterdir())
    assert len(paths) == 2
    for path in paths:
        content = path.read_bytes()
        for seed in seeds:
            path.write_bytes(damaged(content, random.Random(seed)))
            try:
                found = fz.load(folder, dense()).state_dict()
            except ValueError as error:
                messages.append((path, str(error)))
                counts["refused"] += 1
            else:
                assert list(found) == list(expected)
                assert all(same_bits(found[key], expected[key]) for key in expected), (path.name, seed)
                counts["identical"] += 1
        path.write_bytes(content)
    assert [text for path, text in messages if path.name not in text or "\n" in text] == []
    return counts


def test_damaged_files_are_refused_by_name_or_load_identical(tmp_path: Path) -> None:
    counts = outcomes(tmp_path, range(200))
    assert counts["refused"] > 350
    assert counts["refused"] + counts["identical"] == 400


@pytest.mark.nightly
def test_thousands_of_damaged_files_are_refused_or_load_identical(tmp_path: Path) -> None:
    counts = outcomes(tmp_path, range(1000, 6000))
    assert counts["refused"] > 9000


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_comes_back_as_it_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = torch.arange(6).reshape(2, 3)
    tensors = {
        "matrix": numbers.to(dtype),
        "transposed": numbers.to(dtype).mT,
        "scalar": torch.ones((), dtype=torch.bool).to(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
        "byte": torch.ones(3, dtype=torch.uint8),  # leaves what follows at an odd place unless wide types come first
    }
    save_tensors(tmp_path / "all.safetensors", tensors)
    found = read_tensors(tmp_path / "all.safetensors", "write it again")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert (
            found[name].contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
        )


def test_conjugated_numbers_are_written_as_they_read(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j]).conj()
    save_tensors(tmp_path / "a.safetensors", {"a": value})
    assert read_tensors(tmp_path / "a.safetensors", "").popitem()[1].equal(value.resolve_conj())


def test_a_type_that_files_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a is torch\.complex128, which safetensors files cannot hold"):
        save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(1, dtype=torch.complex128)})


def test_other_programs_read_the_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = fz.factorize(dense(), rank=2)
    fz.save(model, tmp_path)
    found = load_file(next(tmp_path.glob("*.safetensors")))
    assert all(same_bits(found[key], value) for key, value in model.state_dict().items())
