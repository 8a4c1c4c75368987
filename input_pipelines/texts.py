"""The data set of whole texts, for models with their own preprocessor; see `sources`."""

import collections
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from tftpu.config import DataConfig, DataContext
from tftpu.errors import UserError, did_you_mean
from tftpu.input_pipelines.formats import text_files
from tftpu.storage import files

if TYPE_CHECKING:
    import tensorflow as tf

    from tftpu.input_pipelines.reading.epochs import ArrayPipeline
    from tftpu.input_pipelines.tensors import Spec
    from tftpu.input_pipelines.unlabelled import UnlabelledRecords

_ONE_TEXT = "To predict a single text, give it instead of a file: --input='sentence:TEXT'."
_HELD_OUT = 20  # without `eval_text`, every 20th text is held out for evaluation


@dataclasses.dataclass
class Texts(DataConfig):
    """Whole texts, held in memory, for a KerasHub model, which tokenizes them itself.

    Each line of a text file is a text, and each record of a table (see `formats.text_files`).

    Args:
        train_text: patterns of files with commas between them, such as texts/*.txt; in Python also
            a list.
        eval_text: patterns of files to evaluate on; "": every twentieth text of `train_text`.
        field: the field or column of a table that holds the text.
        prompt: the field with the prompt that the text answers; "": there are none.
        label: the field with the class of the text; "": there are none.
        classes: the names of the classes by class id; (): the sorted labels of `train_text`.
    """

    train_text: str = ""
    eval_text: str = ""
    field: str = "text"
    prompt: str = ""
    label: str = ""
    classes: tuple[str, ...] = ()
    address_kinds: ClassVar = ("text", "sentence")

    def __post_init__(self):
        for name in ("train_text", "eval_text"):
            setattr(self, name, text_files.join_patterns(getattr(self, name)))

    def validate(self) -> None:
        super().validate()
        if not self.train_text:
            raise UserError(
                "data.train_text is empty: give patterns of files, such as texts/*.txt."
            )
        for name in ("train_text", "eval_text"):
            text_files.check_not_folders(getattr(self, name), f"data.{name}=")
        for name in ("name", "data_dir"):
            if getattr(self, name):
                raise UserError(
                    f"data.{name}={getattr(self, name)} does not work with Texts: give the paths "
                    "of the files as data.train_text."
                )
        if self.classes and not self.label:
            raise UserError("data.classes needs data.label: set it to the field with the classes.")
        twice = sorted({name for name in self.classes if self.classes.count(name) > 1})
        if twice:
            raise UserError(f"data.classes lists {twice[0]!r} twice: list each class once.")

    def training(self, context: DataContext) -> "ArrayPipeline":
        from tftpu.input_pipelines.reading.epochs import ArrayPipeline

        examples = self._build_examples(self._read_split("training"))
        size, seed = context.global_batch_size, context.seed
        return ArrayPipeline(
            examples, size, seed, lambda examples, seeds: examples, from_files=True
        )

    def evaluation(self, context: DataContext) -> "tf.data.Dataset":
        import tensorflow as tf

        rows = self._read_split("evaluation")
        if not self.eval_text:
            text = f"data.eval_text is empty: every {_HELD_OUT}th text of the training texts, "
            known = set(map(self._format_input, self._read_split("training")))
            same = sum(self._format_input(row) in known for row in rows)
            also = f"; {same:,} of them are also among the texts to train on" if same else ""
            print(f"{text}{len(rows):,} in all, is held out to evaluate on{also}", flush=True)
        examples = self._build_examples(rows)
        return tf.data.Dataset.from_tensor_slices(examples).batch(context.global_batch_size)

    def prediction(self, address: str, context: DataContext) -> "UnlabelledRecords":
        import numpy as np
        import tensorflow as tf

        from tftpu.input_pipelines import addresses, unlabelled

        kind, patterns = addresses.parse_address(address, type(self).__name__, self.address_kinds)
        alone = dataclasses.replace(self, prompt="", label="", classes=())
        if kind == "sentence":
            paths, rows = [patterns], [{self.field: patterns}]
        elif patterns:
            read = list(alone._read_with_paths(patterns))
            paths, rows = [path for path, _ in read], [row for _, row in read]
        else:
            rows = self._read_split(kind)
            paths = [kind] * len(rows)
        texts = [row[self.field] for row in rows]
        counts = collections.Counter[str]()
        places = []  # the number of each record in its file
        for path in paths:
            places.append(counts[path])
            counts[path] += 1
        held = tf.constant(texts)
        found = unlabelled.from_arrays(
            np.arange(len(texts), dtype=np.int32),
            context,
            patterns or address,
            {"text": np.array(texts, object)},
            finish=lambda numbers: tf.gather(held, numbers),
        )
        return dataclasses.replace(
            found,
            identity=hashlib.sha256(repr(texts).encode()).hexdigest(),
            places=lambda n: (paths[n.start : n.stop], places[n.start : n.stop]),
        )

    def check_patterns(self, patterns: str) -> None:
        """Raises `UserError` if the first pattern has no file, or the first record has no text."""
        next(dataclasses.replace(self, prompt="", label="", classes=())._read(patterns), None)

    def batch_spec(self, examples: int) -> "Spec":
        import tensorflow as tf

        text: Any = tf.TensorSpec((examples,), tf.string)
        x = {"prompts": text, "responses": text} if self.prompt else text
        return (x, tf.TensorSpec((examples,), tf.int32)) if self.label else x

    def class_names(self) -> list[str] | None:
        if not self.label:
            return None
        return list(self.classes) or sorted({str(r[self.label]) for r in self._read_all()})

    def _read_split(self, split: str) -> list[dict[str, Any]]:
        """Returns the records of a split, "training" or "evaluation"."""
        if split == "evaluation" and self.eval_text:
            return list(self._read(self.eval_text))
        rows = self._read_all()
        if self.eval_text:
            return rows
        held_out = rows[::_HELD_OUT]
        return (
            held_out
            if split == "evaluation"
            else [row for n, row in enumerate(rows) if n % _HELD_OUT]
        )

    def _format_input(self, row: dict[str, Any]) -> tuple[str, str]:
        return str(row.get(self.prompt)), str(row[self.field])

    def _read_all(self) -> list[dict[str, Any]]:
        return list(self._read(self.train_text))

    def _read(self, patterns: str) -> Iterator[dict[str, Any]]:
        """Yields the records of the files that match patterns; see `_read_with_paths`."""
        return (row for _, row in self._read_with_paths(patterns))

    def _read_with_paths(self, patterns: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (path of the file, record) for the files that match patterns, each file once.

        Raises:
            UserError: a pattern matches no file, or a record lacks a field or has a wrong value.
        """
        from tftpu.input_pipelines.reading import listing

        if self.field != type(self).field and patterns == self.train_text:
            self._check_field(patterns)
        known: set[str] = set()
        for pattern in filter(None, patterns.split(",")):
            paths = listing.find_matches(pattern)
            if not paths:
                place = "" if files.is_remote(pattern) else f" in {os.getcwd()}"
                named = [n for n in ("train_text", "eval_text") if getattr(self, n) == patterns]
                other = f"In a config: --config.data.{named[0]}=PATTERN." if named else _ONE_TEXT
                raise UserError(
                    f"There is no file {pattern!r}{place}: give the paths of texts or tables."
                    f"{files.suggest_existing(pattern)} {other}"
                )
            for path in listing.select_new(paths, known):
                for place, row in self._read_file(path):
                    for name in filter(None, (self.field, self.prompt, self.label)):
                        if row.get(name) is None:
                            raise UserError(
                                f"{place} has no field {name!r}.{did_you_mean(name, row)}"
                            )
                    for name in filter(None, (self.field, self.prompt)):
                        text_files.check_text(row[name], name, place)
                    if self.label and isinstance(row[self.label], list | dict):
                        raise UserError(
                            f"{place}: the field {self.label!r} is {str(row[self.label])[:80]}, "
                            "not a class: give a name or a number."
                        )
                    if self.label:  # spaces around a name do not belong to it
                        row = {**row, self.label: str(row[self.label]).strip()}
                        if not row[self.label]:
                            raise UserError(
                                f"{place} has no {self.label!r}: it is blank. Give it a class, or "
                                "leave the record out."
                            )
                    yield path, row

    def _check_field(self, patterns: str) -> None:
        """Raises `UserError` if files match the patterns and all are plain text, without fields."""
        from tftpu.input_pipelines.reading import listing

        found = [path for p in patterns.split(",") if p for path in listing.find_matches(p)]
        if found and not any(map(text_files.is_table, found)):
            raise UserError(
                f"data.field={self.field!r} names a field of a table, but {found[0]} is plain "
                "text, with a text on each line: leave data.field out."
            )

    def _read_file(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if text_files.find_suffix(path) in text_files.TABLES:
            yield from text_files.read_rows(path)
            return
        for place, line in text_files.read_texts(path, files.read(path), self.field):
            if line.strip():
                yield place, {self.field: line}

    def _build_examples(self, rows: list[dict[str, Any]]) -> Any:
        """Returns arrays of the texts and, with `label`, of their class ids, int32.

        Raises:
            UserError: there are no texts, or a class is unknown.
        """
        import numpy as np

        if not rows:
            raise UserError(f"There are no texts in {self.train_text!r}.")
        x: Any = np.array([str(row[self.field]) for row in rows], object)
        if self.prompt:
            x = {
                "prompts": np.array([str(row[self.prompt]) for row in rows], object),
                "responses": x,
            }
        names = self.class_names()
        if names is None:
            return x
        ids = {name: number for number, name in enumerate(names)}
        unknown = sorted({str(row[self.label]) for row in rows} - set(ids))
        if unknown:
            raise UserError(f"There is no class {unknown[0]!r}.{did_you_mean(unknown[0], names)}")
        return x, np.array([ids[str(row[self.label])] for row in rows], np.int32)
