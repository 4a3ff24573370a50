"""Two unlike parts of one GPU: which ways to have them multiply rightly, and what each part does alone and busy beside.

    python benchmarks/gpu_parts.py --json

Each way is tried by two processes at once, one for each part. A part is either

- a share of the multiprocessors by MPS (`pools.engines.share`), with which most products come out wrong (docs/gpu.md),
  with and without ways around that: cuBLASLt, no workspace, another number of multiprocessors told to cuBLAS; or
- a green context in a process under MPS that has no share: the first process takes the first N multiprocessors that the
  driver gives, the second the rest. NVIDIA supports this where the share is unset or 100.

For each: whether products of a 4B model's shapes are right, in both; matrix products (8,192 x 8,192) and reads as in
decoding (64 rows times the vocabulary's weights) alone and beside the other; the multiprocessors that each process has,
by kernels in a CUDA graph. A way that fails or hangs is reported, and the others go on; those that might hang are last.

`--device cpu` tries the script without a GPU: its figures mean nothing.
"""

import argparse
import ctypes
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PHASE_S = 0.4
IMPORT_S, BEGIN_S, ANSWER_S = 45.0, 25.0, 12.0
"""A process that says nothing for this long hangs: while it loads torch, while it begins, and later."""
PART_VARIABLE = "ROLLART_BENCH_PART"
"""N: the first N multiprocessors. -N: the others."""
SHAPES_4B = ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (151_936, 2560))
PHASES = [("read", ""), ("matrix", ""), ("", "read"), ("", "matrix")]
PHASES += [("matrix", "read"), ("read", "matrix"), ("read", "read"), ("matrix", "matrix")]
POOL = 40
"""More streams than torch has in its pool."""
RIGHT_COUNTS = (12, 32, 66, 124)
"""Numbers of multiprocessors with which products were right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to have two parts."""

    name: str
    green: int = 0
    """Multiprocessors of the first part, by green contexts."""
    shares: tuple[float, float] | None = None
    variants: tuple[str, ...] = ("as is",)
    """What is told to cuBLAS: the first with which both parts multiply rightly is measured."""
    environment: dict[str, str] = field(default_factory=dict)


AROUND = ("as is", "cublaslt", "target right", "target 132")
WAYS = [
    Way(name="green contexts 48 / 84", green=48),
    Way(name="green contexts 32 / 100", green=32),
    Way(name="shares 0.5 / 0.25", shares=(0.5, 0.25)),
    Way(name="shares 0.9 / 0.1", shares=(0.9, 0.1)),
    Way(
        name="shares 0.36 / 0.64, no workspace",
        shares=(0.36, 0.64),
        environment={"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"},
    ),
    Way(name="shares 0.36 / 0.64", shares=(0.36, 0.64), variants=AROUND),
    Way(name="shares 0.25 / 0.75", shares=(0.25, 0.75), variants=AROUND),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=70.0, help="begin no further way after this long")
    parser.add_argument("--ways", default="", help="only those with this in their names: green, 0.36")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve(options.device)
        return
    report = {"ways": compare(options)}
    print(json.dumps(report) if options.json else json.dumps(report, indent=1))


# --- a part by a green context


def part_environment(first: int, side: int) -> dict[str, str]:
    """For `take_part` in the process of the first (0) or the second (1) part."""
    return {PART_VARIABLE: str(-first if side else first)}


def take_part() -> int | None:
    """Have this thread compute on its part of the multiprocessors only, where the environment names one: how many they
    are. Before anything else uses the GPU: streams that torch makes belong to the context that is current then, and so
    do the graphs that are captured on them. Another thread would have the whole card."""
    import torch

    told = int(os.environ.get(PART_VARIABLE, "0"))
    if not told:
        return None
    torch.zeros(1, device="cuda")  # the runtime begins with the whole card's context, as it expects
    device = ctypes.c_int()
    primary, described, green, context = (ctypes.c_void_p() for _ in range(4))
    # CUdevResource is 144 bytes: its kind, 92 for the driver's own use, and the number of multiprocessors.
    whole, first, rest = (ctypes.create_string_buffer(144) for _ in range(3))
    groups = ctypes.c_uint(1)
    _call("cuInit", ctypes.c_uint(0))
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(primary), device)
    _call("cuCtxSetCurrent", primary)
    _call("cuDeviceGetDevResource", device, whole, ctypes.c_int(1))
    _call(
        "cuDevSmResourceSplitByCount",
        *(first, ctypes.byref(groups), whole, rest, ctypes.c_uint(0), ctypes.c_uint(abs(told))),
    )
    own = first if told > 0 else rest
    _call("cuDevResourceGenerateDesc", ctypes.byref(described), own, ctypes.c_uint(1))
    _call("cuGreenCtxCreate", ctypes.byref(green), described, device, ctypes.c_uint(1))
    _call("cuCtxFromGreenCtx", ctypes.byref(context), green)
    _call("cuCtxSetCurrent", context)
    # What torch compiled sets the whole card's context again (`set_device`). A stream keeps the context it was made in:
    # all of torch's pool, which graphs are captured on, and one of them for what this thread does.
    streams = [torch.cuda.Stream() for _ in range(POOL)]
    torch.cuda.set_stream(streams[0])
    return ctypes.c_uint.from_buffer(own, 96).value


