"""Kinds of accelerator, shapes of models, and what an engine step and a train step cost on them: pure functions.

Used by affinity (which pool suits a task), by placement, by the simulated engines and by `rollart plan`. One step of an
engine takes

    its own overhead (each step, each layer, each sequence)
    + the matrix products: reading the weights once, or computing, whichever takes longer
    + reading the keys and values of all that decode, and the attention of the prompt tokens in the step
    + what tensor parallelism sends: two all-reduces a layer.

Peak figures are the vendors'. Shares of peak and overheads were measured; `tests/test_costs_measured.py` holds the
predictions to the measurements, and docs/evaluation.md lists them with their sources.
"""

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache

ACTIVATION_PASSES = 44.0
"""Times that prefill reads or writes the hidden state of a token in one layer, beside the matrix products."""
TRAIN_ATTENTION = 0.35
"""Share of peak matrix throughput that attention reaches in training, forward and backward."""
ATTENTION_BACKWARD = 2.5
"""What the backward pass of attention computes, in forward passes."""
TRAIN_FORWARDS = 4.0
"""A train step in forward passes: forward, backward (two), and one again, for log-probabilities or recomputation."""
UPDATE_BYTES = 28.0
"""That the optimizer reads and writes for each parameter."""
LOGIT_PASSES = 8.0
"""Times that training reads or writes the float32 logits."""
NODE_GPUS = 8
"""GPUs that share fast links; tensor parallelism beyond them crosses the network."""
NETWORK_S = 20e-6
"""Latency of a hop between machines."""
EXCHANGED = 0.77
"""Share of a link between the devices of a machine that the all-to-all of expert parallelism reaches."""
EXCHANGE_S = 30e-6
"""What an all-to-all takes beyond its bytes."""
READ_BY_SHARE = 0.25
"""A share of the multiprocessors reads at this power of the share of the bandwidth: 48 of an H200's 132 read 0.79 of it
(measured alone; by this 0.78)."""
MEMORY_KEPT = 0.1
"""Share of the memory that an engine leaves to everything but weights and KV."""


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
    matmul: float = 0.7
    """Share of peak that large matrix products reach (H200: measured)."""
    attention: float = 0.5
    """Share of peak matrix throughput that attention over a prompt reaches."""
    read: float = 0.84
    """Share of peak bandwidth at which a decode step reads weights (H100: vLLM's public figures)."""
    row_gb_s: float = 1e9
    """Rate at which weights are read where a single token is multiplied with them. It depends on the multiprocessors
    there are: 21 GB/s each, by public figures of H100 and H20."""
    read_kv: float = 0.84
    """Share of peak bandwidth at which it reads keys and values."""
    link_gb_s: float = 450.0
    """Between devices of one machine, one way."""
    link_s: float = 8e-6
    """An all-reduce of two devices, whatever its size."""
    network_gb_s: float = 50.0
    """From one machine to others, one way: 400 Gb/s."""

    def part(self, share: float) -> "Hardware":
        """A share of one device's multiprocessors, with all of its memory."""
        return replace(
            self,
            tflops=self.tflops * share,
            bandwidth_gb_s=self.bandwidth_gb_s * share**READ_BY_SHARE,
            row_gb_s=self.row_gb_s * share,
        )


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
        Hardware(name="h800", tflops=989.5, memory_gb=80, bandwidth_gb_s=3350, cost=2.85, link_gb_s=200),
        Hardware(name="h100", tflops=989.5, memory_gb=80, bandwidth_gb_s=3350, cost=2.85),
        Hardware(name="h200", tflops=989.5, memory_gb=141, bandwidth_gb_s=4800, cost=3.4, read=0.9, read_kv=0.925),
        Hardware(name="h20", tflops=148, memory_gb=96, bandwidth_gb_s=4000, cost=1.0, row_gb_s=1600, read_kv=0.8),
        Hardware(name="a100", tflops=312, memory_gb=80, bandwidth_gb_s=2039, cost=1.3, link_gb_s=300),
        Hardware(name="l40s", tflops=362, memory_gb=48, bandwidth_gb_s=864, cost=0.8, link_gb_s=25, link_s=20e-6),
        Hardware(name="cpu", tflops=0.4, memory_gb=16, bandwidth_gb_s=20, cost=0.02, link_gb_s=5, link_s=50e-6),
    )
}
"""The kinds known by name. The paper's two are h800 (compute) and h20 (bandwidth); `cpu` is one core. An H20 has
78 multiprocessors: alone, a sequence gets 0.4 of its bandwidth (Qwen's own figures: 8B at 82 tokens/s). With 64 rows,
64 to 96 multiprocessors of an H200 were measured to read 3.3 to 3.4 TB/s, so a batch is taken to get 0.84 of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What the software of an engine adds to a step."""

    step_s: float
    """Each step: scheduling that is not hidden behind the device."""
    layer_s: float
    """Each layer: starting its kernels."""
    sequence_s: float
    """Each sequence: sampling, and its answer on the way out."""
    experts: float = 1.0
    """Share of the device's reading rate that the matrix products of experts reach."""


