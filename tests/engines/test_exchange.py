"""A staged version is exchanged for the one in use: the swap copies nothing, and nobody takes it away meanwhile."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollart.engines.embedded import dense
from rollart.engines.embedded.engine import EmbeddedEngine
from rollart.engines.embedded.threaded import ThreadedEngine
from rollart.errors import WeightError
from rollart.model.adapters import Lora, adapter_tensors, add_adapters
from rollart.model.network import load_weights_, named_weights
from rollart.store.buckets import BucketStore
from rollart.store.files import FileStore
from rollart.store.prefetch import FetchAhead
from rollart.store.shm import ShmStore
from rollart.types import WeightManifest
from tests.contracts.store import eventually
from tests.engines.reference import KINDS, NO_EOS, check, make_engine, our_model, plain_model, request

BUCKET_BYTES = 4096
FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def of(kind: str, version: int) -> dict[str, Tensor]:
    return named_weights(plain_model(kind, seed=version))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BucketStore]:
    store = ShmStore("exchange", BUCKET_BYTES, root=tmp_path)
    yield store
    store.close()
    assert not list(tmp_path.iterdir()), "nothing is left"


@asynccontextmanager
async def engine_over(store: BucketStore, kind: str = "qwen3") -> AsyncIterator[ThreadedEngine]:
    """Through a store of its own, as another process has it."""
    own = type(store)("exchange", BUCKET_BYTES, root=store.directory.parent) if store.in_memory else store  # type: ignore[call-arg,arg-type]
    ahead = FetchAhead(own)
    core = make_engine(plain_model(kind), eos=NO_EOS)
    engine = ThreadedEngine(core, fetch=ahead.fetch, stage=ahead.stage, pulled=ahead.pulled, adopt=own.in_memory)
    try:
        yield engine
    finally:
        await engine.close()


def held(core: EmbeddedEngine) -> dict[str, Tensor]:
    return named_weights(core.model)


def is_of(core: EmbeddedEngine, kind: str, version: int) -> bool:
    return all(torch.equal(held(core)[name], tensor) for name, tensor in of(kind, version).items())


def mapped_at(path: Path) -> list[range]:
    """Where this process has files below this folder in its memory."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [
        range(*(int(end, 16) for end in fields[0].split("-")))
        for fields in lines
        if fields[-1].startswith(str(path)) or (len(fields) > 6 and fields[5].startswith(str(path)))
    ]


def readers(store: BucketStore, version: int) -> bool:
    """Whether somebody holds a file of this version."""
    for path in store.folder(version).glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_swap_of_a_staged_version_copies_nothing(
    kind: str, packed: bool, store: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters are the store's own memory, but for small ones that are fused."""
    if packed:
        monkeypatch.setattr(dense, "PACK_MIN", 0)

    async def main() -> None:
        async with engine_over(store, kind) as engine:
            store.push(1, of(kind, 1))
            manifest = store.manifest(1)
            assert manifest is not None
            await engine.stage(1)
            assert is_of(engine.core, kind, 0)
            engine.fetch = lambda manifest: pytest.fail("fetched in the swap")
            monkeypatch.setattr(engine.core, "prepare", lambda *_, **__: pytest.fail("made ready in the swap"))
            monkeypatch.setattr(torch.Tensor, "copy_", lambda *_, **__: pytest.fail("copied in the swap"))
            report = await engine.swap(manifest)
            monkeypatch.undo()
            assert report.version == 1
            assert report.pulled.seconds > 0
            assert is_of(engine.core, kind, 1)
            places = mapped_at(store.folder(1))
            fused = kind != "qwen3-moe" and not packed
            for name, tensor in held(engine.core).items():
                own = fused and name.split(".")[-2] in FUSED
                assert any(tensor.data_ptr() in place for place in places) != own, name
            asked = request([10, 11, 12], max_tokens=20)
            check(asked, await engine.generate(asked), {1: plain_model(kind, seed=1)})

    asyncio.run(main())


def test_of_a_disk_the_engine_has_a_copy_of_its_own(tmp_path: Path) -> None:
    files = FileStore(tmp_path / "weights", BUCKET_BYTES, patience_s=0.0)

    async def main() -> None:
        async with engine_over(files) as engine:
            manifest = files.push(1, of("qwen3", 1))
            await engine.stage(1)
            await engine.swap(manifest)
            assert is_of(engine.core, "qwen3", 1)
            places = mapped_at(tmp_path)
            assert not any(tensor.data_ptr() in place for place in places for tensor in held(engine.core).values())

    asyncio.run(main())


def test_other_types_are_converted_before_the_swap(store: BucketStore) -> None:
    async def main() -> None:
        async with engine_over(store) as engine:
            halves = {name: tensor.bfloat16() for name, tensor in of("qwen3", 1).items()}
            manifest = store.push(1, halves)
            await engine.stage(1)
            eventually(lambda: not readers(store, 1))
            await engine.swap(manifest)
            for name, tensor in held(engine.core).items():
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, halves[name].float())

    asyncio.run(main())


