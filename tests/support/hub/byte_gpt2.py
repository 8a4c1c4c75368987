"""KerasHub's GPT-2, built small, with a preprocessor whose tokens are bytes."""

from typing import Any


def build_byte_gpt2(length: int = 64) -> Any:
    """Returns a language model with random weights that takes texts.

    Args:
        length: the number of tokens of a text.
    """
    import keras_hub  # takes seconds

    symbols = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    symbols += [chr(256 + code) for code in range(256 - len(symbols))]  # as GPT-2 names the bytes
    vocabulary = {symbol: number for number, symbol in enumerate([*symbols, "<|endoftext|>", "th"])}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["t h"])
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(vocabulary),
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        intermediate_dim=64,
        max_sequence_length=64,
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=length)
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
