"""An engine of two processes, one that prefills and one that decodes, as a job starts it; and what becomes of it when
one of them is killed."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from rollart.errors import EngineError
from rollart.model.network import load_model, named_weights
from rollart.ports import Engine
from rollart.types import Completion, GenerateRequest
from tests.engines.reference import request
from tests.real.processes import SPEC, local_cluster


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


async def turns(engine: Engine, session: str, version: int) -> list[tuple[GenerateRequest, Completion]]:
    found, prompt = [], np.arange(5, 60, dtype=np.int32) % 30
    for turn in range(2):
        asked = request(prompt, f"{session}/{turn}", max_tokens=6, temperature=0.0)
        got = await engine.generate(asked)
        assert {span.version for span in got.spans} == {version}
        assert got.prefill_busy_s > 0, "computed in the other process"
        found.append((asked, got))
        prompt = np.concatenate([prompt, got.tokens, [7, 8, 9]]).astype(np.int32)
    return found


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_cuda)])
def test_two_processes_are_one_engine_and_end_together(device: str, model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with local_cluster(model, tmp_path, device=device, prefill={}) as (cluster, store):
            plain = load_model(str(model))
            engine: Engine = await cluster.engine(SPEC)
            answers = await turns(engine, "first", 0)
            await engine.swap(store.push(1, named_weights(plain)))
            answers += await turns(engine, "second", 1)
            assert answers[2][1].tokens.tolist() == answers[0][1].tokens.tolist(), "the same weights, swapped in"
            assert answers[1][1].cached_tokens == answers[0][0].prompt_tokens

            worker = cluster.workers[SPEC.id].pid
            assert worker is not None
            (prefill,) = children(worker)
            os.kill(prefill, signal.SIGKILL)
            for turn in range(2):
                with pytest.raises(EngineError, match=r"the prefill side: .*SIGKILL"):
                    await engine.generate(request([5, 6, 7], f"lost/{turn}", max_tokens=2))

            engine = await cluster.engine(SPEC)  # as the fleet does
            await turns(engine, "again", 0)
            worker = cluster.workers[SPEC.id].pid
            assert worker is not None
            (prefill,) = children(worker)
            os.kill(worker, signal.SIGKILL)
            for _ in range(1000):
                if is_alive(prefill):
                    await asyncio.sleep(0.01)
            assert not is_alive(prefill), "it ends with the one that started it"
            with pytest.raises(EngineError):
                await engine.generate(request([5, 6, 7], "gone/0"))

    asyncio.run(main())
