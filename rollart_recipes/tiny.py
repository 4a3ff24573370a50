"""`rollart model tiny DIR`: a model so small that it learns two tasks on two cores within minutes.

Qwen3's architecture with untied embeddings, 0.4 M parameters in fp32, and a hand-made tokenizer that spells
the tasks in few tokens: one per row of the lake, one or two digits of a number together, each task's instruction
in one piece, and every printable ASCII character, so that any English text goes through and comes back unchanged.
A brief supervised warm-up on novices' play (`warmup.py`) teaches it the form of the answers, not how to win.
The result is an ordinary Hugging Face directory, the same for the same seed, steps and thread count.
"""

import asyncio
import itertools
import random
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart.errors import JobError
from rollart.tasks import calculator_math, frozen_lake
from rollart.tasks.api import TaskSet
from rollart_recipes.unfinished import unfinished
from rollart_recipes.warmup import WarmupReport, novice_plays, warm_up

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SAMPLED_EPISODES = 256
"""Of each task: what the words of its tokenizer are taken from."""
MAX_WORDS = 512
"""That become tokens."""
WARMUP_STEPS = 300
"""About a minute on one core."""
CONTEXT_TOKENS = 1024
HEAD_SIZE = 24

PAD, UNKNOWN, END = "<|pad|>", "<|unknown|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tiny(
    path: str | Path,
    *,
    seed: int = 0,
    warmup_steps: int = WARMUP_STEPS,
    head_size: int = HEAD_SIZE,
    tasks: Sequence[TaskSet] = (),
    progress: Callable[[int, float], None] | None = None,
) -> WarmupReport:
    """Write the model and its tokenizer to a directory. `progress` is called with the step and the loss. `tasks`: it is
    warmed up on these instead of the quick start's, and what they often say becomes a token each."""
    import torch
    from transformers.utils import logging as transformers_logging

    tokenizer = tiny_tokenizer(pieces_of(tasks))
    torch.manual_seed(seed)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = tiny_model(len(tokenizer), head_size)
    with unfinished(path) as folder:
        tokenizer.save_pretrained(folder)
        report = warm_up(model, folder, seed=seed, steps=warmup_steps, tasks=tasks, progress=progress)
        save(model, folder)
    return report


def pieces_of(tasks: Sequence[TaskSet]) -> list[str]:
    """Lines, words and characters that these tasks and their novices say often, to be tokens of their own. Raises
    JobError for a task that cannot be played so."""
    lines: Counter[str] = Counter()
    words: Counter[str] = Counter()
    characters: set[str] = set()
    for task_set in tasks:
        task_set.prepare()
        for index in range(SAMPLED_EPISODES):
            for line in _episode_text(task_set, index).splitlines(keepends=True):
                lines[line] += 1
                words.update(re.findall(r" ?[^\W\d_]{2,}", line))
                characters.update(line)
    often = [line for line, count in lines.items() if count >= SAMPLED_EPISODES // 4 and len(line) > 2]
    common = [word for word, count in words.most_common(MAX_WORDS) if count > 2]
    return [*often, *common, *sorted(characters)]


def _episode_text(task_set: TaskSet, index: int) -> str:
    """All that was said in one episode of the novice."""
    rng = random.Random(f"pieces/{task_set.domain}/{index}")
    try:
        turns = asyncio.run(novice_plays(task_set, task_set.warmup(index), rng))
    except NotImplementedError:
        raise JobError(
            f"--task: {task_set.domain} has no player to learn the form of its answers from; write scripted() or "
            "novice() in its task file, or take a model that has learnt to speak, such as `rollart model smollm2`"
        ) from None
    return "".join(f"{message.content}\n" for shown, _ in turns for message in shown) + "\n".join(
        said for _, said in turns
    )


def continue_warmup(
    path: str | Path,
    to: str | Path,
    *,
    seed: int = 0,
    start_step: int = WARMUP_STEPS,
    steps: int | None = None,
    seconds: float | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> WarmupReport:
    """A control experiment: go on with the warm-up instead of learning from rewards, for so many steps or seconds."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    model: Any = Qwen3ForCausalLM.from_pretrained(str(path), local_files_only=True)
    with unfinished(to) as folder:
        tokenizer.save_pretrained(folder)
        report = warm_up(
            model, folder, seed=seed, start_step=start_step, steps=steps, seconds=seconds, progress=progress
        )
        save(model, folder)
    return report


def vocabulary(more: Sequence[str] = ()) -> list[str]:
    """All tokens in the order of their ids: the specials first, `more` pieces last."""
    lake = [f"{row}\n" for row in _lake_rows()]
    numbers = [f"{number:02d}" for number in range(100)]
    words = [frozen_lake.INSTRUCTION, calculator_math.INSTRUCTION, *frozen_lake.MOVES, "calc ", "answer "]
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    return list(dict.fromkeys([PAD, UNKNOWN, END, *ROLES, *words, *lake, *numbers, *characters, *more]))


def tiny_tokenizer(more: Sequence[str] = ()) -> "PreTrainedTokenizerFast":
    """A fast tokenizer: the text is cut at the vocabulary's longest pieces, and pieces are joined again as they are."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = vocabulary(more)
    specials = [PAD, UNKNOWN, END, *ROLES]
    pieces = sorted((token for token in tokens if len(token) > 1 and token not in specials), key=len, reverse=True)
    pattern = "|".join([*(re.escape(piece).replace("\\\n", r"\n") for piece in pieces), r"(?m:.)"])
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast_tokenizer: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = fast_tokenizer(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(vocabulary_size: int, head_size: int = HEAD_SIZE) -> "Qwen3ForCausalLM":
    """Random weights. The large initial spread is what lets so small a model learn fast."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_size,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.06,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    network: Any = Qwen3ForCausalLM
    model: Qwen3ForCausalLM = network(config)
    _compose_rows(model.model.embed_tokens.weight.detach())
    return model


def _compose_rows(embeddings_vh: "torch.Tensor") -> None:
    """Start each lake row as the sum of its cells, so that what is learnt of one row holds for those like it."""
    import torch

    ids = {token: index for index, token in enumerate(vocabulary())}
    rows = _lake_rows()
    cells = {pair: torch.randn(embeddings_vh.shape[1]) for row in rows for pair in enumerate(row)}
    spread = float(embeddings_vh.std()) / frozen_lake.SIZE**0.5
    for row in rows:
        embeddings_vh[ids[f"{row}\n"]] = spread * torch.stack([cells[pair] for pair in enumerate(row)]).sum(0)


def save(model: Any, path: Path) -> None:
    """Weights, config, and the sampling that training uses."""
    from transformers import GenerationConfig

    generation: Any = GenerationConfig
    model.generation_config = generation(do_sample=True, temperature=1.0, eos_token_id=2, pad_token_id=0)
    model.eval().save_pretrained(path)


def _lake_rows() -> list[str]:
    """Every row of a lake that can be shown: ice, holes, at most one P, and G only in the last corner."""
    size = frozen_lake.SIZE
    inner = ("".join(cells) for cells in itertools.product(".OP", repeat=size))
    last = ("".join(cells) + "G" for cells in itertools.product(".OP", repeat=size - 1))
    return [row for row in itertools.chain(inner, last) if row.count("P") <= 1]
