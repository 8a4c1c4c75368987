"""Whole files that tests damage."""

import json
from pathlib import Path

import tokenizers

from tests.support.models.leaves import leaves
from tftpu.checkpoint.store import Best, Checkpoints
from tftpu.input_pipelines.formats import manifest
from tftpu.input_pipelines.formats.manifest import Feature, Manifest, Shard
from tftpu.runtime import goodput


def tokenizer() -> str:
    """Returns a small tokenizer.json with truncation and padding."""
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], unk_token="a")
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.add_tokens(["<end>"])
    whole.enable_truncation(3)
    whole.enable_padding(length=5)
    return whole.to_str()


WHOLE = manifest.to_json(
    Manifest(
        ".",
        {"x": Feature("float32", (2, 2), "raw"), "y": Feature("int64", num_classes=3)},
        {"train": (Shard("train-0", 300, 9000, "0123abcd", (0, 5000)),), "test": ()},
        "",
        {"classes": ["a", "b", "c"], "conversions": {"train": "0123"}},
    )
)


def written(folder: str) -> tuple[dict, dict]:
    """Writes two checkpoints and an account; returns a manifest and the account."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, leaves(1), {}, Best("loss", 0.5))
    checkpoints.save(2, leaves(2), {})
    checkpoints.wait()
    account = goodput.Account(folder, goodput.Clock())
    account.write(goodput.FAILED, goodput.Facts(step=2, steps=4))
    names = ("checkpoints/2/manifest.json", goodput.FILE)
    listed, record = (json.loads(Path(folder, name).read_bytes()) for name in names)
    return listed, record
