"""The Gateway port over HTTP: one server, and for each trajectory under way a path and a key of its own.

A request waits in its trajectory's door until control takes it, so requests of one trajectory are answered one after
another. An agent that floods fills its own door, and is refused there. A key ends with its trajectory. The server
listens on loopback unless the job says otherwise, and on a Unix socket for agents that have no network.
"""

import asyncio
import contextlib
import hmac
import itertools
import resource
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import quote

import orjson
from aiohttp import web

from rollart.errors import EnvError, JobError
from rollart.gateway.openai import Refusal, chunks, model, models, parsed, whole
from rollart.types import ChatAnswer, ChatRequest, Endpoint, TrajectoryId
from rollart.workers.forward import own_folder

MAX_WAITING = 64
"""Requests of one trajectory under way; one more is refused."""
MAX_REFUSED = 500
"""Requests of one trajectory that were refused, after which it is given up: its agent does nothing but flood."""
REFUSED_S = 0.1
"""How long a refusal takes: who asks nonsense in a loop asks slowly."""
MAX_BODY = 8 * 1024 * 1024
MAX_CONNECTIONS = 4096
"""Of all trajectories, and at most half of the files that this process may have open. One more, and the oldest on which
no request is under way is closed: clients open another when they need it."""
BACKLOG = 1024
FOLDER = "rollart-endpoint-"
JSON = "application/json"


class HttpCall:
    """One request, and the answer its handler waits for."""

    def __init__(self, request: ChatRequest) -> None:
        self.request = request
        self.answered: asyncio.Future[ChatAnswer] = asyncio.get_running_loop().create_future()

    def answer(self, answer: ChatAnswer) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)

    def refuse(self, code: str, reason: str) -> None:
        self.fail(Refusal(400, code, reason))

    def fail(self, refusal: Refusal) -> None:
        if not self.answered.done():
            self.answered.set_exception(refusal)
            self.answered.exception()  # its client may have gone


class HttpDoor:
    """The requests of one trajectory."""

    def __init__(self, gateway: "HttpGateway", name: str, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.gateway = gateway
        self._name = name
        self._under_way = 0
        self._refused = 0
        self.calls: dict[HttpCall, None] = {}
        """Neither answered nor given up."""
        self._queue: asyncio.Queue[HttpCall | None] = asyncio.Queue()
        self.answers = itertools.count()

    async def next(self) -> HttpCall:
        """Raises EnvError where there is nothing but a flood."""
        while True:
            call = await self._queue.get()
            if call is None:
                raise EnvError(f"the agent made {MAX_REFUSED} requests that were refused")
            if not call.answered.done():  # its client has not hung up
                return call

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """One request, from its first byte to its answer. Counts those that are refused."""
        self._under_way += 1
        try:
            if self._under_way > MAX_WAITING:
                raise Refusal(429, "too_many_requests", f"{MAX_WAITING} requests of this episode are under way")
            yield
        except Exception:  # what is no refusal is a fault of ours, and may be asked for as often
            self._refused += 1
            if self._refused == MAX_REFUSED:
                self._queue.put_nowait(None)
            await asyncio.sleep(REFUSED_S)
            raise
        finally:
            self._under_way -= 1

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Raises Refusal."""
        call = HttpCall(request)
        self.calls[call] = None
        self._queue.put_nowait(call)
        try:
            return await call.answered
        finally:
            del self.calls[call]

    def close(self) -> None:
        self.gateway.forget(self._name)
        for call in list(self.calls):
            call.fail(_over())


def _over() -> Refusal:
    return Refusal(
        401,
        "episode_over",
        "no episode has this URL and key now. Each has its own, in OPENAI_BASE_URL and OPENAI_API_KEY, and they end "
        "with it: make the client inside the function that is called, not when its module is imported",
    )


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def as_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is one that OpenAI's clients can read."""
    try:
        return await handler(request)
    except Refusal as refusal:
        if refusal.status == 401:
            await asyncio.sleep(REFUSED_S)
        return web.Response(status=refusal.status, body=refusal.to_json(), content_type=JSON)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}; there are chat/completions and models"
        told = Refusal(error.status, "http_error", text)
        await asyncio.sleep(REFUSED_S)
        return web.Response(status=error.status, body=told.to_json(), content_type=JSON)


