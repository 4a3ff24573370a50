"""The composition root of a worker, and the local process around it: one worker behind the socket its parent gave it.

`build` makes a worker from its set-up, a mapping of plain values; `cluster/ray.py` calls it inside an actor and
`cluster/inline.py` in the coordinator. `python -m rollart.launch.worker SOCKET LIFE` is the process of
`cluster/local.py`: the first call is `setup`, which builds the worker; every later one is a method of its port. Calls
run side by side. The process ends with its parent: it reads a pipe whose other end only the parent holds.
"""

import asyncio
import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollart.errors import BoundaryError, ClusterError, text_of
from rollart.workers.child import die_with_parent
from rollart.workers.link import LENGTH, Outbox
from rollart.workers.wire import unpack

RENDEZVOUS = "ranks-meet"
"""Name of the file in the log directory through which the ranks of a trainer find each other."""

if TYPE_CHECKING:
    from rollart.store.buckets import BucketStore
    from rollart.train.ranks import RankedTrainer
    from rollart.train.settings import TrainerSettings


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
                with contextlib.suppress(OSError):  # the log's disk may be full
                    traceback.print_exc()
            outbox.put([number, False, [type(error).__name__, text_of(error)]])

    while True:
        try:
            head = await reader.readexactly(LENGTH.size)
            number, method, arguments = unpack(await reader.readexactly(LENGTH.unpack(head)[0]))
        except (asyncio.IncompleteReadError, ConnectionError):
            os._exit(0)
        task = asyncio.get_running_loop().create_task(answer(number, method, arguments))
        running.add(task)
        task.add_done_callback(running.discard)


async def build(setup: Mapping[str, Any], ranks: "Sequence[RankWorker]" = ()) -> Any:
    """The implementation that this process runs: an engine, a trainer, or environments. Every cluster calls this.

    `ranks`: a trainer's, where the cluster has placed them; else a trainer of several starts them beside itself.
    """
    if setup.get("cores"):
        os.sched_setaffinity(0, setup["cores"])
    match setup["role"]:
        case "environments":
            return _environments(setup)
        case "stub":
            from benchmarks.stub import StubEngine

            return StubEngine(setup["id"])
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(setup["threads"])
    match setup["role"]:
        case "engine" if setup["type"] != "embedded":
            from rollart.engines.launch import ServerSettings, launch
            from rollart.store.files import FileStore
            from rollart.store.open import open_store

            files = open_store(setup["store"])
            assert isinstance(files, FileStore)  # `check_supported` lets no other through
            server = ServerSettings(
                **setup["server"], kind=setup["type"], engine_id=setup["id"], model=str(files.initial())
            )
            return await launch(server, fetch=files.fetch, folder=files.folder)
        case "engine":
            from rollart.engines.embedded.engine import EmbeddedEngine, EngineSettings
            from rollart.engines.embedded.threaded import ThreadedEngine
            from rollart.store.prefetch import FetchAhead

            ahead = FetchAhead(_store(setup))
            core = EmbeddedEngine.from_directory(
                setup["model"],
                dtype=getattr(torch, setup["dtype"]),
                device=setup["device"],
                engine_id=setup["id"],
                settings=EngineSettings(**setup["settings"]),
                stop_tokens=setup["stop_tokens"],
            )
            return ThreadedEngine(core, fetch=ahead.fetch, stage=ahead.stage, spent_s=ahead.spent_s)
        case "trainer" if setup["type"] == "fsdp2":
            return await _ranked_trainer(setup, ranks)
        case "trainer":
            from rollart.train.single import AsyncTrainer, SingleTrainer

            return AsyncTrainer(SingleTrainer(_trainer_settings(setup)), _store(setup))
        case "rank":
            from rollart.train.fsdp2 import RankSettings, ShardedTrainer
            from rollart.train.ranks import AsyncRank

            at = RankSettings(**setup["at"])
            return AsyncRank(await asyncio.to_thread(ShardedTrainer, _trainer_settings(setup), at), _store(setup))
    raise ValueError(f"no such worker: {setup['role']}")


def _store(setup: Mapping[str, Any]) -> "BucketStore":
    from rollart.store.open import open_store

    return open_store(setup["store"])


def _trainer_settings(setup: Mapping[str, Any]) -> "TrainerSettings":
    from rollart.train.losses import LossSettings
    from rollart.train.settings import TrainerSettings

    return TrainerSettings(
        **setup["settings"],
        loss=LossSettings(**setup["loss"]),
        earlier=tuple((until, _trainer_settings(before)) for until, before in setup.get("earlier", ())),
    )


class RankWorker(Protocol):
    """A rank that is yet to be built."""

    @property
    def pid(self) -> int | None: ...

    async def start(self, setup: Mapping[str, Any]) -> None: ...

    async def call(self, error: type[BoundaryError], method: str, *arguments: Any) -> Any: ...

    async def stop(self) -> None: ...


async def _ranked_trainer(setup: Mapping[str, Any], placed: "Sequence[RankWorker]" = ()) -> "RankedTrainer":
    """A trainer of several ranks: those that were placed for it, else child processes. These end with it, as it ends
    with its parent."""
    from rollart.cluster.local import Process
    from rollart.train.ranks import RankedTrainer

    log_dir, device = Path(setup["log_dir"]), setup["settings"]["device"]
    ranks = placed or [Process(f"rank-{rank}", log_dir) for rank in range(setup["world_size"])]
    rendezvous = setup["rendezvous"] if placed else f"file://{_rendezvous_file(log_dir)}"
    setups = [
        {
            **setup,
            "role": "rank",
            "at": {"rank": rank, "world_size": len(ranks), "rendezvous": rendezvous},
            # a rank that was placed sees no GPU but its own
            "settings": {**setup["settings"], "device": device if placed else _device_of(device, rank)},
        }
        for rank in range(len(ranks))
    ]
    starts = [asyncio.ensure_future(rank.start(own)) for rank, own in zip(ranks, setups, strict=True)]
    try:
        await asyncio.gather(*starts)
    except ClusterError:
        # the others may be waiting for the one that failed
        for start in starts:
            start.cancel()
        await asyncio.gather(*(rank.stop() for rank in ranks))
        raise
    return RankedTrainer(_trainer_settings(setup), ranks)


def _rendezvous_file(log_dir: Path) -> Path:
    """A file that is not there yet, for ranks of this machine. What a trainer before this one left is removed."""
    for left in log_dir.glob(f"{RENDEZVOUS}-*"):
        left.unlink(missing_ok=True)
    return log_dir.resolve() / f"{RENDEZVOUS}-{os.getpid()}"


def _device_of(first: str, rank: int) -> str:
    """A rank's own device, where the first one's is given: `cuda:0` and those after it, or the CPU."""
    kind, _, number = first.partition(":")
    return kind if kind == "cpu" else f"{kind}:{int(number or 0) + rank}"


def _environments(setup: Mapping[str, Any]) -> Any:
    """So many slots, each isolated as the job says."""
    from rollart.envs.inline import InlineEnvHost
    from rollart.envs.process import ProcessEnvHost
    from rollart.envs.service import EnvService
    from rollart.tasks.load import load_task_set

    uses, seed, slots = setup["uses"], setup["seed"], setup["slots"]
    if setup["isolation"] == "process":
        variables = setup["variables"]
        return EnvService(ProcessEnvHost(uses, slots=slots, log_dir=setup["log_dir"], seed=seed, variables=variables))
    task_sets = {name: load_task_set(use, seed=seed, domain=name) for name, use in uses.items()}
    return EnvService(InlineEnvHost(task_sets, slots=slots))


if __name__ == "__main__":
    main()