def test_a_version_in_use_is_not_taken_from_the_engine(store: BucketStore) -> None:
    """It is dropped, and others are pushed, in memory that is used again: but not in that."""

    async def main() -> None:
        async with engine_over(store) as engine:
            manifest = store.push(1, of("qwen3", 1))
            await engine.stage(1)
            assert readers(store, 1), "also before it is swapped in"
            await engine.swap(manifest)
            assert readers(store, 1)
            await store.drop_before(2)
            for version in (2, 3, 4):
                store.push(version, of("qwen3", version))
                await store.drop_before(version)
                assert is_of(engine.core, "qwen3", 1)
            newest = store.manifest(4)
            assert newest is not None
            await engine.stage(4)
            await engine.swap(newest)
            assert is_of(engine.core, "qwen3", 4)

    asyncio.run(main())


def test_what_a_swap_replaced_is_used_again(store: BucketStore) -> None:
    """By the push after it: nothing holds on to a version that nobody serves."""

    async def main() -> None:
        async with engine_over(store) as engine:
            seen: list[set[int]] = []
            for version in range(1, 6):
                manifest = store.push(version, of("qwen3", version))
                seen.append({path.stat().st_ino for path in store.folder(version).glob("*.safetensors")})
                await engine.stage(version)
                await engine.swap(manifest)
                eventually(lambda version=version: not readers(store, version - 1))  # type: ignore[misc]
                await store.drop_before(version)
            assert seen[1:3] == seen[3:5], "two versions' files in turn"

    asyncio.run(main())


def test_pushed_again_with_other_bytes_it_is_made_ready_anew(store: BucketStore) -> None:
    async def main() -> None:
        async with engine_over(store) as engine:
            store.push(1, of("qwen3", 7))
            await engine.stage(1)
            await engine.swap(store.push(1, of("qwen3", 1)))
            assert is_of(engine.core, "qwen3", 1)

    asyncio.run(main())


