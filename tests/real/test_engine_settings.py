"""What a job says of an embedded engine is what its process builds."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.cluster.local import LocalCluster
from rollart.config.load import build_job
from rollart.launch.real import real_world
from rollart.launch.worker import build
from rollart.model.network import load_model, named_weights
from rollart.store.journal import FileJournal
from rollart.store.shm import ShmStore
from rollart.types import GenerateRequest, Sampling
from tests.real.harness import job
from tests.real.processes import SPEC
from tests.setups import worker_setup


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedded_engine_computes_as_its_pool_says(dtype: torch.dtype, model: Path, tmp_path: Path) -> None:
    engines = {"dtype": str(dtype).removeprefix("torch."), "step_tokens": 96, "max_batch": 32, "kv_tokens": 1024}
    settings = build_job(job(model, pools=[{"name": "cpu", "engines": engines, "slots": 1}]))
    setup = worker_setup(settings, tmp_path, stop_tokens=(40,))
    store = ShmStore(setup.store.run_id, bucket_bytes=1 << 20)
    asked = GenerateRequest(
        id="a/0",
        session="a",
        domain="a",
        turn=0,
        prompt=(np.array([7, 20, 30], dtype=np.int32),),
        prompt_tokens=3,
        sampling=Sampling(max_tokens=8, seed=1),
    )

    async def work() -> None:
        engine = await build(setup.engine(SPEC))
        try:
            assert engine._core._model.dtype == engine._core._shape.dtype == dtype
            assert engine._core._settings.step_tokens == 96
            assert 40 in engine._core._eos
            await engine.swap(store.push(1, named_weights(load_model(model))))  # the trainer's are float32
            assert np.isfinite((await engine.generate(asked)).logprobs).all()
        finally:
            await engine.close()

    try:
        asyncio.run(work())
    finally:
        store.close()


def test_the_end_of_turn_of_the_chat_template_ends_answers(model: Path, tmp_path: Path) -> None:
    """Also where the model's files name another token: the engines are told."""
    own = tmp_path / "model"
    shutil.copytree(model, own)
    template = (own / "chat_template.jinja").read_text()
    (own / "chat_template.jinja").write_text(template.replace("<|end|>", "<|pad|>"))
    out = tmp_path / "run"
    out.mkdir()

    async def work() -> tuple[int, ...]:
        real = real_world(build_job(job(own)), out, FileJournal(out / "journal"))
        try:
            assert isinstance(real.world.cluster, LocalCluster)
            return real.world.cluster._setup.stop_tokens
        finally:
            await real.close()

    assert asyncio.run(work()) == (0, 2)
