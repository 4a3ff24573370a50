"""Some adapters need the `train` extra; without it their tests are not collected."""

from importlib.util import find_spec

NEED_TORCH = ["test_engine.py", "test_engine_vllm.py", "test_store.py", "test_tokenizer.py", "test_trainer.py"]
collect_ignore = [] if find_spec("torch") and find_spec("transformers") else NEED_TORCH
