"""The single-device trainer: one process, CPU or one GPU.

Owns: the policy's weights, the optimizer, and the version number (steps done). `SingleTrainer` is synchronous;
`AsyncTrainer` puts it behind the `Trainer` port, with publishing in a thread of its own, beside the next step.
Invariants: step n runs once, on version n, and gives version n + 1; the weights of the current and of the previous
version can be published, again and again, whatever step is under way; `restore(save())` continues bit for bit.
"""

import asyncio
import math
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from rollart.errors import TrainerError, boundary
from rollart.model import load_model, named_weights, packed_scores, probe
from rollart.samples import filled
from rollart.train.checkpoints import Checkpoints, copy_tokenizer, read_json, write_json
from rollart.train.losses import (
    LossInputs,
    LossReport,
    LossSettings,
    Totals,
    batch_advantages,
    merge_reports,
    policy_loss,
)
from rollart.train.optimizer import MasterAdamW
from rollart.train.packing import MicroBatch, check_sample, deal, pack
from rollart.types import Batch, Probe, StepResult, WeightManifest, WeightVersion

FORMAT = 1
"""Of the files beside the model in a checkpoint."""
MODEL_DIR, OPTIMIZER_FILE, TRAINER_FILE, RNG = "model", "optimizer.safetensors", "trainer.json", "rng"


class Store(Protocol):
    """What the trainer needs of a weight store."""

    def push(
        self, version: WeightVersion, tensors: Mapping[str, Tensor], probe: Probe | None = None
    ) -> WeightManifest: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleSettings:
    """All that a trainer is started from. Plain data: it travels to the trainer's process."""

    model_path: str
    """A Hugging Face directory: the initial weights, and the tokenizer's files."""
    checkpoint_dir: str
    loss: LossSettings = field(default_factory=LossSettings)
    lr: float = 1e-5
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    lr_decay: Literal["none", "linear", "cosine"] = "none"
    steps: int = 1
    """How many there will be: over them `lr_decay` brings the learning rate to zero."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest gradient norm; 0 means no clipping."""
    updates_per_step: int = 1
    """Optimizer updates in a step, each on its share of the samples. More than one costs a forward pass for the
    proximal log-probabilities, taken once when the step begins."""
    microbatch_tokens: int = 4096
    bf16: bool = False
    """The network computes in bfloat16; master weights and gradients stay float32."""
    device: str = "cpu"
    threads: int | None = None
    """CPU threads of this process; None leaves torch's own choice."""
    temperatures: Mapping[str, float] = field(default_factory=dict)
    """Sampling temperature by domain; 1 where not named."""
    skip_zero_variance: bool = False
    """Pass over groups whose members all have advantage 0."""
    reference_path: str | None = None
    """The model the KL is taken to; None means the initial weights. Loaded only where `loss.kl_coef` is set."""
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        least_of = {"updates_per_step": 1, "microbatch_tokens": 1, "warmup_steps": 0, "keep_checkpoints": 2, "steps": 1}
        for key, least in least_of.items():
            if getattr(self, key) < least:
                raise ValueError(f"{key}: {getattr(self, key)} is too few; give {least} or more")
        if self.lr <= 0:
            raise ValueError(f"lr: {self.lr} trains nothing; give a positive number such as 1.0e-5")
        if self.grad_clip < 0:
            raise ValueError(f"grad_clip: {self.grad_clip} is negative; give 0 for none, or a norm such as 1.0")
        for domain, temperature in self.temperatures.items():
            if temperature < 0:
                raise ValueError(
                    f"temperatures.{domain}: {temperature} is negative; give what the task is sampled at, such as 1.0"
                )


def learning_rate(settings: SingleSettings, step: int) -> float:
    """Of one step: warm-up times decay."""
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    left = max(0.0, 1 - step / settings.steps)
    match settings.lr_decay:
        case "none":
            return settings.lr * warm
        case "linear":
            return settings.lr * warm * left
        case "cosine":
            return settings.lr * warm * (1 - math.cos(math.pi * left)) / 2