def _call(name: str, *arguments: Any) -> None:
    """A function of the driver, in the form that it had in CUDA 12.8, which torch asks for as well."""
    library = ctypes.CDLL("libcuda.so.1")
    found, state = ctypes.c_void_p(), ctypes.c_int()
    code = library.cuGetProcAddress_v2(
        name.encode(), ctypes.byref(found), ctypes.c_int(12080), ctypes.c_uint64(0), ctypes.byref(state)
    )
    if code or not found.value:
        raise RuntimeError(f"{name}: this driver does not have it ({code}, {state.value})")
    code = ctypes.CFUNCTYPE(ctypes.c_int)(found.value)(*arguments)
    if code:
        raise RuntimeError(f"{name}: error {code} of the CUDA driver")


# --- one process


def serve(device: str) -> None:
    """Does what it is told, one line of JSON at a time."""
    import torch

    from benchmarks.gpu_share import tracer
    from rollart.model.products import wrong_product

    actions: dict[str, tuple[Callable[[], object], float]] = {}
    state: dict[str, Any] = {}

    def begin(told: dict[str, Any]) -> dict[str, Any]:
        part = take_part()
        on_card = device == "cuda"
        shapes = SHAPES_4B if on_card else ((64, 32), (32, 64))
        dtype = torch.bfloat16 if on_card else torch.float32
        size = 8192 if on_card else 64
        weights = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
        left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        rows = torch.randn(64, shapes[-1][1], dtype=torch.bfloat16, device=device)
        bulk = weights[-1]
        actions["matrix"] = (lambda: left @ right, 2 * size**3 / 1e12)
        actions["read"] = (lambda: torch.nn.functional.linear(rows, bulk), bulk.numel() * 2 / 1e12)
        state["weights"] = weights
        for action, _ in actions.values():
            action()
        if on_card:
            state["trace"] = tracer(torch.device(device))
            state["trace"]()
        return {"part": part, "seen": multiprocessors()}

    def multiprocessors() -> int:
        return torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 0

    def check(told: dict[str, Any]) -> dict[str, Any]:
        try:
            if device == "cuda":
                prepare(told["variant"], multiprocessors())
            return {"wrong": wrong_product(state["weights"])}
        except Exception as error:  # of whatever a library raises: there may be another variant
            return {"wrong": f"failed: {error}"[:200]}

    def run(told: dict[str, Any]) -> dict[str, Any]:
        action, tera = actions[told["action"]]
        time.sleep(max(0.0, told["at"] - time.time()))
        done, began = 0, time.perf_counter()
        while time.time() < told["at"] + PHASE_S:
            for _ in range(4):
                action()
            if device == "cuda":
                torch.cuda.synchronize()
            done += 4
        return {"rate": round(done * tera / (time.perf_counter() - began), 2)}

    def trace(told: dict[str, Any]) -> dict[str, Any]:
        if device != "cuda":
            return {"multiprocessors": [0], "spans_ns": [[0, 1]]}
        time.sleep(max(0.0, told["at"] - time.time()))
        found: dict[str, Any] = state["trace"](told["graphed"])
        return found

    print(json.dumps("imported"), flush=True)
    verbs = {"begin": begin, "check": check, "run": run, "trace": trace}
    with torch.inference_mode():
        for line in sys.stdin:
            told = json.loads(line)
            try:
                answer = verbs[told["do"]](told)
            except Exception as error:  # whatever a library raises: it is this way that failed, and it is reported
                answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
            print(json.dumps(answer), flush=True)