RUNTIMES = {
    "embedded": Runtime(step_s=0.0, layer_s=27e-6, sequence_s=5e-6, experts=0.62),
    "vllm": Runtime(step_s=0.5e-3, layer_s=40e-6, sequence_s=55e-6),
    "sglang": Runtime(step_s=0.5e-3, layer_s=40e-6, sequence_s=55e-6),
}
"""By type of engine. `embedded` was measured on an H200; the servers' figures are those of vLLM in 2025 (newer ones
have about 8e-6 for a sequence: `sim.engine.sequence_s`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What costs depend on in a model. Where only the first fields are known, the others follow from them."""

    params: float
    """All parameters."""
    active_params: float
    """Parameters used per token (less than all in a mixture of experts)."""
    kv_bytes_per_token: float
    bytes_per_param: float = 2.0
    layers: int = 36
    hidden: int = 4096
    attention_width: int = 4096
    """Query heads times their size."""
    kv_heads: int = 8
    head_params: float = 0.0
    """Of the projection to the vocabulary."""
    lookup_params: float = 0.0
    """Of input embeddings that are not the head as well: looked up, not multiplied."""
    experts: int = 0
    """That a router chooses from; 0 where there are none."""
    experts_per_token: int = 0
    expert_params: float = 0.0
    """Of all of these together, in all layers."""

    def held_in(self, bytes_per_param: float) -> "ModelShape":
        """The same model in another precision."""
        factor = bytes_per_param / self.bytes_per_param
        return replace(self, bytes_per_param=bytes_per_param, kv_bytes_per_token=self.kv_bytes_per_token * factor)

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bytes_per_param

    @property
    def body_params(self) -> float:
        """That every token is multiplied with, the head aside."""
        return self.active_params - self.lookup_params - self.head_params


VOCABULARY = 151_936


def _qwen3(
    params: float,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int = 8,
    *,
    tied: bool = False,
    experts: int = 0,
    inner: int = 0,
) -> ModelShape:
    """Of the Qwen3 family: heads of 128, 8 of the experts for each token."""
    head = VOCABULARY * hidden
    per_token = 8 if experts else 0
    expert_params = layers * experts * 3.0 * hidden * inner
    return ModelShape(
        params=params,
        active_params=params - expert_params * (1 - per_token / experts if experts else 0.0),
        kv_bytes_per_token=layers * 2 * kv_heads * 128 * 2,
        layers=layers,
        hidden=hidden,
        attention_width=heads * 128,
        kv_heads=kv_heads,
        head_params=head,
        lookup_params=0.0 if tied else head,
        experts=experts,
        experts_per_token=per_token,
        expert_params=expert_params,
    )


