"""Two processes on one GPU: how much each gets done alone and beside the other, and which multiprocessors each has.

    python benchmarks/gpu_share.py --shares 0.36 0.64 --json

Two processes do the same kinds of work: `read` (a sum over 4 GB, as decoding reads weights and caches) and `matrix`
(bfloat16 products of 8,192 x 8,192). First one alone, then the other, then both at the same time: first reading beside
multiplying, then the other way round, then both reading. At the end each alone, and then both, run a kernel that notes,
for every program of it, its multiprocessor and when it began and ended by the device's own clock: on multiprocessors of
its own it takes as long beside the other as alone. (The numbers of multiprocessors are those that a process sees.)

With `--shares` they run under MPS with these shares (`pools.engines.share`), without it as plain processes, which take
turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SECONDS = 1.0
PHASES = [("read", ""), ("matrix", ""), ("", "read"), ("", "matrix"), ("read", "matrix"), ("matrix", "read")]
PHASES += [("read", "read"), ("trace", ""), ("", "trace"), ("trace", "trace")]
"""What the first and the second process do at the same time."""
READY_S = 14.0
"""From the start of the processes to the first phase."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs=2, help="of the first and the second process, between 0 and 1")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(work(options.side, options.begin)), flush=True)
        return
    report = compare(options.shares)
    print(json.dumps(report) if options.json else json.dumps(report, indent=1))


def compare(shares: list[float] | None) -> dict[str, Any]:
    from rollart.cluster.mps import Mps

    with tempfile.TemporaryDirectory() as folder:
        mps = Mps(Path(folder)) if shares else None
        try:
            begin = time.time() + READY_S
            sides = []
            for side in range(2):
                environment = dict(os.environ)
                if mps is not None and shares is not None:
                    environment |= mps.environment(shares[side])
                command = [sys.executable, __file__, "--side", str(side), "--begin", str(begin)]
                sides.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            found = [json.loads(side.communicate(timeout=120)[0].splitlines()[-1]) for side in sides]
        finally:
            if mps is not None:
                mps.close()
    alone, both = zip(*(side.pop("traces") for side in found), strict=True)
    return {
        "shares": shares,
        "phases": phases(found),
        "multiprocessors": overlap(*both),
        "kernel_ms": {
            "alone": [kernel_ms(trace["spans_ns"]) for trace in alone],
            "both": [kernel_ms(trace["spans_ns"]) for trace in both],
        },
    }


def phases(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for number, names in enumerate(phase for phase in PHASES if "trace" not in phase):
        rates = [side["rates"][number] for side in found]
        rows.append({"first": names[0], "second": names[1], "first_rate": rates[0], "second_rate": rates[1]})
    return rows


def overlap(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Multiprocessors of each and of both; and for how long both had programs running, of the time either had."""
    own, other = set(first["multiprocessors"]), set(second["multiprocessors"])
    ran_ns = [covered(one["spans_ns"]) for one in (first, second)]
    both_ns = sum(ran_ns) - covered(first["spans_ns"] + second["spans_ns"])
    return {
        "first": len(own),
        "second": len(other),
        "both": len(own & other),
        "time_both_run_of_the_shorter": round(both_ns / min(ran_ns), 3),
    }


def kernel_ms(spans: list[list[int]]) -> float:
    """Of the median kernel."""
    return round(statistics.median(end - begin for begin, end in spans) / 1e6, 3)


def covered(spans: list[list[int]]) -> int:
    """Nanoseconds that lie in at least one of the spans."""
    total, end = 0, -1
    for begin, stop in sorted(spans):
        total += max(0, stop - max(begin, end))
        end = max(end, stop)
    return total


def work(side: int, begin: float) -> dict[str, Any]:
    """One process: every phase in turn, by the wall clock."""
    import torch

    device = torch.device("cuda")
    bulk = torch.ones(1 << 31, dtype=torch.bfloat16, device=device)
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    right = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    actions = {
        "read": (lambda: bulk.view(-1, 8192).sum(1, dtype=torch.float32), bulk.numel() * 2 / 1e12),
        "matrix": (lambda: left @ right, 2 * 8192**3 / 1e12),
    }
    for action, _ in actions.values():
        for _ in range(3):
            action()
    trace = tracer(device)
    trace()
    torch.cuda.synchronize()
    if time.time() > begin:
        raise RuntimeError("the processes started too slowly; raise READY_S")
    rates: list[float | None] = []
    traces: list[dict[str, Any]] = []
    for number, names in enumerate(PHASES):
        start = begin + number * (SECONDS + 0.3)
        time.sleep(max(0.0, start - time.time()))
        name = names[side]
        if name == "trace":
            traces.append(trace())
            continue
        if not name:
            rates.append(None)
            continue
        action, tera = actions[name]
        done, began = 0, time.perf_counter()
        while time.time() < start + SECONDS:
            for _ in range(4):
                action()
            torch.cuda.synchronize()
            done += 4
        rates.append(round(done * tera / (time.perf_counter() - began), 2))
    return {"rates": rates, "traces": traces}


def tracer(device: Any) -> Any:
    """A kernel that keeps every multiprocessor that it may use busy for some hundred milliseconds; or a graph of it."""
    import torch
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import globaltimer, smid

    @triton.jit
    def kernel(noted, numbers, loops):  # type: ignore[no-untyped-def]
        program = tl.program_id(0)
        began = globaltimer()
        place = smid()
        lanes = tl.arange(0, 1024)
        value = tl.load(numbers + lanes)
        for _ in range(loops):
            value = value * 1.000001 + 0.5
        tl.store(numbers + 1024 + program * 1024 + lanes, value)
        tl.store(noted + program * 3, place.to(tl.int64))
        tl.store(noted + program * 3 + 1, began)
        tl.store(noted + program * 3 + 2, globaltimer())

    programs, rounds = 4096, 24
    globals().update(tl=tl, globaltimer=globaltimer, smid=smid)
    numbers = torch.ones(1024 * (programs + 1), device=device)

    def run(graphed: bool = False) -> dict[str, Any]:
        every = [torch.zeros(programs, 3, dtype=torch.int64, device=device) for _ in range(rounds)]

        def launch() -> None:
            for noted in every:
                kernel[(programs,)](noted, numbers, 20_000, num_warps=4)

        if graphed:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launch()
            graph.replay()
        else:
            launch()
        torch.cuda.synchronize()
        rows = torch.cat(every).cpu()
        spans = [[int(one[:, 1].min()), int(one[:, 2].max())] for one in (each.cpu() for each in every)]
        return {"multiprocessors": sorted(set(rows[:, 0].tolist())), "spans_ns": spans}

    return run


if __name__ == "__main__":
    main()