def prepare(variant: str, multiprocessors: int) -> None:
    """Tell torch and cuBLAS what the variant says."""
    import torch

    torch.backends.cuda.preferred_blas_library("cublaslt" if variant == "cublaslt" else "default")
    if variant.startswith("target"):
        right = max(count for count in RIGHT_COUNTS if count <= multiprocessors)
        count = right if variant == "target right" else 132
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).split('.')[0]}")
        handle = torch.cuda.current_blas_handle()
        code = library.cublasSetSmCountTarget(ctypes.c_void_p(handle), ctypes.c_int(count))
        if code:
            raise RuntimeError(f"cublasSetSmCountTarget: error {code}")


# --- both


class Side:
    """One of the processes."""

    def __init__(self, device: str, environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--side", "--device", device]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, **told: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")

    def answer(self, within_s: float = ANSWER_S) -> Any:
        """Raises RuntimeError."""
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            raise RuntimeError(f"no answer within {within_s:g} s") from None
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}")
        found = json.loads(line)
        if isinstance(found, dict) and "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    from rollart.cluster.mps import Mps

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        mps = Mps(Path(folder)) if options.device == "cuda" else None
        # Started before their turn, since they take long to load torch; none touches the card before it is told to.
        ahead = 4 if mps is not None else 1
        ways = [way for way in WAYS if options.ways in way.name]
        pairs: list[list[Side]] = []
        found = []
        try:
            for number, way in enumerate(ways):
                if time.monotonic() - began > options.seconds:
                    break
                for other in ways[len(pairs) : number + ahead]:
                    pairs.append([Side(options.device, environment(other, side, mps)) for side in (0, 1)])
                found.append({"way": way.name, **tried(way, pairs[number])})
                found[-1]["took_s"] = round(time.monotonic() - began, 1)
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        finally:
            for sides in pairs:
                for side in sides:
                    side.close()
            if mps is not None:
                mps.close()
    return found


def environment(way: Way, side: int, mps: Any) -> dict[str, str]:
    more = {"OMP_NUM_THREADS": "1"} | way.environment
    if mps is not None:
        more |= mps.environment(way.shares[side] if way.shares else 1.0)
        if way.green:
            more |= part_environment(way.green, side)
    return {**os.environ, **more}


def tried(way: Way, sides: list[Side]) -> dict[str, Any]:
    """What came of this way. Ends its processes."""
    report: dict[str, Any] = {}
    try:
        for side in sides:
            side.answer(IMPORT_S)
        report["parts"] = both(sides, BEGIN_S, do="begin")
        report["wrong"] = {}
        for variant in way.variants:
            wrong = [one["wrong"] for one in both(sides, do="check", variant=variant)]
            report["wrong"][variant] = wrong
            if not any(wrong):
                report["right"] = variant
                measure(sides, report)
                break
    except (RuntimeError, OSError) as error:
        report["failed"] = str(error)
    finally:
        for side in sides:
            side.close()
    return report


def both(sides: list[Side], within_s: float = ANSWER_S, **told: Any) -> list[Any]:
    for side in sides:
        side.tell(**told)
    return [side.answer(within_s) for side in sides]


def measure(sides: list[Side], report: dict[str, Any]) -> None:
    """Puts rates and multiprocessors into the report."""
    report["phases"] = []
    for names in PHASES:
        at = time.time() + 0.03
        busy = [(side, name) for side, name in zip(sides, names, strict=True) if name]
        for side, name in busy:
            side.tell(do="run", action=name, at=at)
        rates = {side: side.answer()["rate"] for side, _ in busy}
        report["phases"].append([*names, *(rates.get(side) for side in sides)])
    from benchmarks.gpu_share import kernel_ms, overlap

    for graphed in (False, True):
        alone = []
        for side in sides:
            side.tell(do="trace", graphed=graphed, at=0.0)
            alone.append(side.answer())
        together = both(sides, do="trace", graphed=graphed, at=time.time() + 0.1)
        report["in a graph" if graphed else "kernel by kernel"] = {
            **overlap(*together),
            "kernel_ms_alone": [kernel_ms(one["spans_ns"]) for one in alone],
            "kernel_ms_both": [kernel_ms(one["spans_ns"]) for one in together],
        }


if __name__ == "__main__":
    main()
