"""A host's copy of a run's weights over HTTP: what the trainer's host has, or what another host has staged of it.

`GET /files/vN/NAME` gives bytes of a file (ranges, by the kernel's sendfile), `GET /deltas/vN/NAME` what changed of a
bucket since another version (`delta.py`), `POST /news` what has changed since the asker looked last (it waits until
something has), `POST /where` whom to ask for a bucket; `POST /drop` and `POST /close` are for the run's coordinator.
Every call carries the run's token. Invariant: a range that the index does not name is not sent. aiohttp is under it. No
torch.

Fan-out: the trainer's host sends each bucket once to each site. The first host of a site that asks gets it from here;
the others are sent to that one, which lets them wait until it has the bucket. A host that fails is forgotten.
"""

import asyncio
import hmac
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from rollart.store.delta import DENSITY, Delta, encode
from rollart.store.index import MANIFEST, VERSION, WEIGHTS, folder_name, read_index, versions_in
from rollart.store.media import SharedMemory
from rollart.types import Bucket, JsonObject

WAIT_S = 15.0
"""How long a question for news is left open, at most."""
COMING_S = 2.0
"""How long one for a bucket that is on its way to this host."""
ASKS_S, TELL_S = 10.0, 3.0
"""A host that has not asked for so long is gone; and how long to stay at most to tell those that are not."""
LOOK_S = 0.02
"""How often the folder is looked at while somebody waits."""


