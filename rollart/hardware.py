"""Kinds of accelerator and what a model costs on them: a roofline, as pure functions.

Used by affinity (which pool suits a task), by placement, and by the simulated engines. Peak figures are the
vendors'; the two efficiency constants turn them into what serving engines reach.
"""

from dataclasses import dataclass, replace

PREFILL_EFFICIENCY = 0.5
"""Share of peak matrix throughput that prefill reaches."""
DECODE_EFFICIENCY = 0.6
"""Share of peak memory bandwidth that decode reaches (59 % was measured on an H200, batch 256)."""
TRAIN_EFFICIENCY = 0.35
"""Share of peak matrix throughput that a train step reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device."""

    name: str
    tflops: float
    """Dense bf16, peak."""
    memory_gb: float
    bandwidth_gb_s: float
    cost: float
    """Relative price of one device-hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated:
    """An engine whose prefill and decode are on workers of their own: what prefills, and how many decode."""

    hardware: Hardware
    """Of the prefill workers."""
    gpus: int
    """Of one prefill worker."""
    workers: int = 1
    """Prefill workers."""
    decoders: int = 1
    link_bytes_per_s: float
    """From each prefill worker."""


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(name="h800", tflops=989.5, memory_gb=80, bandwidth_gb_s=3350, cost=2.85),
        Hardware(name="h100", tflops=989.5, memory_gb=80, bandwidth_gb_s=3350, cost=2.85),
        Hardware(name="h200", tflops=989.5, memory_gb=141, bandwidth_gb_s=4800, cost=3.4),
        Hardware(name="h20", tflops=148, memory_gb=96, bandwidth_gb_s=4000, cost=1.0),
        Hardware(name="a100", tflops=312, memory_gb=80, bandwidth_gb_s=2039, cost=1.3),
        Hardware(name="l40s", tflops=362, memory_gb=48, bandwidth_gb_s=864, cost=0.8),
        Hardware(name="cpu", tflops=0.4, memory_gb=16, bandwidth_gb_s=20, cost=0.02),
    )
}
"""The kinds known by name. The paper's two are h800 (compute) and h20 (bandwidth); `cpu` is one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the roofline needs to know of a model."""

    params: float
    """All parameters."""
    active_params: float
    """Parameters used per token (less than all in a mixture of experts)."""
    kv_bytes_per_token: float
    bytes_per_param: float = 2.0

    def held_in(self, bytes_per_param: float) -> "ModelShape":
        """The same model in another precision."""
        factor = bytes_per_param / self.bytes_per_param
        return replace(self, bytes_per_param=bytes_per_param, kv_bytes_per_token=self.kv_bytes_per_token * factor)

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bytes_per_param


MODELS = {
    "qwen3-0.6b": ModelShape(params=0.6e9, active_params=0.6e9, kv_bytes_per_token=114_688),
    "qwen3-8b": ModelShape(params=8.2e9, active_params=8.2e9, kv_bytes_per_token=147_456),
    "qwen3-14b": ModelShape(params=14.8e9, active_params=14.8e9, kv_bytes_per_token=163_840),
    "qwen3-32b": ModelShape(params=32.8e9, active_params=32.8e9, kv_bytes_per_token=262_144),
    "qwen3-235b-a22b": ModelShape(params=235e9, active_params=22e9, kv_bytes_per_token=192_512),
}
"""Model shapes that simulated jobs can name."""


def prefill_s_per_token(model: ModelShape, hardware: Hardware, gpus: int) -> float:
    """Compute-bound: two operations per active parameter."""
    return 2 * model.active_params / (hardware.tflops * 1e12 * PREFILL_EFFICIENCY * gpus)


def decode_step_s(model: ModelShape, hardware: Hardware, gpus: int, batch: float, kv_tokens: float) -> float:
    """One token for each of `batch` sequences that hold `kv_tokens` together: read weights and KV once, or
    compute, whichever takes longer."""
    read_bytes = model.weight_bytes * _touched(model, batch) + kv_tokens * model.kv_bytes_per_token
    memory_s = read_bytes / (hardware.bandwidth_gb_s * 1e9 * DECODE_EFFICIENCY * gpus)
    return max(memory_s, batch * prefill_s_per_token(model, hardware, gpus))


def kv_capacity_tokens(model: ModelShape, hardware: Hardware, gpus: int) -> int:
    """KV tokens that fit beside the weights, with a tenth of the memory kept free."""
    free_bytes = hardware.memory_gb * 1e9 * 0.9 * gpus - model.weight_bytes
    return max(0, int(free_bytes / model.kv_bytes_per_token))


def train_s_per_token(model: ModelShape, hardware: Hardware, gpus: int) -> float:
    """Forward, backward and the log-probability pass: eight operations per active parameter."""
    return 8 * model.active_params / (hardware.tflops * 1e12 * TRAIN_EFFICIENCY * gpus)


def _touched(model: ModelShape, batch: float) -> float:
    """Share of the weights that one decode step reads; experts not chosen by any sequence stay unread."""
    sparse = model.active_params / model.params
    return 1.0 if sparse >= 1.0 else min(1.0, sparse * max(1.0, batch))
