"""Checkpoint directories: written whole or not at all, old ones pruned.

Owns: the names below one checkpoint root. Layout of one checkpoint:

    step-00000020/            a name appears only when all below it is on disk
      model/                  a Hugging Face directory: safetensors, config, the tokenizer's files
      optimizer.safetensors   moments, and float32 masters where the network is bfloat16; whole tensors, one or several
                              files (optimizer-00001.safetensors, ...)
      trainer.json            version and format

Nothing is pickled, and nothing depends on how many ranks wrote it: any trainer may continue it. Invariant: the
checkpoint restored from, and the last one written, are never pruned, since the coordinator may still point to either.
Called by the trainer.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from rollart.errors import TrainerError, writing
from rollart.types import JsonObject, ParsedJson, WeightVersion

FORMAT = 1
"""Of the files beside the model in a checkpoint."""
MODEL_DIR, OPTIMIZER, TRAINER_FILE = "model", "optimizer", "trainer.json"
RNG = "rng"
"""Key of the generator's state in the (first) optimizer file."""
NAME = re.compile(r"step-\d{8}(\.\d+)?")
UNFINISHED = re.compile(r"\.unfinished-step-\d{8}(\.\d+)?")


class Checkpoints:
    """The checkpoints below one directory, as one trainer sees them."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        assert keep >= 2, "the last committed and the newest must both survive"
        self._root = root
        self._keep = keep
        self._recent: list[Path] = []

    def write(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Let `fill` write into a hidden directory, make it durable, give it its name, prune old ones.

        Raises StoreFull, leaving nothing behind."""
        self._root.mkdir(parents=True, exist_ok=True)
        target = self._free_name(step)
        hidden = self._root / f".unfinished-{target.name}"
        shutil.rmtree(hidden, ignore_errors=True)
        with writing(f"checkpoint {target}"):
            try:
                hidden.mkdir()
                fill(hidden)
                _sync_tree(hidden)
                os.rename(hidden, target)
            except BaseException:
                shutil.rmtree(hidden, ignore_errors=True)  # a part of one would take the room that is missing
                raise
            _sync(self._root)
        self.use(target)
        self._prune()
        return target

    def use(self, path: Path) -> None:
        """Note that this checkpoint was written or restored: it counts as recent."""
        self._recent = [known for known in self._recent if known != path] + [path]

    def _free_name(self, step: int) -> Path:
        """A step saved again (after a replay) gets a new name: the old one may be the one committed."""
        target, again = self._root / f"step-{step:08d}", 0
        while target.exists():
            again += 1
            target = self._root / f"step-{step:08d}.{again}"
        return target

    def _prune(self) -> None:
        self._recent = self._recent[-self._keep :]
        kept = {path.name for path in self._recent}
        for path in sorted(self._root.iterdir()):
            if (NAME.fullmatch(path.name) and path.name not in kept) or UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def saved_version(reference: str) -> WeightVersion:
    """The version of a checkpoint. Raises TrainerError where `reference` is none that we can read."""
    if not (Path(reference) / TRAINER_FILE).is_file():
        raise TrainerError(f"checkpoint {reference}: no {TRAINER_FILE} there; give a path that `save` returned")
    state = read_json(Path(reference) / TRAINER_FILE)
    if state.get("format") != FORMAT:
        raise TrainerError(f"checkpoint {reference}: format {state.get('format')!r}; this RollArt reads {FORMAT}")
    return int(state["version"])


def write_state(folder: Path, version: WeightVersion, *, bf16: bool) -> None:
    """Write what `saved_version` reads."""
    write_json(folder / TRAINER_FILE, {"format": FORMAT, "version": version, "bf16": bf16})


def optimizer_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that hold the optimizer's tensors."""
    return sorted(folder.glob(f"{OPTIMIZER}*.safetensors"))


def write_json(path: Path, value: JsonObject) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> ParsedJson:
    """Raises ValueError where the file is damaged or holds something else."""
    value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}, not a mapping")
    return value


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
