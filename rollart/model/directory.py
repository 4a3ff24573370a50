"""A Hugging Face directory without its network: tensors that are read when they are asked for, and the other files.

Called by the trainers, for their checkpoints, by the file store, and where a server's files are made.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from safetensors import safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Endings of files that hold weights."""


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of safetensors files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in paths:
            with safe_open(path, framework="pt") as opened:
                self._paths |= dict.fromkeys(opened.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._paths[name], framework="pt") as opened:
            return cast(Tensor, opened.get_tensor(name))

    def __contains__(self, name: object) -> bool:
        return name in self._paths  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def pop(self, name: str) -> Tensor:
        """Read one that is not among the others any more."""
        tensor = self[name]
        del self._paths[name]
        return tensor


def unit_of(name: str) -> str:
    """The layer a tensor belongs to: its name up to the first number."""
    words = name.split(".")
    number = next((place for place, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: number + 1])


def copy_other_files(source: Path, target: Path) -> None:
    """Copy a model's config, tokenizer, chat template, licence: all but its weights."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
