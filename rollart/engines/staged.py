"""The files that a server on this host loads a version from: safetensors by the names of a checkpoint, or adapters.

A store's own files, where they are that: nothing is copied. Where the network that is trained names its weights in
another way than checkpoints do (experts that are fused into one tensor), they are written once more under the usual
names, by transformers' own rules, beside the store's: with a store in memory, in memory. Adapters are written as peft
does. Called in threads, before the server stands still.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rollart.errors import writing
from rollart.model.adapters import are_adapters, write_adapter_tensors
from rollart.model.directory import unit_of
from rollart.types import Pulled, WeightManifest, WeightVersion


class Ahead(Protocol):
    """Brings versions to this host while they are still pushed."""

    def stage(self, version: WeightVersion) -> "Future[WeightManifest | None]": ...

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]: ...

    def pulled(self, version: WeightVersion) -> Pulled: ...


class HostStore(Protocol):
    """Where they are on this host."""

    directory: Path

    def manifest(self, version: WeightVersion) -> WeightManifest | None: ...

    def folder(self, version: WeightVersion) -> Path: ...


class StagedFiles:
    """Of one engine."""

    def __init__(self, engine_id: str, model: Path, store: HostStore, ahead: Ahead) -> None:
        self._model = model
        self._store = store
        self._ahead = ahead
        self._own = store.directory / f"for-{engine_id}"
        self._shape: PreTrainedModel | None = None
        self._held: Mapping[str, Tensor] = {}
        """While these are held, the store's files stay as they are."""

    def begin(self, version: WeightVersion) -> "Future[WeightManifest | None]":
        """Fetch what appears of a coming version. Done when all of it is here, or when it is not awaited any more."""
        return self._ahead.stage(version)

    def manifest(self, version: WeightVersion) -> WeightManifest | None:
        """None while the version is not complete."""
        return self._store.manifest(version)

    def pulled(self, version: WeightVersion) -> Pulled:
        return self._ahead.pulled(version)

    def initial(self) -> list[Path]:
        return sorted(self._model.glob("*.safetensors"))

    def of(self, manifest: WeightManifest) -> list[Path]:
        """The files of a version, digests checked; of adapters, their folder. They stay until another one is asked
        for. Raises WeightError, or StoreFull where there is no room for files of other names."""
        tensors = self._held = self._ahead.fetch(manifest)
        shutil.rmtree(self._own, ignore_errors=True)
        if not are_adapters(tensors) and not self._renamed(tensors):
            folder = self._store.folder(manifest.version)
            return [folder / Path(name).name for name, _ in groupby(bucket.name for bucket in manifest.buckets)]
        with writing(f"version {manifest.version} for the server, in {self._own}"):
            folder = self._folder(manifest.version)
            if are_adapters(tensors):
                write_adapter_tensors(folder, tensors, str(self._model))
                return [folder]
            parts = enumerate(self._parts(tensors), 1)
            return [_write(folder / f"model-{at:05d}.safetensors", part) for at, part in parts]

    def close(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)

    def _folder(self, version: WeightVersion) -> Path:
        folder = self._own / f"v{version:08d}"
        folder.mkdir(parents=True, mode=0o700)
        return folder

    def _renamed(self, tensors: Mapping[str, Tensor]) -> bool:
        like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
        return revert_weight_conversion(self._network(), like).keys() != like.keys()

    def _parts(self, tensors: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        """Under the names of a checkpoint, layer by layer: some weights are renamed together."""
        for _, names in groupby(sorted(tensors, key=unit_of), unit_of):
            part: Mapping[str, Tensor] = revert_weight_conversion(
                self._network(), {name: tensors[name] for name in names}
            )
            yield part

    def _network(self) -> PreTrainedModel:
        """Of this kind, without its weights."""
        if self._shape is None:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(str(self._model), local_files_only=True)
                self._shape = AutoModelForCausalLM.from_config(config)
        return self._shape


def _write(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    return path


def paths_of(files: Sequence[Path]) -> list[str]:
    return [str(path.absolute()) for path in files]
