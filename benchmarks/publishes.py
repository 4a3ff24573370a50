"""Thousands of publishes in a row while readers come and are killed: is anything left behind?
`python -m benchmarks.publishes --json`.

One process pushes small versions and drops all but the last two. Beside it one reader at a time, a process of its own,
fetches the newest version again and again and checks that every tensor is of that version; two seconds after its first
one it is killed (SIGKILL) and another comes. For `tcp` and `mooncake` the readers are on another host: a copy fed by
its own process. Sampled as it goes: memory of the pushing process and of the hosts' processes, their open files, files
in the store, its bytes, and what Mooncake has given out of its memory.
"""

import argparse
import asyncio
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import torch

from benchmarks.weights import mooncake_service
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.host import read_ready
from rollart.store.shm import ShmStore
from rollart.store.tcp import TcpStore

STORES = ("shm", "files", "tcp", "mooncake")
PUBLISHES = 5000
READER_S, START_S = 2.0, 60.0
"""How long a reader reads, and may take until it does."""
PAUSE_S = 0.01
"""Between two publishes, or versions would be gone before anybody could ask for one."""
SAMPLES = 10
CLOSED_S = 10.0
"""After this nothing may be left."""
BUCKET_BYTES = 100_000

READER = """
import sys, time
from pathlib import Path
from benchmarks.publishes import open_reader, same_version
from rollart.errors import WeightError
from rollart.store.index import versions_in
store, count = open_reader(*sys.argv[1:]), 0
while True:
    store.appeared(0)
    for version in reversed(versions_in(store.directory)):
        try:
            manifest = store.manifest(version)
            if manifest is not None:
                same_version(store.fetch(manifest), version)
                count += 1
                print(count, flush=True)
                break
        except WeightError:
            continue
    time.sleep(0.005)
"""


def weights(version: int) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((10_000,), float(version)) for number in range(8)}


def same_version(found: dict[str, torch.Tensor], version: int) -> None:
    """No tensor may be of another version."""
    for name, tensor in found.items():
        if not bool((tensor == float(version)).all()):
            print(f"MIX in version {version}: {name}", flush=True)
            os._exit(1)


def open_reader(kind: str, place: str, address: str) -> BucketStore:
    match kind:
        case "shm":
            return ShmStore("x", root=Path(place))
        case "files":
            return FileStore(Path(place) / "weights", patience_s=0.0)
        case "mooncake":
            return in_mooncake(address, Path(place) / "there")
    return TcpStore("x", address, "token", root=Path(place) / "there", patience_s=2.0)


def in_mooncake(address: str, root: Path) -> BucketStore:
    from rollart.store.mooncake import MooncakeStore
    from rollart.store.mooncake_client import MooncakeSetup

    setup = MooncakeSetup(master=address, run_id="x")
    return MooncakeStore(setup, bucket_bytes=BUCKET_BYTES, root=root, patience_s=2.0)


def sample(place: Path, pids: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pid in pids.items():
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        found[f"{name}_mb"] = round(int(status["RssAnon"].split()[0]) / 1000, 1)
        found[f"{name}_open_files"] = len(os.listdir(f"/proc/{pid}/fd"))
    files = [path for path in place.rglob("*") if path.is_file()]
    found["files"] = len(files)
    found["store_mb"] = round(sum(path.stat().st_size for path in files if path.exists()) / 1e6, 2)
    return found


def given_out(master_log: Path) -> str:
    """What Mooncake's master said last of its memory: it says so every ten seconds."""
    found = re.findall(r"Mem Storage: [^|]*\| [^|]*", master_log.read_text(errors="replace"))
    return found[-1].strip() if found else ""


def measure_store(kind: str, publishes: int) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="rollart-bench-"))
    (place / "there").mkdir()
    stack = ExitStack()
    master_log: Path | None = None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    store: BucketStore
    if kind == "tcp":
        store = TcpStore("x", address, "token", bucket_bytes=BUCKET_BYTES, root=place)
        store.serve()
    elif kind == "mooncake":
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = stack.enter_context(mooncake_service(logs, 64 << 20))
        master_log = logs / "mooncake.log"
        store = in_mooncake(address, place)
    elif kind == "shm":
        store = ShmStore("x", bucket_bytes=BUCKET_BYTES, root=place)
    else:
        store = FileStore(place / "weights", bucket_bytes=BUCKET_BYTES)
    samples: list[dict[str, Any]] = []
    killed, fetched, mixes = 0, 0, 0
    reader, since_s, reads = _reader(kind, place, address), time.monotonic(), False
    try:
        for version in range(1, publishes + 1):
            store.push(version, weights(version))
            asyncio.run(store.drop_before(version - 1))
            time.sleep(PAUSE_S)
            if not reads and _has_read(reader):
                reads, since_s = True, time.monotonic()
            if time.monotonic() - since_s > (READER_S if reads else START_S):
                got, mixed = _end(reader)
                killed, fetched, mixes = killed + 1, fetched + got, mixes + mixed
                reader, since_s, reads = _reader(kind, place, address), time.monotonic(), False
            if version % (publishes // SAMPLES) == 0:
                pids = {"pusher": os.getpid()}
                for name, folder in (("server", place / "rollart-x"), ("copier", place / "there" / "rollart-x-copy")):
                    if "pid" in (ready := read_ready(folder)):
                        pids[name] = ready["pid"]
                samples.append({"publishes": version, **sample(place, pids)})
                if master_log is not None:
                    samples[-1]["mooncake"] = given_out(master_log)
    finally:
        got, mixed = _end(reader)
        fetched, mixes = fetched + got, mixes + mixed
        if isinstance(store, TcpStore):
            store.serving.stop()
        store.close()
        until_s = time.monotonic() + CLOSED_S
        while any(path.is_file() for path in place.rglob("*")) and time.monotonic() < until_s:
            time.sleep(0.1)
        left = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
        shutil.rmtree(place, ignore_errors=True)
        stack.close()
    return {
        "store": kind,
        "publishes": publishes,
        "readers_killed": killed,
        "versions_read": fetched,
        "mixes": mixes,
        "left_after_close": left,
        "samples": samples,
    }


def _reader(kind: str, place: Path, address: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", READER, kind, str(place), address], stdout=subprocess.PIPE, text=True
    )


def _has_read(reader: "subprocess.Popen[str]") -> bool:
    assert reader.stdout is not None
    return bool(select.select([reader.stdout], [], [], 0)[0])


def _end(reader: "subprocess.Popen[str]") -> tuple[int, int]:
    """Kill it; how many versions it had read, and whether it found a mix."""
    reader.kill()
    assert reader.stdout is not None
    with reader, reader.stdout:
        lines = reader.stdout.read().splitlines()
    counts = [int(line) for line in lines if line.isdigit()]
    return max(counts, default=0), sum(line.startswith("MIX") for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--publishes", type=int, default=PUBLISHES)
    parser.add_argument("--stores", nargs="+", default=STORES, choices=STORES)
    asked = parser.parse_args()
    figures = {kind: measure_store(kind, asked.publishes) for kind in asked.stores}
    if asked.json:
        sys.stdout.buffer.write(orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        return 0
    for kind, found in figures.items():
        print(f"{kind}: {found['versions_read']} versions read, {found['readers_killed']} readers killed")
        for one in found["samples"]:
            print("  ", one)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
