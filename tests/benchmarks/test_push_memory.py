"""What a push takes of memory, by the benchmark's own measure and no more than the docs say."""

from importlib.util import find_spec

import pytest

from benchmarks.push_memory import measure_store

BUCKET_BYTES = 16_000_000
MOST = {"shm": 2.0, "files": 2.0, "mooncake": 3.0}
"""In buckets: a part of a tensor is half of one here. Mooncake lays out one bucket while another is put."""


@pytest.mark.slow
@pytest.mark.parametrize("store", MOST)
def test_a_push_of_a_sharded_trainer(store: str) -> None:
    if store == "mooncake" and find_spec("mooncake") is None:
        pytest.skip("needs the extra mooncake")
    found = measure_store(store, 160_000_000, BUCKET_BYTES)
    assert found["ranks"][0]["push_buckets"] < MOST[store], found
    assert found["ranks"][1]["push_buckets"] < 0.25, found
    assert all(rank["host_copy"] < 1.1 for rank in found["ranks"]), found
