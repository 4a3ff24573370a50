"""Writes docs/models.md: every causal LM architecture of transformers, and whether RollArt computes it rightly.

Each class is reduced (`model/reduced.py`), built and proven (`model/agreement.py`), as when a job loads a model of it.
Takes a minute. `tests/engines/test_architectures.py` fails when the page is out of date: a few families always, all of
them in the slow tests. With another version of transformers than the page's only verdicts are compared.
"""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollart.engines.embedded.steps import prove_steps_architecture
from rollart.errors import JobError
from rollart.model.network import prove_packed_architecture
from rollart.model.reduced import reduced_model

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
KINDS: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VERSION = f"transformers {transformers.__version__}"

GIVEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
"""What a class's own defaults leave out, or leave out of what its published models have."""

INTRO = f"""\
# Architectures

Made by `python -m scripts.model_table` with {VERSION}; do not edit it here.

RollArt runs transformers' own model code with an attention of its own: packed batches in the trainer, steps over a
cache in the [embedded engine](engine.md). That is right for models whose tokens know of each other through causal
attention alone, whole or in a sliding window. Whether it is right for a model is computed whenever one is loaded
(`model/agreement.py`): packed, and in steps, against transformers' own forward pass of each sequence alone. Where
log-probabilities differ by more than rounding, the model is refused, and the error says by how much.

- Before weights are read, on a reduced model of the same config (`model/reduced.py`): same structure, random weights,
  tiny sizes, windows of a few tokens, float32 on the CPU. `rollart check` and `rollart train` begin with it.
- After that on the model itself, in its type and on its device. What counts as rounding there is found by letting
  transformers compute it twice in different orders; it is at least 0.001 (bfloat16: 0.06) and at most four times that.

A sliding window (`sliding_window` in a model's config.json) is masked, in the trainer everywhere and in the embedded
engine on a CPU. The engine's kernels for CUDA know no window: there `model.context_tokens` is at most the window, or
the model is refused.

A model that the trainer takes and the embedded engine refuses may be served by [vLLM or SGLang](vllm.md), where they
know it.

The table has every class of `AutoModelForCausalLM`, each with its default config (a few completed: see the script).
A published model may differ from its class's defaults: what counts is the proof when it is loaded. "not built" means
that no reduced model can be made of the defaults; such a model is proven on its own weights alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One architecture. None: not built; "": right; else why it is refused."""

    kind: str
    trainer: str | None
    engine: str | None

    def line(self) -> str:
        """As in the table."""
        why = (self.trainer or self.engine or "").replace("|", "/")
        verdicts = [_verdict(fault) for fault in (self.trainer, self.engine)]
        return f"| `{self.kind}` | {verdicts[0]} | {verdicts[1]} | {why} |"


def default_config(kind: str) -> PreTrainedConfig | None:
    """The default config of an architecture, completed; None where its class has none that is valid."""
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[kind](**GIVEN.get(kind, {}))
    except Exception:  # each class has its own words for it
        return None
    return config


def examine(kind: str) -> Row:
    """Prove one architecture, both ways."""
    config = default_config(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if config is None or reduced_model(config) is None:
            return Row(kind=kind, trainer=None, engine=None)
    trainer = _fault(prove_packed_architecture, config)
    return Row(kind=kind, trainer=trainer, engine=trainer or _fault(prove_steps_architecture, config))


def render(rows: Sequence[Row]) -> str:
    right = sum(row.trainer == "" for row in rows)
    both = sum(row.engine == "" for row in rows)
    built = sum(row.trainer is not None for row in rows)
    counts = (
        f"Of {len(rows)} architectures {built} are built; {right} are right in the trainer, {both} in the embedded "
        "engine too; the others are refused.\n"
    )
    head = "| model type | trainer | embedded engine | why not |\n|---|---|---|---|\n"
    return f"{INTRO}\n{counts}\n{head}" + "".join(f"{row.line()}\n" for row in rows)


def _fault(prove: Callable[[PreTrainedConfig], None], config: PreTrainedConfig) -> str:
    """Why it is refused, without its name, the advice, and figures that another processor would round otherwise."""
    try:
        prove(config)
    except JobError as error:
        text = str(error).partition(": ")[2].rpartition("; ")[0]
        return re.sub(
            r" are off by \S+ from transformers' own \(up to \S+ is rounding\)", " are not transformers'", text
        )
    return ""


def _verdict(fault: str | None) -> str:
    return "not built" if fault is None else "refused" if fault else "yes"


def main() -> None:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    PAGE.write_text(render([examine(kind) for kind in KINDS]))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
