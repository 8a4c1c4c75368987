"""Converts texts to tokens and back with the preprocessor of a KerasHub task.

Tried with KerasHub 0.32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tftpu.errors import UserError
from tftpu.models.keras_hub import presets
from tftpu.models.keras_hub.config import KerasHub


class TaskTokenizer:
    """The vocabulary of a task, with the special tokens that its preprocessor adds.

    Args:
        config: the config of the task.

    Raises:
        UserError: the task does not generate texts, or its preset has no tokenizer.
    """

    def __init__(self, config: KerasHub):
        self._preprocessor = presets.load_preprocessor(config)
        if not hasattr(self._preprocessor, "generate_preprocess"):
            raise UserError(
                f"model.task={config.task!r} writes no texts: only tasks such as causal_lm do."
            )
        self._tokenizer = self._preprocessor.tokenizer
        self.size: int = self._tokenizer.vocabulary_size()

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a prompt, beginning with the start token if there is one."""
        longest = len(text.encode(errors="replace")) + 8  # each token has at least one byte
        found = self._preprocessor.generate_preprocess([text], sequence_length=longest)
        known = np.asarray(found["padding_mask"])[0].astype(bool)
        return np.asarray(found["token_ids"])[0][known].tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        ids = np.array([tokens], np.int32)
        given = {"token_ids": ids, "padding_mask": np.ones_like(ids, bool)}
        return str(np.asarray(self._preprocessor.generate_postprocess(given)).tolist()[0])

    def find_token(self, name: str) -> int:
        """Returns the id of a token.

        Raises:
            UserError: there is no such token.
        """
        if name not in self._tokenizer.get_vocabulary():
            raise UserError(f"The tokenizer of the preset has no token {name!r}.")
        return self._tokenizer.token_to_id(name)

    def find_stops(self, task: Any) -> list[int]:
        """Returns the ids of the tokens at which KerasHub's `generate` of a task ends a text."""
        found: list[int] = []

        def record(inputs: Any, stop_token_ids: Sequence[int]) -> Any:
            found.extend(int(token) for token in stop_token_ids)
            return inputs

        before = task.preprocessor, task.generate_function
        task.preprocessor, task.generate_function = self._preprocessor, record
        try:
            task.generate("a", max_length=8)
        finally:
            task.preprocessor, task.generate_function = before
        return found
