"""Reward functions in local processes."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rollart.config.settings import RewardSettings
from rollart.errors import RewardError
from rollart.ports import RewardBackend
from rollart.rewards.local import LocalRewards
from tests.contracts.reward_functions import (
    DOMAIN,
    FUNCTION,
    RewardFunctionContract,
    closing,
    decode,
    run,
    trajectory,
)


class TestLocalRewards(RewardFunctionContract):
    def backend(self, tmp_path: Path, timeout_s: float) -> AbstractAsyncContextManager[RewardBackend]:
        return closing(
            LocalRewards(RewardSettings(workers=2, timeout_s=timeout_s), {DOMAIN: FUNCTION}, decode, tmp_path)
        )

    def test_a_dead_worker_is_replaced(self, tmp_path: Path) -> None:
        async def work() -> None:
            functions = {DOMAIN: FUNCTION, "lost": "no.such.module:score"}
            async with closing(LocalRewards(RewardSettings(workers=1), functions, decode, tmp_path)) as backend:
                with pytest.raises(RewardError, match="status 9") as raised:
                    await backend.score(trajectory("die"))
                assert raised.value.retryable
                cold, warm = [await backend.score(trajectory("sum")) for _ in range(2)]
                assert (cold.value, warm.value) == (0.75, 0.75)
                assert cold.cold_start_s > warm.cold_start_s == 0.0
                with pytest.raises(RewardError, match="no module"):
                    await backend.score(trajectory("sum", domain="lost"))
                with pytest.raises(RewardError, match="elsewhere") as raised:
                    await backend.score(trajectory("sum", domain="elsewhere"))
                assert not raised.value.retryable

        run(work)

    @pytest.mark.parametrize("odd", [object(), date(2026, 1, 1)])
    def test_a_payload_that_cannot_be_sent_ends_its_own_call(self, tmp_path: Path, odd: object) -> None:
        async def work() -> None:
            backend = LocalRewards(RewardSettings(workers=1), {DOMAIN: FUNCTION}, decode, tmp_path)
            async with closing(backend):
                usual = trajectory("sum")
                payload: Any = {**usual.task.payload, "odd": odd}
                with pytest.raises(RewardError):
                    await backend.score(replace(usual, task=replace(usual.task, payload=payload)))
                assert (await backend.score(usual)).value == 0.75, "its worker serves the next"

        run(work)

    def test_a_call_that_is_given_up_leaves_a_process_that_is_up(self, tmp_path: Path) -> None:
        """Where its function ends soon, as most do; one that hangs is ended with its process."""

        async def work() -> None:
            rewards = LocalRewards(RewardSettings(workers=1), {DOMAIN: FUNCTION}, decode, tmp_path)
            async with closing(rewards) as backend:
                await backend.score(trajectory("sum"))
                first = rewards.pool.pids
                for kind, stays in (("sum", True), ("hang", False)):
                    given_up = asyncio.ensure_future(backend.score(trajectory(kind)))
                    for _ in range(5):
                        await asyncio.sleep(0)
                    given_up.cancel()
                    score = await backend.score(trajectory("sum"))
                    assert (score.cold_start_s == 0.0, rewards.pool.pids == first) == (stays, stays)

        run(work)

    def test_the_pool_grows_from_none_and_goes_back_to_none(self, tmp_path: Path) -> None:
        async def work() -> None:
            rewards = LocalRewards(RewardSettings(workers=2), {DOMAIN: FUNCTION}, decode, tmp_path, idle_s=0.2)
            async with closing(rewards) as backend:
                assert rewards.pool.pids == []
                for _ in range(2):
                    scores = await asyncio.gather(*(backend.score(trajectory("sum")) for _ in range(4)))
                    assert [score.value for score in scores] == [0.75] * 4
                    assert sum(score.cold_start_s > 0 for score in scores) == 2, "those of the burst before are gone"
                    async with asyncio.timeout(60):
                        while rewards.pool.pids:  # noqa: ASYNC110 - nobody is told of it
                            await asyncio.sleep(0.02)

        run(work)