class SingleTrainer:
    """The synchronous core. `train_step`, `save` and `restore` from one thread; `publish` from any."""

    def __init__(self, settings: SingleSettings) -> None:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        self._settings = settings
        self._device = torch.device(settings.device)
        self._checkpoints = Checkpoints(Path(settings.checkpoint_dir), settings.keep_checkpoints)
        self._lock = threading.Lock()
        """Held while the version changes or a snapshot is taken."""
        self._reference: PreTrainedModel | None = None
        if settings.loss.kl_coef:
            path = Path(settings.reference_path or settings.model_path)
            self._reference = self._load_network(path).requires_grad_(False)
        self._snapshots: dict[WeightVersion, tuple[dict[str, Tensor], Probe]] = {}
        self._half_done = False
        self.restore("")

    @property
    def version(self) -> WeightVersion:
        """Steps done."""
        return self._version

    def named_tensors(self) -> dict[str, Tensor]:
        """The live weights by name, as the network names them; tied ones once."""
        return named_weights(self._network)

    def train_step(self, batch: Batch) -> StepResult:
        """One step on version `batch.step`. A batch without a sampled token leaves the weights as they are."""
        self._check_whole()
        if batch.step != self._version:
            kind = "was already trained on" if batch.step < self._version else "is ahead of the trainer"
            raise TrainerError(
                f"step {batch.step} {kind}, which is at version {self._version}; "
                f"send the batch of step {self._version}, or restore another checkpoint first"
            )
        began = time.perf_counter()
        if batch.groups:
            batch = filled(batch, skip_zero_variance=self._settings.skip_zero_variance)
        for sample in batch.samples:
            check_sample(sample, self._network.config.vocab_size)
        # From here on `publish` reads this copy, and never the weights that are about to change.
        self._snapshot(self._version)
        updates = self._prepare(batch)
        lr = learning_rate(self._settings, self._version)
        reports: list[dict[str, float]] = []
        for update in updates:
            try:
                reports.append(self._update(update, lr))
            except BaseException:
                self._optimizer.zero()
                self._half_done = bool(reports)
                raise
        with self._lock:
            self._version += 1
        metrics = _summary(reports, updates, batch.step) | {"actor/lr": lr}
        seconds = time.perf_counter() - began
        metrics |= {"timing_s/train": seconds, "perf/tokens_per_s": metrics["perf/tokens"] / seconds}
        return StepResult(version=self._version, metrics=metrics)

    def publish(self, version: WeightVersion, store: Store) -> WeightManifest:
        """Push the current or the previous version."""
        return store.push(version, *self._snapshot(version))

    def save(self) -> str:
        """Write a checkpoint; returns its path."""
        self._check_whole()
        return str(self._checkpoints.write(self._version, self._fill))

    def restore(self, reference: str) -> WeightVersion:
        """Continue from a checkpoint, or from the initial weights where `reference` is empty."""
        path = Path(reference or self._settings.model_path)
        if reference and not (path / TRAINER_FILE).is_file():
            raise TrainerError(f"checkpoint {reference}: no {TRAINER_FILE} there; give a path that `save` returned")
        state = read_json(path / TRAINER_FILE) if reference else {"format": FORMAT, "version": 0}
        if state.get("format") != FORMAT:
            raise TrainerError(f"checkpoint {reference}: format {state.get('format')!r}; this RollArt reads {FORMAT}")
        network = self._load_network(path / MODEL_DIR if reference else path)
        optimizer = self._new_optimizer(network)
        if reference:
            tensors = load_file(path / OPTIMIZER_FILE)
            torch.set_rng_state(tensors.pop(RNG))
            optimizer.load(tensors)
            self._checkpoints.use(path)
        with self._lock:
            self._network, self._optimizer = network, optimizer
            self._version = int(state["version"])
            self._snapshots, self._half_done = {}, False
        return self._version

    def _check_whole(self) -> None:
        if self._half_done:
            raise TrainerError(f"step {self._version} failed half-way, so the weights are of no version; restore first")

    def _load_network(self, path: Path) -> PreTrainedModel:
        dtype = torch.bfloat16 if self._settings.bf16 else torch.float32
        return load_model(path, dtype, self._device)

    def _new_optimizer(self, network: PreTrainedModel) -> MasterAdamW:
        at = self._settings
        return MasterAdamW(network, betas=at.betas, eps=at.eps, weight_decay=at.weight_decay, grad_clip=at.grad_clip)

    def _snapshot(self, version: WeightVersion) -> tuple[dict[str, Tensor], Probe]:
        """A copy of one version's weights, and what they say of the probe; taken once, kept while it is the current or
        the previous one."""
        with self._lock:
            if version not in self._snapshots:
                if version != self._version:
                    held = sorted({self._version, *self._snapshots})
                    raise TrainerError(f"version {version} is not held any more (or not yet); held: {held}")
                kept = {at: held for at, held in self._snapshots.items() if at >= version - 1}
                copy = {name: tensor.clone() for name, tensor in self.named_tensors().items()}
                self._snapshots = kept | {version: (copy, probe(self._network))}
            return self._snapshots[version]

    def _prepare(self, batch: Batch) -> list["_Update"]:
        """Pack the batch, one update after another, and take what must be of the step's beginning."""
        at = self._settings
        hands = deal(batch.samples, at.updates_per_step) if at.updates_per_step > 1 else [list(batch.samples)]
        packed = [
            [part.to(self._device) for part in pack(hand, at.microbatch_tokens, at.temperatures)] for hand in hands
        ]
        parts = [part for hand in packed for part in hand]
        if not parts:
            return []
        sizes = [part.num_sampled for part in parts]
        normal = iter(torch.split(batch_advantages(at.loss, torch.cat([part.advantages_N for part in parts])), sizes))
        updates: list[_Update] = []
        for hand in packed:
            with torch.no_grad():
                proximal = [self._score(self._network, part)[0] if len(packed) > 1 else None for part in hand]
            totals = Totals(
                tokens=sum(part.num_sampled for part in hand), sequences=sum(len(part.lengths) for part in hand)
            )
            advantages = [next(normal) for _ in hand]
            updates.append(_Update(totals=totals, parts=hand, proximal=proximal, advantages=advantages))
        return [update for update in updates if update.parts]

    def _update(self, update: "_Update", lr: float) -> dict[str, float]:
        """One optimizer update over the micro-batches' accumulated gradients."""
        reports: list[LossReport] = []
        for part, proximal_N, advantages_N in zip(update.parts, update.proximal, update.advantages, strict=True):
            loss, report = self._loss(part, proximal_N, advantages_N, update.totals)
            torch.autograd.backward(loss)
            reports.append(report)
        norm = self._optimizer.clip()
        # A step that overflowed is skipped, not repeated: the same batch would overflow again after a restart.
        finite = math.isfinite(norm)
        if finite:
            self._optimizer.update(lr)
        else:
            self._optimizer.zero()
        return merge_reports(reports) | {"actor/grad_norm": norm, "actor/skipped_updates": float(not finite)}

    def _loss(
        self, part: MicroBatch, proximal_N: Tensor | None, advantages_N: Tensor, totals: Totals
    ) -> tuple[Tensor, LossReport]:
        current_N, entropy_N = self._score(self._network, part)
        reference_N = None
        if self._reference is not None:
            with torch.no_grad():
                reference_N = self._score(self._reference, part)[0]
        inputs = LossInputs(
            current_N=current_N,
            proximal_N=current_N.detach() if proximal_N is None else proximal_N,
            behaviour_N=part.behaviour_N,
            advantages_N=advantages_N,
            sequence_N=part.sequence_N,
            num_sequences=len(part.lengths),
            entropy_N=entropy_N if self._settings.loss.entropy_coef else entropy_N.detach(),
            reference_N=reference_N,
        )
        return policy_loss(self._settings.loss, inputs, totals)

    def _score(self, network: PreTrainedModel, part: MicroBatch) -> tuple[Tensor, Tensor]:
        """(logprobs_N, entropy_N) of the sampled tokens."""
        wanted_T = torch.zeros_like(part.tokens_T, dtype=torch.bool)
        wanted_T[part.positions_N] = True
        scores = packed_scores(network, part.tokens_T, part.lengths, part.temperature, wanted_T)
        return scores.logprobs_T[part.positions_N], scores.entropy_T[part.positions_N]

    def _fill(self, folder: Path) -> None:
        """Write all of a checkpoint below `folder`."""
        model = folder / MODEL_DIR
        self._network.save_pretrained(model)
        copy_tokenizer(Path(self._settings.model_path), model)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self._optimizer.tensors().items()}
        save_file(tensors | {RNG: torch.get_rng_state()}, folder / OPTIMIZER_FILE)
        write_json(folder / TRAINER_FILE, {"format": FORMAT, "version": self._version, "bf16": self._settings.bf16})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """The micro-batches of one optimizer update, and what goes with each of them."""

    totals: Totals
    parts: list[MicroBatch]
    proximal: list[Tensor | None]
    """None where the current log-probabilities are the proximal ones."""
    advantages: list[Tensor]


