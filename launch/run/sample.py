"""Text drawn from a trained byte model, and prompts for other language models."""

import itertools
import shlex
import weakref

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
        return f"--prompt={shlex.quote(find_prompt(data))}"
    if not isinstance(data, sources.Tokens) or trainer.hosts.count > 1:
        return ""
    try:
        _build_writer(trainer, data.context)
        known = data.tokenizer or has_byte_tokens(data)
    except UserError:  # the user's own model cannot write text
        return ""
    prompt = f"--prompt={shlex.quote(find_prompt(data))}"
    return prompt + ("" if known else " --tokenizer=tokenizer.json")


def find_prompt(data: DataConfig) -> str:
    """Returns the first words of a text that was trained on; others, if no file of texts is here.

    Args:
        data: the data of the run.
    """
    field = str(getattr(data, "prompt", "") or getattr(data, "field", ""))
    try:
        given = getattr(data, "train_text", "")  # of a class of one's own, anything
        pattern = given.split(",")[0] if isinstance(given, str) else ""
        path = next(iter(listing.find_matches(pattern)), "") if pattern else ""
        if not path or (files.find_size(path) or _LARGE) >= _LARGE:
            return _BEGINNING
        texts = text_files.read_texts(path, files.read(path), field)
        found = (" ".join(line.split()[:_WORDS]) for _, line in texts)
        *_, words = itertools.islice(filter(_is_prompt, found), 2)  # the first may be held out
    except (UserError, OSError, ValueError):
        return _BEGINNING
    return words


def _is_prompt(words: str) -> bool:
    """Returns whether words suit a command line, and are mostly letters: no rule, no table."""
    letters = sum(map(str.isalpha, words))
    return len(words) <= _LONG and words.isprintable() and 2 * letters > len(words)


# Keeps what is compiled for each executor, because every evaluation of a run draws a sample.
_WRITERS: weakref.WeakKeyDictionary[Executor, Writer] = weakref.WeakKeyDictionary()


def _build_writer(trainer: Trainer, context: int) -> Writer:
    executor = trainer.executor
    if executor not in _WRITERS:
        compiled = executor.compiled
        _WRITERS[executor] = Writer(trainer.model, context=context, compiled=compiled)
    return _WRITERS[executor]
