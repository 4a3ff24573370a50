"""A small platform of functions on loopback, for `benchmarks.rewards`: a door, and behind it real function processes.

    python -m benchmarks.function_platform PORT FUNCTION [--fewest 0] [--most 8] [--slots 8] [--idle 4]

Each instance is a `rollart reward serve` of its own (functions-framework, gunicorn) that takes `--slots` calls at a
time. A call that finds no free slot waits in line; an instance is started for every `--slots` calls that are waiting
or under way, up to `--most`; one that is idle for `--idle` seconds is ended, down to `--fewest`. POST / calls the
function, GET / says what was done so far. The first answer of an instance says how long its start took.
"""

import argparse
import asyncio
import math
import os
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

READY_S = 60.0
"""An instance that does not listen after so long is given up."""
COLD_START_HEADER = "X-Cold-Start-Seconds"


def a_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(eq=False)
class Instance:
    process: asyncio.subprocess.Process
    port: int
    began_s: float
    busy: int = 0
    idle_since_s: float = 0.0
    start_s: float = 0.0
    """0 once an answer has told it."""


@dataclass
class Platform:
    function: str
    fewest: int
    most: int
    slots: int
    idle_s: float
    instances: list[Instance] = field(default_factory=list)
    starting: int = 0
    line: deque[asyncio.Future[Instance]] = field(default_factory=deque)
    under_way: int = 0
    calls: int = 0
    starts: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    reserved_s: float = 0.0
    """Of instances, up to the last change of their number."""
    changed_s: float = field(default_factory=time.monotonic)
    began_s: float = field(default_factory=time.monotonic)

    def count(self) -> None:
        now_s = time.monotonic()
        self.reserved_s += (len(self.instances) + self.starting) * (now_s - self.changed_s)
        self.changed_s = now_s

    def scale(self) -> None:
        wanted = max(self.fewest, min(self.most, math.ceil(self.under_way / self.slots)))
        while len(self.instances) + self.starting < wanted:
            self.count()
            self.starting += 1
            asyncio.get_running_loop().create_task(self.start())

    async def start(self) -> None:
        began_s, port = time.monotonic(), a_port()
        command = ("-m", "rollart.cli", "reward", "serve", self.function, "--port", str(port))
        environment = {**os.environ, "THREADS": str(self.slots)}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, env=environment, stderr=asyncio.subprocess.DEVNULL
        )
        up = False
        while not up and process.returncode is None and time.monotonic() - began_s < READY_S:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                up = True
            except OSError:
                await asyncio.sleep(0.05)
        self.count()
        self.starting -= 1
        if not up:
            if process.returncode is None:
                process.kill()
            return
        now_s = time.monotonic()
        made = Instance(process, port, began_s, idle_since_s=now_s, start_s=now_s - began_s)
        self.starts.append(made.start_s)
        self.instances.append(made)
        self.hand_out()

    def hand_out(self) -> None:
        """Free slots to those who wait; the fullest instance first, so that others become idle."""
        while self.line:
            free = [one for one in self.instances if one.busy < self.slots and one.process.returncode is None]
            if not free:
                return
            waiting = self.line.popleft()
            if not waiting.done():
                chosen = max(free, key=lambda one: one.busy)
                chosen.busy += 1
                waiting.set_result(chosen)

    async def cool(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            for one in list(self.instances):
                idle = not one.busy and time.monotonic() - one.idle_since_s > self.idle_s
                if one.process.returncode is not None or (idle and len(self.instances) > self.fewest):
                    self.count()
                    self.instances.remove(one)
                    if one.process.returncode is None:
                        one.process.terminate()
            self.scale()

    async def call(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.under_way += 1
        self.calls += 1
        instance: Instance | None = None
        try:
            self.scale()
            turn: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
            self.line.append(turn)
            self.hand_out()
            instance = await turn
            return await self.forward(instance, body, request.headers.get("Idempotency-Key", ""))
        finally:
            self.under_way -= 1
            if instance is not None:
                instance.busy -= 1
                instance.idle_since_s = time.monotonic()
                self.hand_out()

    async def forward(self, instance: Instance, body: bytes, key: str) -> web.Response:
        began_s = time.monotonic()
        headers = {"Content-Type": "application/json", "Idempotency-Key": key}
        try:
            async with self.client.post(f"http://127.0.0.1:{instance.port}/", data=body, headers=headers) as answer:
                told = {}
                if instance.start_s:
                    told = {COLD_START_HEADER: f"{instance.start_s:.3f}"}
                    instance.start_s = 0.0
                self.busy_s += time.monotonic() - began_s
                return web.Response(
                    body=await answer.read(), status=answer.status, headers=told, content_type="application/json"
                )
        except (ClientError, OSError) as error:
            return web.Response(status=502, text=f"the instance is gone: {error}")

    async def told(self, request: web.Request) -> web.Response:
        self.count()
        return web.json_response(
            {
                "calls": self.calls,
                "starts": len(self.starts),
                "start_s": self.starts,
                "instances": len(self.instances) + self.starting,
                "instance_s": self.reserved_s,
                "busy_s": self.busy_s,
                "slots": self.slots,
                "up_s": time.monotonic() - self.began_s,
            }
        )

    async def serve(self, port: int) -> None:
        connector = TCPConnector(limit=0, keepalive_timeout=1.0)
        async with ClientSession(connector=connector, timeout=ClientTimeout(total=120)) as self.client:
            app = web.Application()
            app.router.add_post("/", self.call)
            app.router.add_get("/", self.told)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
            while len(self.instances) < self.fewest:
                self.scale()
                await asyncio.sleep(0.1)
            await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
            cooling = asyncio.create_task(self.cool())
            await stop.wait()
            cooling.cancel()
            for one in self.instances:
                if one.process.returncode is None:
                    one.process.terminate()
            await asyncio.gather(*(one.process.wait() for one in self.instances))
            await runner.cleanup()

    client: ClientSession = field(init=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("function")
    parser.add_argument("--fewest", type=int, default=0)
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--idle", type=float, default=4.0)
    given = parser.parse_args()
    platform = Platform(given.function, given.fewest, given.most, given.slots, given.idle)
    asyncio.run(platform.serve(given.port))


if __name__ == "__main__":
    main()
