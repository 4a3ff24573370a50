"""What a server is given to load: the store's own files, the names of a checkpoint, or adapters."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollart.engines.staged import StagedFiles
from rollart.errors import StoreFull
from rollart.model.adapters import read_adapters
from rollart.model.network import load_weights_
from rollart.store.prefetch import FetchAhead
from tests.engines.reference import our_model
from tests.engines.remote import LORA, Versions
from tests.small_disk import small_disk


def staged(versions: Versions) -> StagedFiles:
    return StagedFiles("e0", versions.path, versions.store, FetchAhead(versions.store))


def test_the_files_of_the_store_are_given_as_they_are(tmp_path: Path) -> None:
    versions = Versions(tmp_path, tied=True)
    files = staged(versions)
    manifest = versions.put(1)
    paths = files.of(manifest)
    assert paths == [versions.store.directory / bucket.name for bucket in manifest.buckets]
    assert len(paths) > 1
    assert not (versions.store.directory / "for-e0").exists(), "nothing was copied"
    assert files.initial() == [versions.path / "model.safetensors"]


def test_experts_are_given_under_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    versions = Versions(tmp_path, experts=True, in_memory=True)
    try:
        files = staged(versions)
        for version in (1, 2):
            found = {
                name: tensor for path in files.of(versions.put(version)) for name, tensor in load_file(path).items()
            }
        assert {path.name for path in (versions.store.directory / "for-e0").iterdir()} == {"v00000002"}
        versions.model(2).save_pretrained(tmp_path / "saved")
        saved = {name: t for path in (tmp_path / "saved").glob("*.safetensors") for name, t in load_file(path).items()}
        assert found.keys() == saved.keys()
        assert "model.layers.0.mlp.experts.7.up_proj.weight" in found
        assert all(torch.equal(found[name], saved[name]) for name in saved)
        files.close()
        assert not (versions.store.directory / "for-e0").exists()
    finally:
        versions.store.close()


def test_no_room_for_files_of_other_names_is_said_as_such(tmp_path: Path) -> None:
    with small_disk(tmp_path / "weights", "16m"):
        versions = Versions(tmp_path, experts=True)
        manifest, files = versions.put(1), staged(versions)
        own = sum(path.stat().st_size for path in files.of(manifest))
        files.close()
        room = os.statvfs(tmp_path / "weights")
        taken = (room.f_blocks - room.f_bfree) * room.f_bsize
        remount = ["mount", "-o", f"remount,size={taken + own // 2}", str(tmp_path / "weights")]
        subprocess.run(remount, check=True)
        with pytest.raises(StoreFull, match=r"version 1 for the server, in .*for-e0"):
            files.of(manifest)
        subprocess.run(["mount", "-o", "remount,size=16m", str(tmp_path / "weights")], check=True)
        assert sum(path.stat().st_size for path in files.of(manifest)) == own


def test_adapters_are_given_as_peft_writes_them(tmp_path: Path) -> None:
    versions = Versions(tmp_path, lora=LORA)
    [folder] = staged(versions).of(versions.put(3))
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(versions.path)
    written, tensors = read_adapters(folder)
    assert (written.rank, written.alpha, set(written.targets)) == (LORA.rank, LORA.alpha, set(LORA.targets))
    merged = our_model(versions.model(0))
    load_weights_(merged, tensors)
    expected = dict(versions.plain[3].named_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.named_parameters())