MODELS = {
    "qwen3-0.6b": _qwen3(0.596e9, 28, 1024, 16, tied=True),
    "qwen3-4b": _qwen3(4.02e9, 36, 2560, 32, tied=True),
    "qwen3-8b": _qwen3(8.19e9, 36, 4096, 32),
    "qwen3-14b": _qwen3(14.77e9, 40, 5120, 40),
    "qwen3-32b": _qwen3(32.76e9, 64, 5120, 64),
    "qwen3-30b-a3b": _qwen3(30.53e9, 48, 2048, 32, kv_heads=4, experts=128, inner=768),
    "qwen3-235b-a22b": _qwen3(235.09e9, 94, 4096, 64, kv_heads=4, experts=128, inner=1536),
}
"""Model shapes that simulated jobs can name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Seconds of an engine's steps, for one model on this many devices. Made by `engine_costs`."""

    fixed_s: float
    """Each step, with the latency of its all-reduces."""
    sequence_s: float
    """Each sequence that a token is sampled for."""
    dense_read_s: float
    """Reading the weights that every token uses."""
    row_read_s: float = 0.0
    """The same for one token alone."""
    experts_read_s: float
    """Reading all experts."""
    expert_share: float
    """Of the experts that one token uses."""
    token_s: float
    """Multiplying one token with what it uses, the head aside."""
    head_s: float
    """Multiplying one token with the head."""
    passed_s: float
    """Each token of a prompt: its hidden state in memory between products, and in all-reduces."""
    reduced_s: float
    """Each token that decodes, in all-reduces."""
    kv_token_s: float
    """Reading one cached token of a sequence that decodes."""
    attention_s: float
    """One prompt token looking at one token before it."""
    kv_tokens: int
    """Cached tokens that there is memory for."""
    prompted_s: float = 0.0
    """Each step in which prompts are computed, beyond what their tokens take."""
    launched_s: float = 0.0
    """The least that such a step takes."""

    def holding(self, kv_tokens: int | None) -> "EngineCosts":
        """The same, where the cache is bounded to this many tokens."""
        return self if kv_tokens is None or kv_tokens >= self.kv_tokens else replace(self, kv_tokens=kv_tokens)

    def slowed(self, factor: float) -> "EngineCosts":
        """The same, where each step takes this many times as long."""
        seconds = [one.name for one in fields(self) if one.name.endswith("_s")]
        return replace(self, **{name: factor * getattr(self, name) for name in seconds})

    def step_s(
        self, batch: float, cached: float, prefill: float = 0.0, seen: float = 0.0, prompts: float = 0.0
    ) -> float:
        """`batch` sequences decode, whose caches hold `cached` tokens together; beside them `prefill` tokens of
        `prompts` prompts are computed, which look at `seen` tokens before them, on average."""
        tokens, sampled = batch + prefill, batch + prompts
        # Called for every event of a simulated engine: `if`, as `max` takes three times as long.
        products_s, row_s = self.dense_read_s, self.row_read_s if tokens < 1.0 else self.row_read_s / tokens
        if row_s > products_s:
            products_s = row_s
        if self.experts_read_s:
            products_s += self.experts_read_s * self.covered(tokens)
        computed_s = tokens * self.token_s + sampled * self.head_s
        if computed_s > products_s:
            products_s = computed_s
        seconds = (
            self.fixed_s
            + sampled * self.sequence_s
            + products_s
            + batch * self.reduced_s
            + cached * self.kv_token_s
            + prefill * (self.passed_s + seen * self.attention_s)
        )
        if prefill:
            seconds += self.prompted_s
            if seconds < self.launched_s:
                return self.launched_s
        return seconds

    def covered(self, tokens: float) -> float:
        """Share of the experts that at least one of this many tokens uses, if each chooses by itself."""
        return -math.expm1(tokens * math.log1p(-self.expert_share))

    def prefill_s(self, tokens: float, seen: float) -> float:
        """One prompt alone, in one step. `seen`: tokens that each of its tokens looks at, on average."""
        return self.step_s(0.0, 0.0, tokens, seen, 1.0)

    def prefill_token_s(self, seen: float) -> float:
        """One more token of a prompt, where a step has enough of them."""
        return self.token_s + self.passed_s + seen * self.attention_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Seconds that were measured, by those of the table."""

    prefill: float = 1.0
    decode: float = 1.0


TABLE = Learnt()


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntCosts:
    """Costs of steps as the table has them, each part at its factor. What prompts add to a step is prefill."""

    table: EngineCosts
    learnt: Learnt

    @property
    def kv_tokens(self) -> int:
        return self.table.kv_tokens

    def step_s(
        self, batch: float, cached: float, prefill: float = 0.0, seen: float = 0.0, prompts: float = 0.0
    ) -> float:
        decode_s = self.table.step_s(batch, cached) if batch else 0.0
        if not prefill:
            return self.learnt.decode * decode_s
        whole_s = self.table.step_s(batch, cached, prefill, seen, prompts)
        return self.learnt.decode * decode_s + self.learnt.prefill * (whole_s - decode_s)

    def prefill_s(self, tokens: float, seen: float) -> float:
        return self.learnt.prefill * self.table.prefill_s(tokens, seen)

    def prefill_token_s(self, seen: float) -> float:
        return self.learnt.prefill * self.table.prefill_token_s(seen)


@lru_cache(maxsize=256)
def engine_costs(
    model: ModelShape, hardware: Hardware, gpus: int, runtime: Runtime, parallel: str = "tensor"
) -> EngineCosts:
    """What the steps of one engine on `gpus` devices cost. `parallel`: `tensor`, where each layer is split over them
    and each sequence is on all; or `expert`, where each has all but the experts, which are split, and sequences of its
    own."""
    if parallel == "expert" and gpus > 1:
        return _expert_parallel(model, hardware, gpus, runtime)
    flops = hardware.tflops * 1e12 * gpus
    bytes_s = hardware.bandwidth_gb_s * 1e9 * gpus
    reduce_s, reduce_byte_s = _all_reduce(hardware, gpus)
    hidden_bytes = model.hidden * model.bytes_per_param
    reduced_s = 2 * model.layers * hidden_bytes * reduce_byte_s
    dense = model.params - model.expert_params - model.lookup_params
    spread = min(gpus, model.kv_heads) / gpus  # more devices than KV heads hold copies
    return EngineCosts(
        fixed_s=runtime.step_s + model.layers * (runtime.layer_s + 2 * reduce_s),
        sequence_s=runtime.sequence_s,
        dense_read_s=dense * model.bytes_per_param / (bytes_s * hardware.read),
        row_read_s=dense * model.bytes_per_param / (hardware.row_gb_s * 1e9 * gpus),
        experts_read_s=model.expert_params * model.bytes_per_param / (bytes_s * hardware.read * runtime.experts),
        expert_share=model.experts_per_token / model.experts if model.experts else 0.0,
        token_s=2 * model.body_params / (flops * hardware.matmul),
        head_s=2 * model.head_params / (flops * hardware.matmul),
        passed_s=ACTIVATION_PASSES * model.layers * hidden_bytes / (bytes_s * hardware.read_kv) + reduced_s,
        reduced_s=reduced_s,
        kv_token_s=model.kv_bytes_per_token / (bytes_s * hardware.read_kv * spread),
        attention_s=4 * model.layers * model.attention_width / (flops * hardware.attention),
        kv_tokens=kv_capacity_tokens(model, hardware, gpus),
    )


def _expert_parallel(model: ModelShape, hardware: Hardware, gpus: int, runtime: Runtime) -> EngineCosts:
    """Sequences are spread evenly, and experts used alike: a layer lasts as long on all devices. Of what each of them
    computes for its own sequences, and reads of its own caches, one has a part; all read the rest of the weights whole.
    Each layer has an all-to-all before its experts, and one after."""
    one, all_of_it = (engine_costs(model, hardware, count, runtime) for count in (1, gpus))
    hidden_bytes = model.hidden * model.bytes_per_param
    latency_s, each_s = exchange(hardware, gpus, model.experts_per_token, once=False)
    _, once_s = exchange(hardware, gpus, model.experts_per_token, once=True)
    sent_s, prompt_s = (2 * model.layers * hidden_bytes * byte_s / gpus for byte_s in (each_s, once_s))
    dense_bytes = (model.params - model.expert_params) * model.bytes_per_param
    free_bytes = hardware.memory_gb * 1e9 * (1 - MEMORY_KEPT) * gpus - gpus * dense_bytes
    free_bytes -= model.expert_params * model.bytes_per_param
    return replace(
        all_of_it,
        fixed_s=one.fixed_s + 2 * model.layers * latency_s,
        sequence_s=runtime.sequence_s / gpus,
        dense_read_s=one.dense_read_s,
        row_read_s=one.row_read_s,
        passed_s=one.passed_s / gpus + prompt_s,
        reduced_s=sent_s,
        kv_token_s=one.kv_token_s / gpus,
        kv_tokens=max(0, int(free_bytes / model.kv_bytes_per_token)),
    )


def _all_reduce(hardware: Hardware, gpus: int) -> tuple[float, float]:
    """(seconds, seconds for each byte) of one all-reduce."""
    if gpus == 1:
        return 0.0, 0.0
    inside = min(gpus, NODE_GPUS)
    seconds = hardware.link_s * (1 + math.log2(inside)) / 2
    byte_s = 2 * (inside - 1) / inside / (hardware.link_gb_s * 1e9)
    nodes = math.ceil(gpus / NODE_GPUS)
    if nodes > 1:
        seconds += 2 * NETWORK_S * math.log2(nodes)
        byte_s += 2 * (nodes - 1) / nodes / (hardware.network_gb_s * 1e9)
    return seconds, byte_s


def exchange(hardware: Hardware, gpus: int, experts: int, *, once: bool) -> tuple[float, float]:
    """(seconds, seconds for each byte of the hidden state of one token on each device) of one all-to-all, in which
    tokens go to the devices of their `experts`, or come back. A token is sent for each of them, or `once` to each
    machine and device that has several, which pays for prompts."""
    if gpus == 1:
        return 0.0, 0.0
    inside, nodes = min(gpus, NODE_GPUS), math.ceil(gpus / NODE_GPUS)
    near, far = experts * (inside - 1) / gpus, experts * (1 - inside / gpus)
    if once:
        near = (inside - 1) * (1 - (1 - 1 / gpus) ** experts)
        far = (nodes - 1) * (1 - (1 - 1 / nodes) ** experts)
    near_s = near / (hardware.link_gb_s * 1e9 * EXCHANGED)
    far_s = far * inside / (hardware.network_gb_s * 1e9)
    return EXCHANGE_S + (NETWORK_S if nodes > 1 else 0.0), max(near_s, far_s)


def kv_capacity_tokens(model: ModelShape, hardware: Hardware, gpus: int) -> int:
    """KV tokens that fit beside the weights."""
    free_bytes = hardware.memory_gb * 1e9 * (1 - MEMORY_KEPT) * gpus - model.weight_bytes
    spread = min(gpus, model.kv_heads) / gpus
    return max(0, int(free_bytes * spread / model.kv_bytes_per_token))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCosts:
    """Seconds of a train step. Made by `train_costs`."""

    update_s: float
    """The optimizer."""
    token_s: float
    pair_s: float
    """One token looking at one before it."""

    def step_s(self, tokens: float, pairs: float) -> float:
        """`pairs`: over all samples, half the square of their length."""
        return self.update_s + tokens * self.token_s + pairs * self.pair_s


@lru_cache(maxsize=64)
def train_costs(
    model: ModelShape,
    hardware: Hardware,
    gpus: int,
    *,
    forwards: float = TRAIN_FORWARDS,
    efficiency: float = 1.0,
    tensor: int = 1,
    expert: int = 1,
) -> TrainCosts:
    """`forwards`: what is computed, in forward passes. `efficiency`: what many devices reach of as many single ones.
    `tensor`: devices that share every layer. They send two all-reduces a layer forward, as many backward and in what is
    computed again: by the hidden state, while products grow with its square, so a small model loses more by it.
    `expert`: devices that experts are split over, with as many all-to-alls."""
    flops = hardware.tflops * 1e12 * gpus * efficiency
    bytes_s = hardware.bandwidth_gb_s * 1e9 * hardware.read_kv * gpus * efficiency
    multiplied = model.body_params + model.head_params
    activations = ACTIVATION_PASSES * forwards * model.layers * model.hidden * model.bytes_per_param
    logits = LOGIT_PASSES * 4 * (model.head_params / model.hidden if model.hidden else 0.0)
    attention = 4 * model.layers * model.attention_width * (forwards - 2 + ATTENTION_BACKWARD)
    _, reduce_byte_s = _all_reduce(hardware, tensor)
    _, exchange_byte_s = exchange(hardware, expert, model.experts_per_token, once=True)
    reduced = 2 * (forwards - 1) * model.layers * model.hidden * model.bytes_per_param
    return TrainCosts(
        update_s=UPDATE_BYTES * model.params / bytes_s,
        token_s=2 * forwards * multiplied / (flops * hardware.matmul)
        + (activations + logits) / bytes_s
        + reduced * (reduce_byte_s * tensor + exchange_byte_s) / (gpus * efficiency),
        pair_s=attention / (flops * TRAIN_ATTENTION),
    )
