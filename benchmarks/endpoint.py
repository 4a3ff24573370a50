"""What the endpoint costs beside the built-in agent. `python -m benchmarks.endpoint`.

The same conversations of several turns, played by the built-in agent and by programs over OpenAI's protocol, against
engines that do nothing but wait and return tokens. The coordinator, the gateway and a real tokenizer are in this
process, whose CPU is what is measured; the agents are in another, each with a connection of its own.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.command import main
from rollart.config.job import Job
from rollart.config.load import build_job
from rollart.control.coordinator import Coordinator
from rollart.control.program import ProgramAgent
from rollart.control.world import RolloutWorld
from rollart.events import schema
from rollart.events.log import EventLog, LogHandle
from rollart.gateway.server import HttpGateway
from rollart.launch.simulation import simulated_world
from rollart.model.tokenizer import ChatTokenizer
from rollart.sim.faults import Faults
from rollart.sim.links import SimLink
from rollart.sim.trainer import SimJournal
from rollart.types import (
    Completion,
    Endpoint,
    EngineSpec,
    Finish,
    GenerateRequest,
    Message,
    Observation,
    Program,
    Span,
    SwapReport,
    Task,
    TrajectoryId,
    WeightManifest,
    WeightVersion,
)

SESSIONS = (16, 256)
TURNS = 8
ANSWER_TOKENS = 32
ENGINE_S = 0.1
"""How long an answer takes."""
ROUNDS = 3
ASKED = "What is 12 and 7? Say it in words, and then once more in other words.\n"
CLIENT = "--client"


def measure() -> dict[str, Any]:
    from rollart_recipes.tiny import tiny_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer().save_pretrained(folder)
        tokenizer = ChatTokenizer(folder)
        rounds: dict[int, list[tuple[_Cost, _Cost]]] = {sessions: [] for sessions in SESSIONS}
        for number in range(ROUNDS):
            for sessions in SESSIONS:
                order = (False, True) if number % 2 else (True, False)
                made = {over_http: asyncio.run(_run(sessions, tokenizer, over_http=over_http)) for over_http in order}
                rounds[sessions].append((made[False], made[True]))
                print(f"round {number + 1}/{ROUNDS}: {sessions} sessions", file=sys.stderr, flush=True)
    return {
        "sessions": {str(sessions): _figures(found) for sessions, found in rounds.items()},
        "turns": TURNS,
        "answer_tokens": ANSWER_TOKENS,
        "engine_s": ENGINE_S,
    }


@dataclass(slots=True)
class _Cost:
    calls: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    latency_s: list[float] = field(default_factory=list)
    """Of each call, as the agent sees it."""

    @property
    def call_us(self) -> float:
        return self.cpu_s / self.calls * 1e6


def _figures(rounds: list[tuple[_Cost, _Cost]]) -> dict[str, Any]:
    built_in, over_http = ([pair[at] for pair in rounds] for at in (0, 1))
    latencies = sorted(value for cost in over_http for value in cost.latency_s)
    return {
        "calls": over_http[0].calls,
        "built_in_us_per_call": _median(cost.call_us for cost in built_in),
        "endpoint_us_per_call": _median(cost.call_us for cost in over_http),
        "endpoint_us_per_call_rounds": [round(cost.call_us) for cost in over_http],
        "endpoint_calls_per_s": _median(cost.calls / cost.wall_s for cost in over_http),
        "built_in_calls_per_s": _median(cost.calls / cost.wall_s for cost in built_in),
        "latency_ms": {
            "p50": round(1e3 * latencies[len(latencies) // 2], 1),
            "p99": round(1e3 * latencies[len(latencies) * 99 // 100], 1),
        },
    }


def _median(values: Any) -> int:
    return round(statistics.median(values))


def _job(sessions: int) -> Job:
    return build_job(
        {
            "name": "bench-endpoint",
            "tasks": [{"name": "talk", "max_turns": TURNS, "max_tokens": ANSWER_TOKENS}],
            "pools": [{"name": "one", "engines": {"count": 4}}, {"name": "rooms", "slots": sessions}],
            "evaluation": {"episodes": sessions, "concurrency": sessions},
            "sim": {"model": "qwen3-0.6b"},
        }
    )


async def _run(sessions: int, tokenizer: ChatTokenizer, *, over_http: bool) -> _Cost:
    job, cost = _job(sessions), _Cost()
    log = EventLog(asyncio.get_running_loop().time)
    failed: list[str] = []

    def look(event: schema.Event) -> None:
        if isinstance(event, schema.End) and event.status != "done":
            failed.append(event.reason)

    log.read_by(look)
    agents = _Agents(sessions, cost)
    gateway = HttpGateway(host="127.0.0.1", port=0, model="stub")
    world = simulated_world(job, log, Faults((), log), SimJournal(), SimLink(1e12), SimLink(1e12))
    assert isinstance(world.rollout, RolloutWorld)
    rollout = replace(
        world.rollout,
        cluster=_Cluster(cost),
        host=_Host(agents),
        tokenizer=tokenizer,
        agents={"talk": ProgramAgent(Program(command=("stub",)), gateway)} if over_http else {},
    )
    world = replace(world, rollout=rollout)
    if over_http:
        await agents.start()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    await Coordinator(job, world, LogHandle(log)).evaluate()
    cost.wall_s, cost.cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    await agents.stop()
    await gateway.close()
    assert cost.calls == sessions * TURNS, f"{cost.calls} calls; {failed[:1]}"
    return cost


class _Cluster:
    def __init__(self, cost: _Cost) -> None:
        self._cost = cost

    async def engine(self, spec: EngineSpec) -> "_Engine":
        return _Engine(spec.id, self._cost)

    async def trainer(self) -> Any:
        raise AssertionError("nothing is trained")

    async def close(self) -> None:
        pass


class _Engine:
    def __init__(self, name: str, cost: _Cost) -> None:
        self._name = name
        self._cost = cost

    async def generate(self, request: GenerateRequest) -> Completion:
        self._cost.calls += 1
        await asyncio.sleep(ENGINE_S)
        rng = np.random.default_rng(self._cost.calls)
        return Completion(
            tokens=rng.integers(20, 120, ANSWER_TOKENS, dtype=np.int32),
            logprobs=-rng.exponential(1.0, ANSWER_TOKENS).astype(np.float32),
            spans=(Span(0, ANSWER_TOKENS),),
            finish=Finish.STOP,
            engine=self._name,
        )

    async def abort(self, request_id: str) -> int:
        return self._cost.calls

    async def stage(self, version: WeightVersion) -> None:
        pass

    async def swap(self, manifest: WeightManifest) -> SwapReport:
        raise AssertionError("nothing is swapped")


class _Agents:
    """The agents' process. All begin when the last of them has its endpoint."""

    def __init__(self, sessions: int, cost: _Cost) -> None:
        self._sessions = sessions
        self._cost = cost
        self._endpoints: list[Endpoint] = []
        self._done: asyncio.Future[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._done = asyncio.get_running_loop().create_future()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.endpoint", CLIENT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=1 << 26,
        )
        assert self._process.stdout is not None
        await self._process.stdout.readline()  # it is up

    async def talk(self, endpoint: Endpoint) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._done is not None
        self._endpoints.append(endpoint)
        if len(self._endpoints) == self._sessions:
            self._process.stdin.write(json.dumps(self._endpoints).encode() + b"\n")
            self._cost.latency_s = json.loads(await self._process.stdout.readline())
            self._done.set_result(None)
        await self._done

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.wait()


