"""Text sampled from a trained byte model, and prompts for other language models."""

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
_WORDS, _LONG = 4, 60  # number of words of a prompt, and its maximum number of characters
_LONG_QUESTION = 160  # largest number of characters of a question that is used as a prompt
_FIRST = 100  # number of training texts that are searched for a prompt
_LARGE = 64 << 20  # bytes; a file of this size or more is not searched for a prompt
# A temperature of 0.8 babbles less than 1 and repeats less than 0. If a model has more tokens than
# the 256 bytes, the others are excluded, because they stand for no text.
_SAMPLING = Sampling(0.8, tokens=ByteCodec.size)


def draw_text(experiment: Experiment, trainer: Trainer, length: int = 240) -> str:
    """Draws a sample from a byte model, one byte at a time; returns "" for any other model.

    Also returns "" on several hosts, because all of them would have to take part. The first sample
    of a run compiles a program; a line is printed before that.

    Args:
        experiment: the experiment of the trainer; its seed is the seed of the sample.
        trainer: a trained or restored trainer.
        length: the largest number of bytes after the prompt. The context also limits it, because
            further programs would be compiled for longer texts.
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
    """Returns example flags of `tftpu generate` for a trained model; "" if none are known.

    They are known for language models of KerasHub and, on one host, for data of class `Tokens`.
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
    """Returns the flags for a prompt; for a question, with a temperature of 0."""
    question, texts = find_question(data)
    if not question:
        return f"--prompt={shlex.quote(_choose_words(texts))}"
    quoted = shlex.quote(question)
    if "\n" in question:  # `$'…'` keeps the command on one line of a shell
        escaped = question.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        quoted = f"$'{escaped}'"
    return f"--prompt={quoted} --temperature=0"


def find_prompt(data: DataConfig) -> str:
    """Returns a prompt from the training texts: a question, or the first words of a text.

    Args:
        data: the data of the run.

    Returns:
        The prompt; a default beginning if this machine has no suitable text.
    """
    question, texts = find_question(data)
    return question or _choose_words(texts)


def _choose_words(texts: list[str]) -> str:
    """Returns the first words of a text, if short and mostly letters; or a default beginning."""
    found = (" ".join(text.split()[:_WORDS]) for text in texts)
    return _choose(filter(_has_letters, found), _LONG) or _BEGINNING


def find_question(data: DataConfig) -> tuple[str, list[str]]:
    """Returns a short question of the first training texts, without its answer, and these texts.

    A question is the field that `data.prompt` names, or the part of a text up to a label that all
    texts contain, such as "Answer:".

    Args:
        data: the data of the run.

    Returns:
        The question, "" if there is none; and the texts.
    """
    prompts = getattr(data, "prompt", "")
    texts = _read_texts(data, str(prompts or getattr(data, "field", "")))
    questions = texts if prompts else _cut_answers(texts)
    return _choose(questions, _LONG_QUESTION), texts


def _cut_answers(texts: list[str]) -> list[str]:
    """Returns each text up to the last label ("Answer:") that all texts have; [] without any."""
    labels = [
        {match[1]: match.end(2) for match in re.finditer(r"\s(\S+:)(?=\s+\S)(\n?)", text)}
        for text in texts
    ]
    shared = set[str]().union(*labels).intersection(*labels)
    if len(texts) < 2 or not shared:
        return []
    return [text[: max(ends[label] for label in shared)] for text, ends in zip(texts, labels)]


def _read_texts(data: DataConfig, field: str) -> list[str]:
    """Returns the first training texts; [] if this machine has no readable file of them."""
    try:
        given = getattr(data, "train_text", "")  # of any type in a user's own class
        pattern = given.split(",")[0] if isinstance(given, str) else ""
        path = next(iter(listing.find_matches(pattern)), "") if pattern else ""
        if not path or (files.find_size(path) or _LARGE) >= _LARGE:
            return []
        texts = text_files.read_texts(path, files.read(path), field)
        return list(itertools.islice((text for _, text in texts if text.strip()), _FIRST))
    except (UserError, OSError, ValueError):
        return []


def _choose(found: Iterable[str], most: int) -> str:
    """Returns the second of the short printable texts, or the only one; "" if there is none."""
    able = (one for one in found if len(one) <= most and one.replace("\n", "").isprintable())
    # Without `eval_text`, the first text is held out for evaluation.
    suited = list(itertools.islice(able, 2))
    return suited[-1] if suited else ""


def _has_letters(words: str) -> bool:
    """Returns whether a text is mostly letters, unlike a horizontal rule or a table."""
    return 2 * sum(map(str.isalpha, words)) > len(words)


# Writers with compiled programs, by executor, because each evaluation of a run draws a sample.
_WRITERS: weakref.WeakKeyDictionary[Executor, Writer] = weakref.WeakKeyDictionary()


def _build_writer(trainer: Trainer, context: int) -> Writer:
    executor = trainer.executor
    if executor not in _WRITERS:
        compiled = executor.compiled
        _WRITERS[executor] = Writer(trainer.model, context=context, compiled=compiled)
    return _WRITERS[executor]