class HttpGateway:
    """Its sockets are there from the beginning, and are served from the first door on."""

    def __init__(self, *, host: str, port: int, model: str) -> None:
        """Raises JobError where nothing can listen there."""
        self._model = model
        self._doors: dict[str, HttpDoor] = {}
        self._runner: web.AppRunner | None = None
        self._busy: set[asyncio.BaseProtocol] = set()
        """Connections with a request under way that has shown its key."""
        self._accepting: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise JobError(
                f"endpoint: nothing can listen on {host} port {port} ({error.strerror or error}); give another host "
                "or port"
            ) from None
        at, self._port = self._listener.getsockname()[:2]
        self._at = f"[{at}]" if ":" in at else at
        self._folder = own_folder(FOLDER)
        self.socket = self._folder / "endpoint.sock"
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind(str(self.socket))
        self.socket.chmod(0o666)  # a sandbox that it is bound into has a user of its own
        self._unix.listen(BACKLOG)

    async def open(self, trajectory: TrajectoryId) -> HttpDoor:
        async with self._starting:
            if self._runner is None:
                self._runner = await self._serve()
        name = str(trajectory)
        url = f"http://{self._at}:{self._port}/{quote(name, safe='')}/v1"
        endpoint = Endpoint(url, secrets.token_urlsafe(24), str(self.socket), self._model)
        door = self._doors[name] = HttpDoor(self, name, endpoint)
        return door

    def forget(self, name: str) -> None:
        self._doors.pop(name, None)

    async def close(self) -> None:
        for door in list(self._doors.values()):
            door.close()
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()
        self._listener.close()
        self._unix.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self) -> web.AppRunner:
        app = web.Application(middlewares=[as_errors], client_max_size=MAX_BODY)
        app.router.add_post("/{name}/v1/chat/completions", self._complete)
        app.router.add_get("/{name}/v1/models", self._models)
        app.router.add_get("/{name}/v1/models/{model}", self._models)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        for listener in (self._listener, self._unix):
            self._accepting.append(asyncio.get_running_loop().create_task(self._accept(listener, runner)))
        return runner

    async def _accept(self, listener: socket.socket, runner: web.AppRunner) -> None:
        """One after another, so that whoever makes thousands keeps nobody waiting."""
        loop, served = asyncio.get_running_loop(), runner.server
        assert served is not None
        most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        listener.setblocking(False)
        while True:
            try:
                line, _ = await loop.sock_accept(listener)
            except OSError:  # it hung up, or there are no more files
                await asyncio.sleep(REFUSED_S)
                continue
            there = [one for one in served.connections if one.transport is not None]
            if len(there) >= most:
                idle = next((one for one in there if one not in self._busy), None)
                if idle is None:
                    line.close()
                    continue
                idle.force_close()
            try:
                await loop.connect_accepted_socket(served, line)
            except OSError:
                line.close()

    def _door(self, request: web.Request) -> HttpDoor:
        door = self._doors.get(request.match_info["name"])
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if (
            door is None
            or scheme.lower() != "bearer"
            or not hmac.compare_digest(key.encode(), door.endpoint.key.encode())
        ):
            raise _over()
        return door

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        door = self._door(request)
        self._busy.add(request.protocol)
        try:
            async with door.request():
                wanted = parsed(await request.read())
                answer = await door.ask(wanted.request)
        finally:
            self._busy.discard(request.protocol)
        answer_id = f"chatcmpl-{request.match_info['name']}-{next(door.answers)}"
        session = {"X-Session-ID": request.match_info["name"]}
        if not wanted.stream:
            return web.Response(body=whole(answer, wanted, answer_id), content_type=JSON, headers=session)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"} | session
        )
        with contextlib.suppress(ConnectionResetError):  # it has hung up
            await response.prepare(request)
            for chunk in chunks(answer, wanted, answer_id):
                await response.write(chunk)
            await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._door(request)
        one = request.match_info.get("model")
        found = models(self._model) if one is None else model(self._model)
        return web.Response(body=orjson.dumps(found), content_type=JSON)
