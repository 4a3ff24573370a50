"""Weight versions as files on a disk that trainer and engines share: a local one, or a network file system.

Owns: `directory`, and below it one folder per version that is also a whole Hugging Face directory:

    v00000003/model-00001.safetensors             the buckets
    v00000003/model.safetensors.index.json        which tensor is in which
    v00000003/config.json, tokenizer.json, ...    copied from the initial model
    v00000003/manifest.json                       last: the version is complete

So an embedded engine maps a version, and a vLLM or SGLang server loads it by its path. Of a model with tied embeddings
the folders are written untied, the output layer a copy of the embedding: vLLM reloads tied ones wrongly. (Where the
embedding has another name than below they stay tied.)
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from rollart.errors import WeightError, boundary
from rollart.model.directory import INDEX, StoredTensors, copy_other_files
from rollart.store.buckets import BucketStore
from rollart.store.index import WEIGHTS
from rollart.store.media import Disk
from rollart.types import Probe, WeightManifest, WeightVersion

VISIBLE_S = 5.0
"""How long what another machine wrote may take to be seen on a shared disk."""
CONFIG = "config.json"
TIED = "tie_word_embeddings"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The names transformers gives them in nearly every model."""


class _Untied(Mapping[str, Tensor]):
    """Tensors, and the output layer beside them. Nothing is asked for before its turn."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        # A copy: safetensors refuses two tensors of one memory.
        return self._tensors[EMBEDDING].clone() if name == HEAD else self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield HEAD

    def __len__(self) -> int:
        return len(self._tensors) + 1


class FileStore(BucketStore):
    """Versions below `directory`, which is this run's alone: `close` removes it."""

    def __init__(
        self,
        directory: Path,
        bucket_bytes: int = 1 << 30,
        *,
        model_path: Path | None = None,
        patience_s: float = VISIBLE_S,
    ) -> None:
        """`model_path`: the initial model, whose config and tokenizer go into each version. Needed to push only."""
        super().__init__(directory, bucket_bytes, Disk(), patience_s=patience_s)
        self._model_path = model_path
        self._config = json.loads((model_path / CONFIG).read_text()) if model_path is not None else {}

    def push(self, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> WeightManifest:
        return super().push(version, self._untied(tensors), probe)

    def initial(self) -> Path:
        """The initial model as a server may load it: its own directory, or an untied copy."""
        assert self._model_path is not None
        if not self._config.get(TIED):
            return self._model_path
        folder = self.directory / "initial" / self.folder(0).name
        if folder.exists():
            return folder
        # Several engines may do so at once: each makes its own, and the first one's stays.
        own = FileStore(self.directory / f"initial-{os.getpid()}", self.bucket_bytes, model_path=self._model_path)
        with boundary(WeightError, f"untied copy of {self._model_path}"):
            own.push(0, StoredTensors(sorted(self._model_path.glob("*.safetensors"))))
            try:
                os.rename(own.directory, self.directory / "initial")
            except OSError:
                own.close()
                if not folder.exists():
                    raise
        return folder

    def _untied(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        names = set(tensors)  # asking a mapping whether it has a name would ask for the tensor
        if self._config.get(TIED) and HEAD not in names and EMBEDDING in names:
            return _Untied(tensors)
        return tensors

    def _complete(self, folder: Path, places: Mapping[str, str]) -> None:
        size = sum(path.stat().st_size for path in folder.glob(WEIGHTS))
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
        if self._model_path is None:
            return
        copy_other_files(self._model_path, folder)
        if self._config.get(TIED) and HEAD in places:
            (folder / CONFIG).write_text(json.dumps({**self._config, TIED: False}, indent=2))
