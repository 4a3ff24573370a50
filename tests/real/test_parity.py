"""What the engine says a token's log-probability was, the trainer says too: before and after a swap."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rollart.ports import Engine
from rollart.types import Batch, Completion, GenerateRequest, Sample, Sampling, Tokens, TrajectoryId
from tests.real.processes import SPEC, local_cluster

SAME = 1e-3
"""Natural-log probabilities: the bound that off-policy correction can do nothing about."""


async def play(engine: Engine, name: str, prompt: list[int]) -> Sample:
    """Two turns of one session: the second finds the first in the cache."""
    context: list[int] = list(prompt)
    parts: list[tuple[Tokens, Completion | None]] = [(np.array(context, dtype=np.int32), None)]
    for turn in range(2):
        request = GenerateRequest(
            id=f"{name}/{turn}",
            session=name,
            domain="a",
            turn=turn,
            prompt=(np.array(context, dtype=np.int32),),
            prompt_tokens=len(context),
            sampling=Sampling(max_tokens=24, seed=3),
        )
        answer = await engine.generate(request)
        more = [5, 4 + turn]
        parts += [(answer.tokens, answer), (np.array(more, dtype=np.int32), None)]
        context += [*answer.tokens.tolist(), *more]
    return Sample(
        trajectory=TrajectoryId(name, 0, 0),
        domain="a",
        tokens=np.concatenate([tokens for tokens, _ in parts]),
        mask=np.concatenate([np.full(len(tokens), said is not None) for tokens, said in parts]),
        logprobs=np.concatenate(
            [np.zeros(len(tokens), np.float32) if said is None else said.logprobs for tokens, said in parts]
        ),
        versions=np.concatenate(
            [np.full(len(tokens), -1 if said is None else said.spans[-1].version, np.int32) for tokens, said in parts]
        ),
        advantages=np.concatenate(
            [np.full(len(tokens), 0.0 if said is None else 1.0 - len(name) % 3, np.float32) for tokens, said in parts]
        ),
    )


async def played(engine: Engine, prefix: str) -> list[Sample]:
    names = [f"{prefix}{'x' * number}" for number in range(12)]
    return await asyncio.gather(*(play(engine, name, [7 + len(name), 20, 30]) for name in names))


def batch(step: int, samples: Sequence[Sample]) -> Batch:
    return Batch(step=step, serving=step, groups=(), samples=tuple(samples))


def versions(samples: Sequence[Sample]) -> set[int]:
    return {int(version) for sample in samples for version in sample.versions[sample.mask]}


@pytest.mark.slow
def test_engine_and_trainer_agree_before_and_after_a_swap(model: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with local_cluster(model, tmp_path) as (cluster, _):
            engine, trainer = await asyncio.gather(cluster.engine(SPEC), cluster.trainer())
            old = await played(engine, "a")
            assert versions(old) == {0}
            first = await trainer.train_step(batch(0, old))
            assert first.metrics["perf/sampled_tokens"] == sum(int(sample.mask.sum()) for sample in old) > 100
            assert first.metrics["actor/logprob_diff_max"] < SAME
            staged = asyncio.ensure_future(engine.stage(1))
            manifest = await trainer.publish(1)
            await staged
            report = await engine.swap(manifest)
            assert report.version == 1
            new = await played(engine, "b")
            assert versions(new) == {1}
            second = await trainer.train_step(batch(1, new))
            assert second.metrics["actor/logprob_diff_max"] < SAME
            assert second.metrics["actor/kl_mismatch"] < SAME
            # The same comparison sees one step of training: what was sampled under version 0 is no longer the same.
            assert (await trainer.train_step(batch(2, old))).metrics["actor/logprob_diff_max"] > 10 * SAME

    asyncio.run(main())
