"""Text drawn from a trained byte model, and prompts for other language models."""

import itertools
import re
import shlex
import weakref
from collections.abc import Iterable

from tftpu.config import DataConfig, Experiment
from tftpu.engines.engine import Executor
from tftpu.errors import UserError
from tftpu.inference.rows import Row
from tftpu.inference.sampling import Sampling
from tftpu.inference.writer import Writer
from tftpu.input_pipelines import sources
from tftpu.input_pipelines.formats import text_files
from tftpu.input_pipelines.reading import listing
from tftpu.launch.run.texts import ByteCodec, has_byte_tokens
from tftpu.storage import files
from tftpu.training.trainer import Trainer

PROMPT = "def "
_BEGINNING = "Once upon a time"
_WORDS, _LONG = 4, 60  # words of a prompt, and characters that are too many
_LONG_QUESTION = 160  # the same of a question, which is shown whole
_FIRST = 100  # texts that are looked at
_LARGE = 64 << 20  # bytes of a file that is not read for a prompt
# A temperature of 0.8 babbles less than 1 and repeats less than 0. Tokens beyond those of bytes are
# excluded: they have no meaning in a larger vocabulary.
_SAMPLING = Sampling(0.8, tokens=ByteCodec.size)


def draw_text(experiment: Experiment, trainer: Trainer, length: int = 240) -> str:
    """Draws a sample from a byte model, one byte at a time; returns "" for any other model.

    Several hosts would have to draw together, so no sample is drawn on several hosts. The first
    sample of a run compiles, which is said in a line.

    Args:
        experiment: the experiment of the trainer; its seed is the seed of the sample.
        trainer: trained or restored.
        length: the most bytes to draw after the prompt. Fewer fit into a small context: beyond
            it, further programs would be compiled.
    """
    if not isinstance(experiment.data, sources.Text) or trainer.hosts.count > 1:
        return ""
    prompt, written, seed = ByteCodec().encode(PROMPT), [], experiment.train.seed
    is_first = trainer.executor not in _WRITERS
    length = max(1, min(length, experiment.data.context - len(prompt)))
    try:
        writer = _build_writer(trainer, experiment.data.context)
        if is_first:
            print("Writing a sample of text, which compiles once.", flush=True)
        for [part] in writer.write([Row(prompt, length, _SAMPLING, seed)]):
            written += part
    except UserError:  # the user's own model cannot write text; it may be a classifier
        return ""
    return PROMPT + ByteCodec().build_decoder(prompt)(written)


def suggest_flags(experiment: Experiment, trainer: Trainer) -> str:
    """Returns flags with which `tftpu generate` continues texts of `Tokens`; "" for other models.

    On several hosts, no model is tried, so none is suggested.
    """
    data = experiment.data
    if hasattr(trainer.model, "generate_step"):  # a language model of KerasHub
        return _format_prompt(data)
    if not isinstance(data, sources.Tokens) or trainer.hosts.count > 1:
        return ""
    try:
        _build_writer(trainer, data.context)
        known = data.tokenizer or has_byte_tokens(data)
    except UserError:  # the user's own model cannot write text
        return ""
    prompt = _format_prompt(data)
    return prompt + ("" if known else " --tokenizer=tokenizer.json")


def _format_prompt(data: DataConfig) -> str:
    """Returns the flags for a prompt; of a question, they ask for the likeliest answer."""
    question, texts = find_question(data)
    if not question:
        return f"--prompt={shlex.quote(_choose_words(texts))}"
    quoted = shlex.quote(question)
    if "\n" in question:  # in a line of a shell
        escaped = question.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        quoted = f"$'{escaped}'"
    return f"--prompt={quoted} --temperature=0"


def find_prompt(data: DataConfig) -> str:
    """Returns a question, or the first words of a text, that was trained on.

    Args:
        data: the data of the run.

    Returns:
        See `find_question`; other words if no file of texts is here.
    """
    question, texts = find_question(data)
    return question or _choose_words(texts)


def _choose_words(texts: list[str]) -> str:
    """Returns the first words of a text; others if there is none that suits."""
    found = (" ".join(text.split()[:_WORDS]) for text in texts)
    return _choose(filter(_has_letters, found), _LONG) or _BEGINNING


def find_question(data: DataConfig) -> tuple[str, list[str]]:
    """Returns a question that was trained on, up to where its answer begins, and the first texts.

    Questions are those of `data.prompt`, or stand in each text before the same word with a colon,
    such as "Answer:".

    Args:
        data: the data of the run.

    Returns:
        "" if the texts answer no questions, or none of the first is short.
    """
    prompts = getattr(data, "prompt", "")
    texts = _read_texts(data, str(prompts or getattr(data, "field", "")))
    questions = texts if prompts else _cut_answers(texts)
    return _choose(questions, _LONG_QUESTION), texts


def _cut_answers(texts: list[str]) -> list[str]:
    """Returns what each text has up to the last word with a colon that is in all; [] if none is."""
    labels = [
        {match[1]: match.end(2) for match in re.finditer(r"\s(\S+:)(?=\s+\S)(\n?)", text)}
        for text in texts
    ]
    shared = set[str]().union(*labels).intersection(*labels)
    if len(texts) < 2 or not shared:
        return []
    return [text[: max(ends[label] for label in shared)] for text, ends in zip(texts, labels)]


def _read_texts(data: DataConfig, field: str) -> list[str]:
    """Returns the first texts that were trained on; [] if no file of texts is here."""
    try:
        given = getattr(data, "train_text", "")  # in a user's own class, anything
        pattern = given.split(",")[0] if isinstance(given, str) else ""
        path = next(iter(listing.find_matches(pattern)), "") if pattern else ""
        if not path or (files.find_size(path) or _LARGE) >= _LARGE:
            return []
        texts = text_files.read_texts(path, files.read(path), field)
        return list(itertools.islice((text for _, text in texts if text.strip()), _FIRST))
    except (UserError, OSError, ValueError):
        return []


def _choose(found: Iterable[str], most: int) -> str:
    """Returns the second prompt that suits a command line, as the first may be held out."""
    able = (one for one in found if len(one) <= most and one.replace("\n", "").isprintable())
    suited = list(itertools.islice(able, 2))
    return suited[-1] if suited else ""


def _has_letters(words: str) -> bool:
    """Returns whether words are mostly letters: no rule, no table."""
    return 2 * sum(map(str.isalpha, words)) > len(words)


# Keeps what is compiled for each executor, because every evaluation of a run draws a sample.
_WRITERS: weakref.WeakKeyDictionary[Executor, Writer] = weakref.WeakKeyDictionary()


def _build_writer(trainer: Trainer, context: int) -> Writer:
    executor = trainer.executor
    if executor not in _WRITERS:
        compiled = executor.compiled
        _WRITERS[executor] = Writer(trainer.model, context=context, compiled=compiled)
    return _WRITERS[executor]
