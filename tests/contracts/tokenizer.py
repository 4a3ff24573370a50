"""What every Tokenizer must do: one suite, run against each adapter."""

from abc import ABC, abstractmethod

import numpy as np
import pytest

from rollart.errors import JobError
from rollart.ports import Tokenizer
from rollart.types import Message


class TokenizerContract(ABC):
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def refused(self) -> Message:
        """A message that the chat template refuses."""

    message = Message(role="user", content="12")

    def test_messages_become_tokens_and_the_same_ones_each_time(self) -> None:
        tokenizer = self.tokenizer()
        for fresh in (True, False):
            first, again = (tokenizer.render((self.message,), fresh=fresh) for _ in range(2))
            assert first.dtype == np.int32
            assert first.ndim == 1
            assert len(first) > 0
            assert np.array_equal(first, again)

    def test_what_follows_an_answer_does_not_change_it(self) -> None:
        tokenizer = self.tokenizer()
        answer = tokenizer.render((self.message,), fresh=True)
        before = answer.copy()
        assert len(tokenizer.render((self.message,), fresh=False, after=answer)) > 0
        assert np.array_equal(answer, before)

    def test_tokens_become_text(self) -> None:
        tokenizer = self.tokenizer()
        assert isinstance(tokenizer.decode(tokenizer.render((self.message,), fresh=True)), str)
        assert tokenizer.decode(np.zeros(0, dtype=np.int32)) == ""

    def test_what_the_template_refuses_is_an_error_of_ours(self) -> None:
        tokenizer = self.tokenizer()
        with pytest.raises(JobError, match="template"):
            tokenizer.render((self.refused(),), fresh=True)
