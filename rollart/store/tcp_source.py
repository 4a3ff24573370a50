"""The asking side of `serve.py`: buckets over HTTP into memory that is there already. No torch.

A bucket is read in parts, over several connections at a time; each part goes on where a cut link left it. The client is
the standard library's: it reads a body into a buffer of ours without a copy between.
"""

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rollart.errors import WeightError
from rollart.store.delta import DENSITY, apply
from rollart.store.index import folder_name
from rollart.store.media import Bytes
from rollart.store.mirror import Base, Came, Have, News, VersionNews
from rollart.types import Bucket, WeightVersion

CONNECTIONS = 4
"""To one host at a time."""
PART_BYTES = 16 * 1024 * 1024
"""Asked for at once over one connection."""
PIECE_BYTES = 1024 * 1024
"""What a cut link may cost of one part."""
STALL_S = 5.0
"""A connection over which nothing came for so long is given up, and made again."""
NEWS_S = 2.0
"""How long a question for news is left open; then it is asked again, with what is here by then."""
GIVE_UP_S = 60.0
"""A bucket of which nothing came for so long is asked for anew."""
DELTA_S = 60.0
"""How long the other side may take to find out what changed of a bucket."""
PEER_S = 300.0
"""How long another host may take to have a bucket that it is fetching itself."""


class NotThere(WeightError):
    """The host asked does not have it, and does not expect it."""