class _Host:
    def __init__(self, agents: _Agents) -> None:
        self._agents = agents

    async def open(self, task: Task, trajectory: TrajectoryId) -> "_Env":
        return _Env(self._agents)


class _Env:
    def __init__(self, agents: _Agents) -> None:
        self._agents = agents
        self._turn = 0

    async def reset(self) -> Observation:
        return Observation(messages=(Message(role="user", content=ASKED),))

    async def step(self, action: str) -> Observation:
        self._turn += 1
        return Observation(done=True) if self._turn == TURNS else await self.reset()

    async def play(self, program: Program, endpoint: Endpoint) -> Observation:
        await self._agents.talk(endpoint)
        return Observation(done=True)

    async def close(self) -> None:
        pass


# --- the other process -----------------------------------------------------------------------------------------------


async def _be_agents() -> None:
    import aiohttp

    print("up", flush=True)
    endpoints = json.loads(await asyncio.to_thread(sys.stdin.readline))
    latency_s: list[float] = []

    async def talk(http: aiohttp.ClientSession, url: str, key: str) -> None:
        messages: list[dict[str, str]] = []
        for _ in range(TURNS):
            messages.append({"role": "user", "content": ASKED})
            began_s = time.perf_counter()
            async with http.post(
                f"{url}/chat/completions",
                json={"model": "stub", "messages": messages},
                headers={"Authorization": f"Bearer {key}"},
            ) as response:
                answer = await response.json()
                assert response.status == 200, answer
            latency_s.append(time.perf_counter() - began_s)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(talk(http, url, key) for url, key, *_ in endpoints))
    print(json.dumps(latency_s), flush=True)


if __name__ == "__main__":
    if CLIENT in sys.argv:
        asyncio.run(_be_agents())
    else:
        sys.exit(main(measure))
