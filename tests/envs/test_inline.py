"""The in-process host."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rollart.envs.inline import InlineEnvHost
from rollart.ports import EnvHost
from rollart.tasks.load import load_task_set
from tests.envs.contract import DOMAIN, TASKS, EnvHostContract, closing


class TestInlineEnvHost(EnvHostContract):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(InlineEnvHost({DOMAIN: load_task_set(TASKS, domain=DOMAIN)}, slots=slots))
