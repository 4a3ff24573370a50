"""What a trainer is started from, single or sharded, and the learning rate that follows from it.

A job that was resumed with other settings has those of its earlier steps too: a replayed step is trained as it was.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rollart.train.losses import LossSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """All that a trainer is started from. Plain data, checked by the job: it travels to the trainer's process."""

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
    probe: bool = True
    """Publish each version with its log-probabilities of the probe: servers need it, embedded engines do not."""
    set_aside_path: str = ""
    """The file of what could not be trained on; empty: it is kept in memory only."""
    earlier: "tuple[tuple[int, TrainerSettings], ...]" = ()
    """(n, what the steps before n are trained with), n rising."""

    def at(self, step: int) -> "TrainerSettings":
        """What this step is trained with."""
        return next((settings for until, settings in self.earlier if step < until), self)

    @property
    def has_kl(self) -> bool:
        """Whether any step needs the reference."""
        return any(settings.loss.kl_coef for settings in (self, *(settings for _, settings in self.earlier)))


def learning_rate(settings: TrainerSettings, step: int) -> float:
    """Of one step: warm-up times decay."""
    settings = settings.at(step)
    warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    left = max(0.0, 1 - step / settings.steps)
    match settings.lr_decay:
        case "none":
            return settings.lr * warm
        case "linear":
            return settings.lr * warm * left
        case "cosine":
            return settings.lr * warm * (1 - math.cos(math.pi * left)) / 2
