"""The host with one process per slot: the contract, and what only processes can promise."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from rollart.envs.process import ProcessEnvHost
from rollart.errors import EnvError
from rollart.ports import EnvHost
from rollart.types import Observation, Task
from rollart.workers import launch
from tests.contracts.user_envs import DOMAIN, ID, SOON_S, TASKS, UserEnvHostContract, closing, run, task, until

ROOT = Path(__file__).resolve().parents[2]


def make_host(tmp_path: Path, slots: int = 1) -> ProcessEnvHost:
    return ProcessEnvHost({DOMAIN: TASKS}, slots=slots, log_dir=tmp_path / "logs")


def alive(pid: int) -> bool:
    """Running, not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_dies(pid: int) -> None:
    deadline_s = time.monotonic() + SOON_S
    while alive(pid):
        assert time.monotonic() < deadline_s, f"{pid} still runs"
        time.sleep(0.02)


async def one_step(host: ProcessEnvHost, of: Task) -> Observation:
    env = await host.open(of, ID)
    try:
        await env.reset()
        return await env.step("a")
    finally:
        await env.close()


class TestProcessEnvHost(UserEnvHostContract):
    def host(self, tmp_path: Path, slots: int) -> AbstractAsyncContextManager[EnvHost]:
        return closing(make_host(tmp_path, slots))

    def test_a_healthy_worker_is_reused_and_a_crashed_one_replaced(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with closing(make_host(tmp_path)) as host:
                pid = (await one_step(host, task("pid"))).messages[0].content
                assert [int(pid)] == host.pool.pids
                assert (await one_step(host, task("pid"))).messages[0].content == pid
                with pytest.raises(EnvError, match="keys"):
                    await one_step(host, task("raise"))
                assert (await one_step(host, task("pid"))).messages[0].content == pid
                with pytest.raises(EnvError, match=r"status 7(.|\n)*last words"):
                    await one_step(host, task("die"))
                after = (await one_step(host, task("pid"))).messages[0].content
                assert after != pid
                os.kill(int(after), signal.SIGKILL)
                assert_dies(int(after))
                await self.plays(host)
            assert_dies(int(pid))

        run(work)

    def test_a_kill_in_the_middle_is_seen_at_once(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with closing(make_host(tmp_path)) as host:
                begun = tmp_path / "begun"
                env = await host.open(task("hang", begun=str(begun)), ID)
                await env.reset()
                step = asyncio.ensure_future(env.step("a"))
                await until(begun.exists)
                os.kill(host.pool.pids[0], signal.SIGKILL)
                with pytest.raises(EnvError, match="SIGKILL"):
                    await asyncio.wait_for(step, SOON_S)
                await env.close()

        run(work)

    def test_whoever_dies_at_work_or_idle_is_told_of_with_the_reason(self, tmp_path: Path) -> None:
        async def work() -> None:
            told: list[tuple[str, str]] = []
            host = ProcessEnvHost(
                {DOMAIN: TASKS}, slots=1, log_dir=tmp_path, lost=lambda name, how: told.append((name, how))
            )
            async with closing(host):
                with pytest.raises(EnvError, match="last words"):
                    await one_step(host, task("die"))
                await self.plays(host)
                os.kill(host.pool.pids[0], signal.SIGKILL)
                await until(lambda: len(told) == 2)
                await self.plays(host)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(one_step(host, task("hang")), 0.3)
                await self.plays(host)
            assert [name for name, _ in told] == ["env-0", "env-0"], "those we killed ourselves are not lost"
            assert "status 7" in told[0][1]
            assert "signal 9" in told[1][1]

        run(work)

    @pytest.mark.parametrize("kind", ["babble", "unsendable"])
    def test_nonsense_on_the_wire(self, tmp_path: Path, kind: str) -> None:
        async def work() -> None:
            async with closing(make_host(tmp_path)) as host:
                with pytest.raises(EnvError, match=r"nonsense|may not cross"):
                    await one_step(host, task(kind))
                await self.plays(host)

        run(work)

    def test_a_cancelled_step_kills_the_worker_and_what_it_started(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with closing(make_host(tmp_path)) as host:
                env = await host.open(task("grandchild"), ID)
                await env.reset()
                grandchild = int((await env.step("a")).messages[0].content)
                await env.close()
                assert alive(grandchild)  # a worker that behaves is not killed, nor what it started
                worker = host.pool.pids[0]
                env = await host.open(task("spin"), ID)
                await env.reset()
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(env.step("a"), 0.2)
                assert_dies(worker)
                assert_dies(grandchild)
                await env.close()
                await self.plays(host)

        run(work)

    def test_output_goes_to_bounded_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def work() -> None:
            async with closing(make_host(tmp_path)) as host:
                await one_step(host, task("print"))
                assert (tmp_path / "logs" / "env-0.log").stat().st_size == 2_000_001
                monkeypatch.setattr(launch, "MAX_LOG_BYTES", 100_000)
                await one_step(host, task("count"))
                assert (tmp_path / "logs" / "env-0.log").stat().st_size == 0

        run(work)

    def test_a_worker_that_cannot_load_the_task_set_says_why(self, tmp_path: Path) -> None:
        async def work() -> None:
            async with closing(ProcessEnvHost({DOMAIN: "no.such.module"}, slots=1, log_dir=tmp_path)) as host:
                with pytest.raises(EnvError, match=r"no module no\.such\.module"):
                    await host.open(task("count"), ID)

        run(work)

    @pytest.mark.parametrize("kind", ["spin", "hold"])
    def test_workers_and_what_they_started_die_with_the_parent(self, tmp_path: Path, kind: str) -> None:
        script = f"""
            import asyncio
            from tests.contracts.user_envs import ID, task, until
            from tests.envs.test_process import make_host
            from pathlib import Path

            async def main():
                host = make_host(Path({str(tmp_path)!r}), slots=2)
                env = await host.open(task("grandchild"), ID)
                await env.reset()
                grandchild = (await env.step("a")).messages[0].content
                begun = Path({str(tmp_path / "begun")!r})
                hung = await host.open(task({kind!r}, begun=str(begun)), ID)
                await hung.reset()
                step = asyncio.ensure_future(hung.step("a"))
                await until(begun.exists)
                print(*host.pool.pids, grandchild, flush=True)
                await step

            asyncio.run(main())
        """
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as parent:
            assert parent.stdout is not None
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 3
            assert all(alive(pid) for pid in pids)
            parent.kill()
        for pid in pids:
            assert_dies(pid)
