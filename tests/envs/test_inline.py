"""The in-process host."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

from rollart.envs.inline import InlineEnvHost
from rollart.ports import EnvHost
from rollart.tasks.load import load_task_set
from tests.contracts.user_envs import DOMAIN, TASKS, UserEnvHostContract, closing


class TestInlineEnvHost(UserEnvHostContract):
    runs_programs = False

    slots = 3

    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(InlineEnvHost({DOMAIN: load_task_set(TASKS, domain=DOMAIN)}, slots=slots))


class TestInlineEnvHostOfAsyncEnvironments(TestInlineEnvHost):
    kind = "async"
