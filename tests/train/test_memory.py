"""The trainer's share of a GPU's memory: what is refused, what torch is told, and what recomputation reckons with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollart.errors import JobError
from rollart.train import memory
from tests.train.settings import trainer_settings

GB = 1e9


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"memory": 0.5}, "train.memory: is a share of a GPU's memory"),
        ({"memory": 0.5, "device": "cuda:0", "type": "fsdp2"}, "train.memory: train.type fsdp2"),
        ({"memory": 1.5, "device": "cuda:0"}, "train.memory"),
    ],
)
def test_a_share_that_cannot_be_meant_is_refused(train: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=said):
        trainer_settings(tmp_path, tmp_path, **train)


def test_torch_is_told_the_share_and_nothing_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: told.append(share))
    for share in (0.4, None):
        train = trainer_settings(tmp_path, tmp_path, device="cuda:0", memory=share).job.train
        memory.keep_to_share(train, torch.device("cuda:0"))
    assert told == [0.4]


@pytest.mark.parametrize(("share", "free", "room"), [(None, 90, 86), (0.5, 90, 36), (0.5, 20, 16)])
def test_recomputation_reckons_with_the_share_or_what_is_free(
    share: float | None, free: float, room: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A card of 100 GB, of which this process has 10 and keeps none beside them."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GB, 100 * GB))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 10 * GB)
    train = trainer_settings(tmp_path, tmp_path, device="cuda:0", memory=share).job.train
    assert memory.room_bytes(train, torch.device("cuda:0")) == pytest.approx(room * GB)
