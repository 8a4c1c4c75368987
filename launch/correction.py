"""Corrects a command line by what an error suggests, so that the line can be typed again."""

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence

# What other tools call the commands.
SYNONYMS = {
    "run": "train",
    "fit": "train",
    "start": "train",
    "resume": "train",
    "list": "configs",
    "ls": "configs",
    "new": "init",
    "create": "init",
    "eval": "evaluate",
    "test": "evaluate",
    "validate": "evaluate",
    "infer": "predict",
    "compile": "preflight",
    "price": "preflight",
    "check": "preflight",
    "benchmark": "bench",
    "convert": "data convert",
    "tune": "search",
    "show": "config show",
    "deploy": "launch vertex-endpoint",
}
# What other tools call the fields of a config, and in which group each is.
FIELDS = {
    "batch_size": "data.global_batch_size",
    "batch": "data.global_batch_size",
    "lr": "optimizer.learning_rate",
    "optimizer": "optimizer.name",
    "precision": "train.precision",
    "dtype": "train.precision",
    "epoch": "train.epochs",
    "max_steps": "train.steps",
    "data": "data.data_dir",
    "dataset": "data.data_dir",
}


def correct(words: Sequence[str], message: str) -> str:
    """Returns the command line as the suggestion at the end of an error changes it.

    Args:
        words: the words after `tftpu`.
        message: the error.

    Returns:
        The line to type; "" if the error suggests nothing, or nothing that was typed is near it.
    """
    found = re.search(r"Did you mean '([^']+)'\?", message)
    if found is None:
        return ""
    meant = found[1]
    pieces = [
        (place, piece)
        for place, word in enumerate(words)
        for piece in _list_pieces(word)
        if piece != meant and re.search(rf"(?<![\w.]){re.escape(piece)}(?![\w])", message)
    ]
    if not pieces:
        return ""

    def measure(pair: tuple[int, str]) -> tuple[float, int]:
        piece = pair[1]
        return difflib.SequenceMatcher(None, piece, meant).ratio(), -len(piece)

    place, piece = max(pieces, key=measure)
    changed = [*words]
    before, name, after = changed[place].partition(piece)
    changed[place : place + 1] = (
        [*meant.split(), *filter(None, [after])]
        if not before and name and " " in meant
        else [f"{before}{meant}{after}"]
    )
    return shlex.join(["tftpu", *changed])


def _list_pieces(word: str) -> Iterator[str]:
    """Yields the parts of a word that may be misspelt: names, fields, and values."""
    flag, _, value = word.partition("=")
    name = flag.lstrip("-")
    yield flag
    yield name
    yield from name.split(".") if "." in name and not name.endswith(".py") else ()
    if value:
        yield value
        yield from value.split(",") if "," in value else ()