class StoreServer:
    """Serves `directory`."""

    def __init__(
        self,
        directory: Path,
        token: str,
        *,
        drop: Callable[[int], None],
        closing: Callable[[], None],
        coming: Callable[[str], bool],
    ) -> None:
        """`drop` is told the oldest version that stays, `closing` that the run is over; `coming` says whether this host
        expects to have all of a push."""
        self._directory = directory
        self._token = token.encode()
        self._drop = drop
        self._closing = closing
        self._coming = coming
        self._holders: dict[tuple[str, str, str, int], list[str]] = {}
        """By site, push, file and place in it: the hosts of the site that have the bucket, or will have it first."""
        self._memory = SharedMemory(directory)
        self._encoding = asyncio.Lock()
        self._deltas: dict[tuple[str, str, str, int], Delta | None] = {}
        """By push, base, file and place in it."""
        self._seen: dict[str, list[Any]] = {}
        self._looked_s = 0.0
        self._askers: dict[str, float] = {}
        """When each host last asked for news; not there any more: those that were told that the run is over."""
        self.sent_bytes = 0
        """Of buckets."""
        self.closed = False
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        app = web.Application(middlewares=[self._authorised], client_max_size=2**24)
        app.add_routes(
            [
                web.get("/files/{version}/{name}", self._file),
                web.get("/deltas/{version}/{name}", self._delta),
                web.post("/news", self._news),
                web.post("/where", self._where),
                web.post("/drop", self._dropped),
                web.post("/close", self._close),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, reuse_address=True)
        await site.start()
        assert site._server is not None
        return int(site._server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]

    async def all_told(self) -> None:
        """Until every host that asks has heard that the run is over, or long enough for that."""
        await self._until(lambda: all(time.monotonic() - at_s > ASKS_S for at_s in self._askers.values()), TELL_S)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authorised(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            raise web.HTTPUnauthorized(text="this store wants its run's token\n")
        return await handler(request)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """A range of a bucket, once the index names that; or a small file, whole."""
        version, name = request.match_info["version"], request.match_info["name"]
        if not VERSION.fullmatch(version) or name.startswith("."):
            raise web.HTTPNotFound
        folder = self._directory / version
        if Path(name).match(WEIGHTS):
            push, start = request.query.get("push", ""), int(request.query.get("start", "0"))
            await self._until(
                lambda: self._bucket(folder, push, name, start) is not None or not self._coming(push), COMING_S
            )
            bucket = self._bucket(folder, push, name, start)
            asked = request.http_range
            if bucket is None and self._coming(push):
                return web.Response(status=202, text="not yet\n")
            if bucket is None:
                raise web.HTTPNotFound(text="that bucket is not here\n")
            if asked.start is None or not start <= asked.start < (asked.stop or 0) <= start + bucket.num_bytes:
                raise web.HTTPBadRequest(text="ask for a range of the bucket\n")
            self.sent_bytes += asked.stop - asked.start
        path = folder / name
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path, chunk_size=1 << 20)

    async def _delta(self, request: web.Request) -> web.Response:
        """What changed of a bucket since a version that the asker has; nothing (204) where that does not pay or cannot
        be told. Made once for all who ask."""
        name, asked = request.match_info["name"], request.query
        push, start, base = asked.get("push", ""), int(asked.get("start", "0")), asked.get("base", "")
        folders = [self._directory / folder_name(int(at)) for at in (asked["version"], asked["base_version"])]
        if not Path(name).match(WEIGHTS) or request.match_info["version"] != folders[0].name:
            raise web.HTTPNotFound
        await self._until(
            lambda: self._bucket(folders[0], push, name, start) is not None or not self._coming(push), COMING_S
        )
        new, old = self._bucket(folders[0], push, name, start), self._bucket(folders[1], base, name, start)
        if new is None and self._coming(push):
            return web.Response(status=202)
        if new is None or old is None or new.num_bytes != old.num_bytes:
            return web.Response(status=204)
        key = (push, base, name, start)
        async with self._encoding:
            if key not in self._deltas:
                # Of one version: who is late has it made once more.
                self._deltas = {known: delta for known, delta in self._deltas.items() if known[0] == push}
                self._deltas[key] = await asyncio.to_thread(self._encode, old, new)
        delta = self._deltas[key]
        if delta is None or delta.data is None:
            return web.Response(status=204, headers={DENSITY: str(delta.density) if delta is not None else ""})
        self.sent_bytes += len(delta.data)
        return web.Response(body=delta.data, headers={DENSITY: str(delta.density)})

    def _encode(self, old: Bucket, new: Bucket) -> Delta | None:
        try:
            raws = [self._memory.mapped(self._directory / one.name) for one in (old, new)]
        except OSError:
            return None  # dropped at this moment
        return encode(*(raw[new.start : new.start + new.num_bytes] for raw in raws))

    def _bucket(self, folder: Path, push: str, name: str, start: int) -> Bucket | None:
        found = read_index(folder)
        if found is None or found.push != push:
            return None
        wanted = (f"{folder.name}/{name}", start)
        return next((one for one in found.buckets if (one.name, one.start) == wanted), None)

    async def _news(self, request: web.Request) -> web.Response:
        """`have`: by version, the push and how many of its buckets the asker has, and whether all."""
        asked = await request.json()
        have: dict[str, list[Any]] = asked["have"]
        self._forget()
        self._askers[asked["peer"]] = time.monotonic()
        await self._until(lambda: self.closed or self._state() != have, float(asked["wait_s"]))
        if self.closed:
            self._askers.pop(asked["peer"], None)
            return web.json_response({"closed": True})
        state = self._state()
        changed = {}
        for version, (push, count, whole) in state.items():
            known = have.get(version, ["", 0, False])
            if known != [push, count, whole]:
                folder = self._directory / folder_name(int(version))
                changed[version] = self._change(folder, push, known[1] if known[0] == push else 0)
        return web.json_response({"versions": list(state), "changed": changed})

    def _change(self, folder: Path, push: str, since: int) -> JsonObject:
        found = read_index(folder)
        if found is None or found.push != push:  # pushed again at this very moment: the asker will hear of it
            return {"push": push, "buckets": [], "sizes": {}, "others": []}
        whole = (folder / MANIFEST).exists()
        sizes = {path.name: path.stat().st_size for path in folder.glob(WEIGHTS)}
        others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) if whole else []
        return {
            "push": push,
            "buckets": found.buckets[since:],
            "sizes": sizes,
            "others": [name for name in others if not Path(name).match(WEIGHTS)],
        }

    def _state(self) -> dict[str, list[Any]]:
        """By version: the push, how many buckets are there, whether all. Looked at once for all who wait."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return self._seen
        self._seen = {}
        for version in versions_in(self._directory):
            folder = self._directory / folder_name(version)
            index = read_index(folder)
            if index is not None:
                self._seen[str(version)] = [index.push, len(index.buckets), (folder / MANIFEST).exists()]
        self._looked_s = time.monotonic()
        return self._seen

    def _forget(self) -> None:
        """Who has buckets of versions that are not here any more."""
        pushes = {push for push, _, _ in self._state().values()}
        for key in [key for key in self._holders if key[1] not in pushes]:
            del self._holders[key]

    async def _where(self, request: web.Request) -> web.Response:
        """Whom to ask: "" means here. `failed`: one that did not have it after all.

        A host is sent only to one that asked before it, so that no two wait for each other.
        """
        asked = await request.json()
        peer = asked["peer"]
        holders = self._holders.setdefault((asked["site"], asked["push"], asked["name"], asked["start"]), [])
        if asked["failed"] in holders:
            holders.remove(asked["failed"])
        if peer not in holders:
            holders.append(peer)
        earlier = holders[: holders.index(peer)]
        return web.json_response({"peer": random.choice(earlier) if earlier else ""})

    async def _dropped(self, request: web.Request) -> web.Response:
        before = int((await request.json())["before"])
        await asyncio.to_thread(self._drop, before)
        return web.json_response({})

    async def _close(self, request: web.Request) -> web.Response:
        self.closed = True
        self._closing()
        return web.json_response({})

    async def _until(self, true: Callable[[], bool], wait_s: float) -> None:
        until_s = time.monotonic() + min(wait_s, WAIT_S)
        while not true():
            if time.monotonic() > until_s:
                return
            await asyncio.sleep(LOOK_S)
