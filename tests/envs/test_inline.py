"""The in-process host."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rollart.envs.inline import InlineEnvHost
from rollart.ports import EnvHost
from rollart.tasks.load import load_task_set
from tests.contracts.envs import EnvBench
from tests.contracts.envs import EnvHostContract as PortContract
from tests.envs.contract import DOMAIN, SOON_S, TASKS, EnvHostContract, closing, task


class TestInlineEnvHost(EnvHostContract):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(InlineEnvHost({DOMAIN: load_task_set(TASKS, domain=DOMAIN)}, slots=slots))


class TestInlineAsAPort(PortContract):
    kind = "count"

    def play(self, work: Callable[[EnvBench], Awaitable[None]]) -> None:
        async def main() -> None:
            host = InlineEnvHost({DOMAIN: load_task_set(TASKS, domain=DOMAIN)}, slots=3)
            async with closing(host), asyncio.timeout(SOON_S):
                await work(EnvBench(host=host, slots=3, task=task(self.kind)))

        asyncio.run(main())


class TestInlineAsyncAsAPort(TestInlineAsAPort):
    kind = "async"