class TcpSource:
    """One host that serves weights, as `rollart.store.mirror.Source`; where it says so, others in its place."""

    def __init__(self, address: str, token: str, *, site: str = "", peer: str = "", deltas: bool = False) -> None:
        """`address`: `host:port`. `peer`: where others can ask this host; empty where they cannot. `deltas`: ask what
        changed, where the bucket of an older version is here."""
        self._address = address
        self._token = token
        self._site = site
        self.peer = peer
        self._own = threading.local()
        self._connections: list[http.client.HTTPConnection] = []
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="rollart-weights")
        self._deltas = deltas
        self.from_peers_bytes = 0
        self.delta_bytes = 0
        """That came as deltas,"""
        self.saved_bytes = 0
        """and how many more the buckets have that were made of them."""

    # --- what a mirror asks

    def news(self, have: Have) -> News:
        known = {str(version): list(state) for version, state in have.items()}
        answer = self.post("/news", {"have": known, "wait_s": NEWS_S, "peer": self.peer}, timeout_s=NEWS_S + STALL_S)
        if answer.get("closed"):
            return News((), {}, closed=True)
        changed = {
            int(version): VersionNews(
                one["push"], tuple(Bucket(*bucket) for bucket in one["buckets"]), one["sizes"], one["others"]
            )
            for version, one in answer["changed"].items()
        }
        return News([int(version) for version in answer["versions"]], changed)

    def read(self, push: str, bucket: Bucket, into: Bytes, came: Came, base: Base | None = None) -> float | None:
        failed = ""
        while True:
            asked = {"push": push, "name": bucket.name, "start": bucket.start, "failed": failed}
            where = self.post("/where", asked | {"site": self._site, "peer": self.peer})["peer"] if self.peer else ""
            try:
                made, density = self._read_delta(where or self._address, push, bucket, into, came, base)
                if not made:
                    self._read_from(where or self._address, push, bucket, into, came)
            except (OSError, NotThere):
                if not where:
                    raise
                failed = where
            else:
                self.from_peers_bytes += bucket.num_bytes if where else 0
                return density

    def small(self, version: WeightVersion, name: str) -> bytes:
        status, body, _ = self._ask(self._address, "GET", f"/files/{folder_name(version)}/{quote(name)}")
        if status != 200:
            raise NotThere(f"{self._address}: version {version} has no {name} any more")
        return body

    def close(self) -> None:
        """Hang up everywhere. Nothing may be under way."""
        self._pool.shutdown()
        for connection in self._connections:
            connection.close()

    # --- what the run's coordinator asks

    def post(self, path: str, value: Any, *, timeout_s: float = STALL_S) -> Any:
        """Raises OSError where nobody answers."""
        status, body, _ = self._ask(self._address, "POST", path, json.dumps(value).encode(), timeout_s)
        if status != 200:
            raise WeightError(f"{self._address}: answered {status} to {path}: {body.decode(errors='replace').strip()}")
        return json.loads(body)

    # ---

    def _ask(
        self, address: str, method: str, path: str, body: bytes | None = None, timeout_s: float = STALL_S
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection(address, timeout=timeout_s)
        try:
            connection.request(method, path, body, self._headers())
            response = connection.getresponse()
            return response.status, response.read(), response.headers
        except http.client.HTTPException as error:
            raise OSError(f"{address}: {type(error).__name__} {error}") from error
        except OSError as error:
            raise OSError(f"{address}: {error}") from error
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}

    def _read_delta(
        self, address: str, push: str, bucket: Bucket, into: Bytes, came: Came, base: Base | None
    ) -> tuple[bool, float | None]:
        """Make the bucket from its base and what changed: whether the other side had what would pay, and the part that
        it says has changed."""
        if base is None or not self._deltas:
            return False, None
        name, until_s = Path(bucket.name), time.monotonic() + PEER_S
        query = f"version={int(name.parent.name[1:])}&push={push}&start={bucket.start}"
        query += f"&base_version={base.version}&base={base.push}"
        path = f"/deltas/{name.parent}/{quote(name.name)}?{query}"
        while True:
            status, body, headers = self._ask(address, "GET", path, timeout_s=DELTA_S)
            if status != 202 or time.monotonic() > until_s:
                break
        density = float(headers[DENSITY]) if headers.get(DENSITY) else None
        if status != 200:
            return False, density
        try:
            apply(base.raw, body, into)
        except ValueError:
            return False, density
        self.delta_bytes += len(body)
        self.saved_bytes += bucket.num_bytes - len(body)
        came(len(body))
        return True, density

    def _read_from(self, address: str, push: str, bucket: Bucket, into: Bytes, came: Came) -> None:
        first, name = bucket.start, Path(bucket.name)
        path = f"/files/{name.parent}/{quote(name.name)}?push={push}&start={first}"
        ends = range(0, bucket.num_bytes, PART_BYTES)
        patience_s = GIVE_UP_S if address == self._address else PEER_S

        def part(at: int) -> None:
            self._read_part(address, path, first + at, into[at : at + PART_BYTES].data, patience_s, came)

        jobs = [self._pool.submit(part, at) for at in ends]
        done, _ = wait(jobs, return_when="FIRST_EXCEPTION")
        for job in jobs:
            job.cancel()
        wait(jobs)  # nothing may write there any more
        for job in done:
            job.result()

    def _read_part(self, address: str, path: str, at: int, into: memoryview, patience_s: float, came: Came) -> None:
        """Fill `into` with the file's bytes from `at` on."""
        done, until_s, pause_s = 0, time.monotonic() + patience_s, 0.05
        while done < len(into):
            try:
                got = self._read_some(address, path, at + done, into[done:])
            except (OSError, http.client.HTTPException) as error:
                self._hang_up()
                if time.monotonic() > until_s:
                    raise OSError(f"{address}: {type(error).__name__}: {error}") from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
                continue
            done += got
            came(got)
            if got:
                until_s, pause_s = time.monotonic() + patience_s, 0.05
            elif time.monotonic() > until_s:
                raise OSError(f"{address}: it has waited for this bucket for {patience_s:g} s")

    def _read_some(self, address: str, path: str, at: int, into: memoryview) -> int:
        """As much as comes before something breaks: what came is there, and counts."""
        connection = self._connection(address)
        wanted = {"Range": f"bytes={at}-{at + len(into) - 1}"}
        connection.request("GET", path, headers=self._headers() | wanted)
        response = connection.getresponse()
        if response.status != 206:
            text = response.read().decode(errors="replace").strip()
            if response.status == 202:
                return 0
            raise NotThere(f"{address}: answered {response.status} for {path.partition('?')[0]}: {text}")
        done = 0
        while done < len(into):
            try:
                count = response.readinto(into[done : done + PIECE_BYTES])
            except OSError:
                count = 0
            if not count:
                self._hang_up()
                break
            done += count
        return done

    def _connection(self, address: str) -> http.client.HTTPConnection:
        held: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if held is not None and f"{held.host}:{held.port}" != address:
            self._hang_up()
            held = None
        if held is None:
            held = self._own.connection = http.client.HTTPConnection(address, timeout=STALL_S)
            self._connections.append(held)
        return held

    def _hang_up(self) -> None:
        held: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        self._own.connection = None
        if held is not None:
            held.close()
            self._connections.remove(held)
