"""KerasHub's Gemma 3, built small, with a tokenizer that is trained on a few sentences."""

import io
from pathlib import Path
from typing import Any

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"),
    *("and", "reads", "all", "of", "its", "old", "books", "again"),
]


def write_texts(path: Path, count: int = 160) -> Path:
    """Writes lines of six words each, of which each follows the one three words before it."""
    lines = (" ".join(WORDS[(n * 3 + k) % len(WORDS)] for k in range(6)) for n in range(count))
    path.write_text("\n".join(lines))
    return path


def build_tokenizer() -> Any:
    """Returns a tokenizer of SentencePiece with 80 tokens."""
    import keras_hub  # takes seconds
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS)] * 20),
        model_writer=written,
        vocab_size=80,
        model_type="bpe",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>"],
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return keras_hub.models.Gemma3Tokenizer(written.getvalue(), has_vision_tokens=False)


def build_tiny_gemma3() -> Any:
    """Returns a language model with random weights that takes texts, with Gemma 3's own norms."""
    import keras_hub

    tokenizer = build_tokenizer()
    backbone = keras_hub.models.Gemma3Backbone(
        vocabulary_size=tokenizer.vocabulary_size(),
        image_size=None,
        num_layers=2,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=8,
        use_query_key_norm=True,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        vision_encoder=None,
    )
    preprocessor = keras_hub.models.Gemma3CausalLMPreprocessor(tokenizer, sequence_length=24)
    return keras_hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=preprocessor)
