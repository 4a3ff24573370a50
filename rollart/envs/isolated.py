"""One machine's environments of all tasks: each task in its isolation, all of them in the same slots."""

from collections.abc import Mapping, Sequence

from rollart.envs.service import ClosableHost
from rollart.errors import EnvError
from rollart.ports import Env
from rollart.types import Task, TrajectoryId


class IsolatedEnvHost:
    """Passes each task to the host of its domain. Hosts that share slots share a semaphore."""

    def __init__(self, hosts: Sequence[tuple[Sequence[str], ClosableHost]]) -> None:
        """`hosts`: each with its domains."""
        self._hosts = [host for _, host in hosts]
        self.by_domain: Mapping[str, ClosableHost] = {domain: host for domains, host in hosts for domain in domains}

    async def open(self, task: Task, trajectory: TrajectoryId) -> Env:
        host = self.by_domain.get(task.domain)
        if host is None:
            raise EnvError(f"no task set is known for the domain {task.domain}")
        return await host.open(task, trajectory)

    async def close(self) -> None:
        for host in self._hosts:
            await host.close()
