"""Corrects a command line with the suggestion of an error, so that the user can retype it."""

import difflib
import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from tftpu.errors import find_nearest
from tftpu.storage import files

# Names that other tools have for the commands.
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
# Names that other tools have for fields of a config, and the path of each field.
FIELDS = {
    "batch_size": "data.global_batch_size",
    "batch": "data.global_batch_size",
    "lr": "optimizer.learning_rate",
    "optimizer": "optimizer.name",
    "precision": "train.precision",
    "dtype": "train.precision",
    "epoch": "train.epochs",
    "max_steps": "train.steps",
    "rank": "model.lora",
    "lora_rank": "model.lora",
    "data": "data.data_dir",
    "dataset": "data.data_dir",
}
# Names that other tools and other commands have for the folder of a run.
WORKDIRS = ("output", "output_dir", "out", "logdir", "run", "run_dir", "model_dir")
# Names that a user may guess for --base, the flag that leaves adapters out.
ADAPTERS = ("adapters", "no_adapters", "lora", "no_lora", "without_adapters")

# Names that other tools have for values of flags and fields.
VALUES = {
    "bf16": "mixed_bfloat16",
    "bfloat16": "mixed_bfloat16",
    "fp16": "mixed_float16",
    "fp32": "float32",
    "tflite": "litert",
    "tf": "saved_model",
    "gpu": "none",
    "cpu": "none",
}
# Kinds of addresses: for a flag --images=FOLDER, an error suggests --source=images:FOLDER.
KINDS = ("images", "text", "tfrecord", "bigquery")
_RUNS = 10  # maximum number of runs in a suggestion


def correct(words: Sequence[str], message: str) -> list[str]:
    """Applies an error's suggestion ("Did you mean ...?" or "Allowed: ...") to the command line.

    Args:
        words: the arguments after `tftpu`.
        message: the text of the error.

    Returns:
        The corrected arguments; [] if the error suggests nothing, or names none of the arguments.
    """
    found = re.search(r"Did you mean '([^']+)'(?:\?| or )", message)
    if found is None:
        allowed = re.search(r"Allowed: (.*)\.", message)
        return _rename_value(words, allowed[1].split(", ") if allowed else [])
    meant = found[1]
    pieces = [
        (place, piece)
        for place, word in enumerate(words)
        for piece in _list_pieces(word)
        if piece != meant and re.search(rf"(?<![\w.]){re.escape(piece)}(?![\w])", message)
    ]
    if not pieces:
        return []

    def measure(pair: tuple[int, str]) -> tuple[bool, float, bool, int]:
        place, piece = pair
        likeness = difflib.SequenceMatcher(None, piece, meant).ratio()
        is_whole = piece in (words[place], words[place].partition("=")[2])
        return repr(piece) in message, likeness, is_whole, -len(piece)

    place, piece = max(pieces, key=measure)
    changed = [*words]
    if re.match(r"--\w+=", meant):  # the suggestion is a complete argument
        changed[place] = meant
        return changed
    before, name, after = changed[place].partition(piece)
    changed[place : place + 1] = (
        [*meant.split(), *filter(None, [after])]
        if not before and name and " " in meant and not os.path.exists(meant)
        else [f"{before}{meant}{after}"]
    )
    run = re.match(r"'([^']+)' is the folder of a run", message)
    if run and words[0] == "train" and not any(w.startswith("--workdir") for w in words):
        changed.append(f"--workdir={run[1]}")  # otherwise the config's usual run would resume
    return changed


def _rename_value(words: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Returns the arguments with a value renamed for tftpu, such as bf16; [] if none needs it."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if value in VALUES and VALUES[value] in allowed:
            return [*words[:place], f"{name}{equals}{VALUES[value]}", *words[place + 1 :]]
    return []


def leave_fields_out(message: str) -> str:
    """Removes the advice on a config's fields from an error, for a command without a config."""
    return re.sub(r" In a config[:,].*?\.(?=\s|$)", "", message)


def suggest_folder(path: str) -> str:
    """Suggests the runs in a folder, or a folder with a similar name, for an error message.

    Args:
        path: the folder that is not a run.

    Returns:
        A sentence such as " Did you mean 'runs/pets'?"; "" for a path in a bucket, or if no run is
        in the folder or above it, and no folder beside it or in `runs` has a similar name.
    """
    if files.is_remote(path):
        return ""
    runs = list_runs(path)[:_RUNS]
    if len(runs) == 1:
        return f" Did you mean {runs[0]!r}?"
    if runs:
        return f" It holds the runs {', '.join(sorted(runs))}. Did you mean {runs[0]!r}?"
    here = pathlib.PurePath(path)  # possibly a checkpoint of a run, or a file in it
    above = [p.parent for p in (here, *here.parents) if p.name == "checkpoints"]
    if run := next((str(p) for p in above if os.path.exists(p / "config.json")), None):
        return f" Did you mean {run!r}?"
    around = dict.fromkeys([os.path.dirname(path.rstrip("/")) or ".", "runs"])
    found = {
        entry.name: os.path.normpath(entry.path)
        for folder in around
        if os.path.isdir(folder)
        for entry in os.scandir(folder)
        if entry.is_dir() and os.path.normpath(entry.path) != os.path.normpath(path)
    }
    near = find_nearest(os.path.basename(path.rstrip("/")), found)
    return f" Did you mean {found[near]!r}?" if near else ""


def expand_folders(paths: Sequence[str]) -> list[str]:
    """Replaces each folder of runs by the runs in it, for a command that takes several runs.

    A local path may also list runs separated by commas, unless a folder has that name.
    """
    found: list[str] = []
    for path in itertools.chain(*map(_separate, paths)):
        is_run = files.is_remote(path) or os.path.isfile(os.path.join(path, "goodput.json"))
        found += [path] if is_run else sorted(list_runs(path)) or [path]
    return found


def _separate(path: str) -> list[str]:
    parts = path.split(",")
    is_one = files.is_remote(path) or os.path.exists(path) or not all(parts)
    return [path] if is_one else parts


def list_runs(path: str) -> list[str]:
    """Returns the runs directly inside a local folder, the newest first."""
    if not os.path.isdir(path):
        return []
    times = {}
    for entry in os.scandir(path):
        account = os.path.join(entry.path, "goodput.json")
        if os.path.isfile(account):
            times[os.path.normpath(entry.path)] = os.path.getmtime(account)
    return sorted(times, key=lambda run: times[run], reverse=True)


def _list_pieces(word: str) -> Iterator[str]:
    """Yields the parts of an argument that may be misspelt: names, fields, and values."""
    flag, _, value = word.partition("=")
    name = flag.lstrip("-")
    yield flag
    yield name
    for mark in (":", "/"):
        yield from filter(None, (value or name).split(mark)) if mark in (value or name) else ()
    yield from filter(None, [os.path.splitext(value)[1]])
    yield from name.split(".") if "." in name and not name.endswith(".py") else ()
    if value:
        yield value
        yield from re.split("[,=]", value) if re.search("[,=]", value) else ()  # as in v5e=1,v6e=2
