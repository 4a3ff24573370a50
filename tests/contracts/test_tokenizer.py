"""The tokenizer contract: simulated, and a Hugging Face tokenizer with its chat template."""

from pathlib import Path

import pytest

from rollart.model.tokenizer import ChatTokenizer
from rollart.ports import Tokenizer
from rollart.sim.envs import REFUSED, SimTokenizer
from rollart.types import Message
from rollart_recipes.tiny import tiny_tokenizer
from tests.contracts.tokenizer import TokenizerContract

NO_TOOLS = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ message.content + '<end>' }}{% endfor %}"
)


class TestSimTokenizer(TokenizerContract):
    def tokenizer(self) -> Tokenizer:
        return SimTokenizer()

    def refused(self) -> Message:
        return Message(role=REFUSED, content="12")


class TestChatTokenizer(TokenizerContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        fast = tiny_tokenizer()
        fast.chat_template = NO_TOOLS
        fast.save_pretrained(tmp_path)
        self.directory = tmp_path

    def tokenizer(self) -> Tokenizer:
        return ChatTokenizer(self.directory)

    def refused(self) -> Message:
        return Message(role="tool", content="12")