def _summary(reports: list[dict[str, float]], updates: list[_Update], version: WeightVersion) -> dict[str, float]:
    """The step's metrics: means over its updates (largest of `_max`, sum of `skipped_updates`), and counts."""
    merged: dict[str, float] = {}
    for name in sorted({name for report in reports for name in report}):
        values = [report[name] for report in reports if name in report]
        match name.rpartition("_")[2]:
            case "max":
                merged[name] = max(values)
            case "updates":
                merged[name] = sum(values)
            case _:
                merged[name] = sum(values) / len(values)
    parts = [part for update in updates for part in update.parts]
    merged["perf/tokens"] = float(sum(part.num_tokens for part in parts))
    merged["perf/sampled_tokens"] = float(sum(part.num_sampled for part in parts))
    merged["perf/microbatches"] = float(len(parts))
    if parts:
        ages_N = version - torch.cat([part.versions_N for part in parts])
        merged["actor/age_mean"], merged["actor/age_max"] = float(ages_N.float().mean()), float(ages_N.max())
    return merged


class AsyncTrainer:
    """The `Trainer` port over a `SingleTrainer` and a store, in this process.

    One thread trains, saves and restores; another publishes, so that a push and the next step overlap.
    """

    def __init__(self, core: SingleTrainer, store: Store) -> None:
        self._core = core
        self._store = store
        self._work = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._push = ThreadPoolExecutor(1, thread_name_prefix="publish")

    async def train_step(self, batch: Batch) -> StepResult:
        with boundary(TrainerError, f"train step {batch.step}"):
            return await asyncio.get_running_loop().run_in_executor(self._work, self._core.train_step, batch)

    async def publish(self, version: WeightVersion) -> WeightManifest:
        with boundary(TrainerError, f"publish of version {version}"):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._push, self._core.publish, version, self._store)

    async def save(self) -> str:
        with boundary(TrainerError, "trainer save"):
            return await asyncio.get_running_loop().run_in_executor(self._work, self._core.save)

    async def restore(self, reference: str) -> WeightVersion:
        with boundary(TrainerError, f"trainer restore of {reference or 'the initial weights'}"):
            return await asyncio.get_running_loop().run_in_executor(self._work, self._core.restore, reference)

    def close(self) -> None:
        """Wait for what is under way, and end the threads."""
        self._work.shutdown()
        self._push.shutdown()