def test_damage_is_found_before_the_swap_which_changes_nothing(store: BucketStore) -> None:
    async def main() -> None:
        async with engine_over(store) as engine:
            manifest = store.push(1, of("qwen3", 1))
            bucket = manifest.buckets[1]
            with (store.directory / bucket.name).open("r+b") as file:
                file.seek(bucket.start + bucket.num_bytes // 2)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 1]))
            await engine.stage(1)
            with pytest.raises(WeightError, match="damaged, digest"):
                await engine.swap(manifest)
            assert is_of(engine.core, "qwen3", 0)
            assert engine.core.version == 0
            await engine.swap(store.push(1, of("qwen3", 1)))
            assert is_of(engine.core, "qwen3", 1)

    asyncio.run(main())


def test_weights_that_do_not_fit_are_the_swaps_to_refuse(store: BucketStore) -> None:
    async def main() -> None:
        async with engine_over(store) as engine:
            manifest = store.push(1, of("llama", 1))
            await engine.stage(1)
            with pytest.raises(WeightError, match="are missing"):
                await engine.swap(manifest)
            assert is_of(engine.core, "qwen3", 0)

    asyncio.run(main())


def test_a_swap_that_nobody_awaits_any_more_is_whole_or_not_there(store: BucketStore) -> None:
    async def main() -> None:
        async with engine_over(store) as engine:
            manifest = store.push(1, of("qwen3", 1))
            await engine.stage(1)
            goes = threading.Event()
            blocked = asyncio.ensure_future(engine.call(goes.wait))
            swap = asyncio.ensure_future(engine.swap(manifest))
            while engine.made is not None:  # noqa: ASYNC110 - of the engine itself
                await asyncio.sleep(0.001)
            swap.cancel()
            await asyncio.sleep(0.01)
            goes.set()
            await blocked
            assert await engine.call(lambda: (engine.core.version, is_of(engine.core, "qwen3", 1))) == (1, True)

    asyncio.run(main())


def test_steps_go_on_while_a_version_is_made_ready(store: BucketStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with engine_over(store) as engine:
            manifest = store.push(1, of("qwen3", 1))
            prepare, goes = engine.core.prepare, threading.Event()

            def slow(weights: dict[str, Tensor], *, adopt: bool) -> object:
                assert goes.wait(30)
                return prepare(weights, adopt=adopt)

            monkeypatch.setattr(engine.core, "prepare", slow)
            staging = asyncio.ensure_future(engine.stage(1))
            asked = request([10, 11, 12], max_tokens=50)
            check(asked, await engine.generate(asked), {0: plain_model("qwen3")})
            assert not staging.done()
            goes.set()
            await staging
            await engine.swap(manifest)

    asyncio.run(main())


def test_loading_in_place_afterwards_reaches_no_other_engine(store: BucketStore) -> None:
    """Pages of the store are private to whoever writes to them."""

    async def main() -> None:
        async with engine_over(store) as first, engine_over(store) as second:
            manifest = store.push(1, of("qwen3", 1))
            for engine in (first, second):
                await engine.stage(1)
                await engine.swap(manifest)
            load_weights_(first.core.model, of("qwen3", 3))
            assert is_of(second.core, "qwen3", 1)

    asyncio.run(main())


ENGINE = """
import asyncio, sys, time
from pathlib import Path
from rollart.store.shm import ShmStore
from tests.engines.test_exchange import engine_over

async def main():
    store = ShmStore("exchange", 4096, root=Path(sys.argv[1]))
    async with engine_over(store) as engine:
        await engine.stage(1)
        await engine.swap(store.manifest(1))
        await engine.stage(2)
        print("holds both", flush=True)
        time.sleep(60)

asyncio.run(main())
"""


def test_an_engine_that_is_killed_lets_go_of_what_it_served_and_of_what_was_ready(store: BucketStore) -> None:
    manifests: list[WeightManifest] = [store.push(version, of("qwen3", version)) for version in (1, 2)]
    files = {path.stat().st_ino for path in store.directory.rglob("*.safetensors")}
    command = [sys.executable, "-c", ENGINE, str(store.directory.parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"holds both\n"
        assert all(readers(store, manifest.version) for manifest in manifests)
        engine.send_signal(signal.SIGKILL)
    assert not any(readers(store, manifest.version) for manifest in manifests)
    asyncio.run(store.drop_before(2))
    store.push(3, of("qwen3", 3))
    assert {path.stat().st_ino for path in store.directory.rglob("*.safetensors")} == files, "and is used again"


def test_adapters_are_merged_with_the_whole_version_before_them() -> None:
    core, expected = make_engine(plain_model("qwen3"), eos=NO_EOS), our_model(plain_model("qwen3", seed=5))
    adapted = our_model(plain_model("qwen3"))
    add_adapters(adapted, Lora(rank=2, alpha=4.0, targets=("q_proj",)))
    adapters = {name: torch.ones_like(tensor) for name, tensor in adapter_tensors(adapted).items()}
    core.swap(1, adapters)
    core.swap(2, of("qwen3", 5))
    core.swap(3, adapters)
    load_weights_(expected, adapters)
    torch.testing.assert_close(held(core), named_weights(expected), atol=0, rtol=0)
