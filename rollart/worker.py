"""The composition root of a worker, and the local process around it: one worker behind the socket its parent gave it.

`build` makes a worker from its set-up, a mapping of plain values; `cluster/ray.py` calls it inside an actor and
`cluster/inline.py` in the coordinator. `python -m rollart.worker SOCKET LIFE` is the process of
`cluster/local.py`: the first call is `setup`, which builds the worker; every later one is a method of its port. Calls
run side by side. The process ends with its parent: it reads a pipe whose other end only the parent holds.
"""

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from rollart.cluster.link import LENGTH, Outbox
from rollart.tasks.child import die_with_parent
from rollart.wire import unpack


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]))
    asyncio.run(_serve(link))


async def _serve(link: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=link, limit=2**26)
    outbox = Outbox(writer.write)
    worker: Any = None
    running: set[asyncio.Task[None]] = set()

    async def answer(number: int, method: str, arguments: list[Any]) -> None:
        nonlocal worker
        try:
            if method == "setup":
                worker = await build(arguments[0])
                value = None
            else:
                value = await getattr(worker, method)(*arguments)
            outbox.put([number, True, value])
        except Exception as error:  # the boundary of the process: whatever it is, the caller hears it
            if method == "setup" or not type(error).__module__.startswith("rollart."):
                traceback.print_exc()
            outbox.put([number, False, [type(error).__name__, str(error) or type(error).__name__]])

    while True:
        try:
            head = await reader.readexactly(LENGTH.size)
            number, method, arguments = unpack(await reader.readexactly(LENGTH.unpack(head)[0]))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)
        task = asyncio.get_running_loop().create_task(answer(number, method, arguments))
        running.add(task)
        task.add_done_callback(running.discard)


async def build(setup: Mapping[str, Any]) -> Any:
    """The implementation that this process runs: an engine, a trainer, or environments. Every cluster calls this."""
    if setup.get("cores"):
        os.sched_setaffinity(0, setup["cores"])
    match setup["role"]:
        case "environments":
            return _environments(setup)
        case "stub":
            from rollart.bench.stub import StubEngine

            return StubEngine(setup["id"])
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(setup["threads"])
    match setup["role"]:
        case "engine" if setup["type"] != "embedded":
            from rollart.engines.launch import ServerSettings, launch
            from rollart.weights.files import FileStore
            from rollart.weights.kinds import open_store

            files = open_store(setup["store"])
            assert isinstance(files, FileStore)  # `refuse_what_is_not_there` lets no other through
            server = ServerSettings(
                **setup["server"], kind=setup["type"], engine_id=setup["id"], model=str(files.initial())
            )
            return await launch(server, fetch=files.fetch, folder=files.folder)
        case "engine":
            from rollart.engines.embedded import EmbeddedEngine, EngineSettings
            from rollart.engines.threaded import ThreadedEngine
            from rollart.weights.ahead import FetchAhead
            from rollart.weights.kinds import open_store

            ahead = FetchAhead(open_store(setup["store"]))
            core = EmbeddedEngine.from_directory(
                setup["model"],
                device=setup["device"],
                engine_id=setup["id"],
                settings=EngineSettings(**setup["settings"]),
            )
            return ThreadedEngine(core, fetch=ahead.fetch, stage=ahead.stage, spent_s=ahead.spent_s)
        case "trainer":
            from rollart.train.losses import LossSettings
            from rollart.train.single import AsyncTrainer, SingleSettings, SingleTrainer
            from rollart.weights.kinds import open_store

            store = open_store(setup["store"])
            settings = SingleSettings(**setup["settings"], loss=LossSettings(**setup["loss"]))
            return AsyncTrainer(SingleTrainer(settings), store)
    raise ValueError(f"no such worker: {setup['role']}")


def _environments(setup: Mapping[str, Any]) -> Any:
    """So many slots, each isolated as the job says."""
    from rollart.envs.inline import InlineEnvHost
    from rollart.envs.process import ProcessEnvHost
    from rollart.envs.service import EnvService
    from rollart.tasks.load import load_task_set

    uses, seed, slots = setup["uses"], setup["seed"], setup["slots"]
    if setup["isolation"] == "process":
        return EnvService(ProcessEnvHost(uses, slots=slots, log_dir=setup["log_dir"], seed=seed))
    task_sets = {name: load_task_set(use, seed=seed, domain=name) for name, use in uses.items()}
    return EnvService(InlineEnvHost(task_sets, slots=slots))


if __name__ == "__main__":
    main()
