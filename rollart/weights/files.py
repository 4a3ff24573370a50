"""Weight versions as files on a disk that trainer and engines share: a local one, or a network file system.

Owns: `directory`, and below it one folder per version that is also a whole Hugging Face directory:

    v00000003/model-00001-of-00002.safetensors    the buckets
    v00000003/model.safetensors.index.json        which tensor is in which
    v00000003/config.json, tokenizer.json, ...    copied from the initial model
    v00000003/manifest.json                       last: the version is complete

So an embedded engine maps a version, and a vLLM or SGLang server loads it by its path. Of a model with tied embeddings
the folders are written untied, the output layer a copy of the embedding: vLLM reloads tied ones wrongly.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from rollart.errors import WeightError, boundary
from rollart.types import Probe, WeightManifest, WeightVersion
from rollart.weights.buckets import BucketStore

WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
"""Endings of the initial model's files that hold weights, and are not copied."""
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TIED = "tie_word_embeddings"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The names transformers gives them in every model that we train."""


class FileStore(BucketStore):
    """Versions below `directory`, which is this run's alone: `close` removes it."""

    def __init__(self, directory: Path, bucket_bytes: int = 1 << 30, *, model_path: Path | None = None) -> None:
        """`model_path`: the initial model, whose config and tokenizer go into each version. Needed to push only."""
        super().__init__(directory, bucket_bytes)
        self._model_path = model_path
        self._config = json.loads((model_path / CONFIG).read_text()) if model_path is not None else {}

    def push(self, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None = None) -> WeightManifest:
        return super().push(version, self._untied(tensors), probe)

    def initial(self) -> Path:
        """The initial model as a server may load it: its own directory, or an untied copy of it."""
        assert self._model_path is not None
        if not self._config.get(TIED):
            return self._model_path
        folder = self._dir / "initial" / self.folder(0).name
        if folder.exists():
            return folder
        # Several engines may do so at once: each makes its own, and the first one's stays.
        own = FileStore(self._dir / f"initial-{os.getpid()}", self._bucket_bytes, model_path=self._model_path)
        with boundary(WeightError, f"untied copy of {self._model_path}"):
            tensors: dict[str, Tensor] = {}
            for path in sorted(self._model_path.glob("*.safetensors")):
                tensors |= load_file(path)
            own.push(0, tensors)
            try:
                os.rename(own._dir, self._dir / "initial")
            except OSError:
                own.close()
                if not folder.exists():
                    raise
        return folder

    def _untied(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._config.get(TIED) and HEAD not in tensors and EMBEDDING in tensors:
            return {**tensors, HEAD: tensors[EMBEDDING]}
        return tensors

    def _complete(self, folder: Path, manifest: WeightManifest) -> None:
        names = [Path(bucket.name).name for bucket in manifest.buckets]
        weight_map = {name: names[place.bucket] for name, place in manifest.tensors.items()}
        index = {"metadata": {"total_size": manifest.num_bytes}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index))
        if self._model_path is None:
            return
        for path in sorted(self._model_path.iterdir()):
            if path.is_file() and path.suffix not in WEIGHTS and not path.name.endswith(".index.json"):
                shutil.copyfile(path, folder / path.name)
        if self._config.get(TIED):
            (folder / CONFIG).write_text(json.dumps({**self._config, TIED: False}, indent=2))
