"""Weight versions as files on a disk that trainer and engines share: a local one, or a network file system.

Owns: `directory`, and below it one folder per version that is also a whole Hugging Face directory:

    v00000003/model-00001.safetensors             the buckets
    v00000003/model.safetensors.index.json        which tensor is in which
    v00000003/config.json, tokenizer.json, ...    copied from the initial model
    v00000003/manifest.json                       last: the version is complete

So an embedded engine maps a version, and whatever reads Hugging Face directories loads it by its path, but for models
whose experts the network holds fused.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from rollart.model.directory import INDEX, copy_other_files
from rollart.store.buckets import BucketStore
from rollart.store.index import WEIGHTS
from rollart.store.media import DiskMedium

VISIBLE_S = 5.0
"""How long what another machine wrote may take to be seen on a shared disk."""


class FileStore(BucketStore):
    """Versions below `directory`, which is this run's alone: `close` removes it."""

    in_memory = False  # pages of a disk may have to be read again, over a network that may be gone by then

    def __init__(
        self,
        directory: Path,
        bucket_bytes: int = 1 << 30,
        *,
        model_path: Path | None = None,
        patience_s: float = VISIBLE_S,
    ) -> None:
        """`model_path`: the initial model, whose config and tokenizer go into each version. Needed to push only."""
        super().__init__(directory, bucket_bytes, DiskMedium(), patience_s=patience_s)
        self._model_path = model_path

    def _complete(self, folder: Path, places: Mapping[str, str]) -> None:
        size = sum(path.stat().st_size for path in folder.glob(WEIGHTS))
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
        if self._model_path is None:
            return
        copy_other_files(self._model_path, folder)
