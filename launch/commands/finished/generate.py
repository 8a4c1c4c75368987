"""Continues texts with a trained language model.

Each prompt is read once, and its keys and values are kept, so that a new token costs one pass over
one token. --temperature=0 always takes the most likely token.

    tftpu generate runs/python_gpt --prompt=import
    tftpu generate runs/python_gpt --input=prompts.txt --tokens=50
"""

import dataclasses
import io
import itertools
import json
import sys
import unicodedata
from typing import TYPE_CHECKING, Any

from tftpu.config import DataConfig
from tftpu.engines import selection
from tftpu.errors import NotFiniteError, UserError, counted
from tftpu.input_pipelines.formats import text_files
from tftpu.launch import output
from tftpu.launch.run import finished, texts
from tftpu.launch.settings.options import DeviceOptions, flag, required
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.inference.rows import Row
    from tftpu.inference.writer import Writer

_TOGETHER = 32  # number of prompts from a file that are continued in one batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(texts.TextOptions, DeviceOptions, finished.FinishedRunOptions):
    """The run, the prompts, and how tokens are sampled."""

    workdir: str = required("RUN", "folder of the run, such as runs/python_gpt", word=True)
    prompt: str | None = flag(None, "text to continue", metavar="TEXT")
    input: str | None = flag(
        None,
        "file with a prompt on each line, or a table (.jsonl, .csv) with the field prompt or the "
        "prompt field of the run's data; prints JSON lines",
        metavar="FILE",
    )
    tokens: int = flag(200, "tokens to write", minimum=1, aliases=("length", "max_tokens"))
    temperature: float = flag(
        0.8, "divisor of the logits; 0 takes the most likely token", minimum=0
    )
    top_k: int = flag(0, "sample from the K likeliest tokens; 0: from all", metavar="K", minimum=0)
    top_p: float = flag(
        1.0, "sample from the fewest tokens whose probabilities add up to this", minimum=0
    )
    base: bool = flag(False, "of a run with adapters: write without them")
    seed: int = flag(0, "seed of the sampling", minimum=0)


def run(options: Options) -> None:
    """Prints the continuations that the model of the best checkpoint generates."""
    content = _read_input(options)
    shown = options.prompt is not None and sys.stdout.isatty()
    with output.reporting(f"Loading {options.workdir}"):
        options.split_cpu(options.config)
        experiment = finished.load_experiment(options.workdir, options)
        prompts = _list_prompts(options, content, experiment.data)
        options.set_cluster(experiment.cluster)
        experiment.cluster.validate()
        selection.choose_backend(experiment.cluster)  # before KerasHub's tokenizer loads Keras
        codec = texts.choose_codec(experiment, options.tokenizer)
        tokens = [codec.encode(prompt) for prompt in prompts]
        for prompt, row in zip(prompts, tokens):
            if not row:
                raise UserError(f"The tokenizer finds no token in the prompt {prompt!r}.")
        if options.base:
            finished.check_adapters(experiment, options.workdir)
        trainer, _, _ = finished.restore_without_data(experiment, options.workdir)
        stop = texts.find_stop_tokens(experiment.data, codec, options.stop, trainer.model)
        from tftpu import models
        from tftpu.inference.generate import open_writer
        from tftpu.inference.rows import build_rows
        from tftpu.inference.sampling import Sampling

        sampling = Sampling(options.temperature, options.top_k, options.top_p, codec.size)
        context = getattr(experiment.data, "context", None)
        compiled = trainer.executor.compiled
        if options.base:
            models.switch_adapters_off(trainer.model)
            # The trainer's programs use averaged weights, which would bring the adapters back.
            compiled = None
        writer = open_writer(trainer.model, stop, context, compiled)
        writer.check(tokens, options.tokens)
        rows = build_rows(tokens, options.tokens, sampling, options.seed)
    if shown and context and len(tokens[0]) + options.tokens > context:
        print(
            f"The text pauses where the context of {context} tokens is full: the model then reads "
            "its last half again, which compiles once more.",
            file=sys.stderr,
            flush=True,
        )
    if options.prompt is None:
        with output.reporting("Compiling and writing"):
            _print_lines(writer, codec, prompts, rows)
    else:
        _stream(writer, codec, prompts[0], rows[0])


def _read_input(options: Options) -> bytes:
    """Checks --prompt and --input; returns the content of the input file, or b"" for --prompt."""
    if (options.prompt is None) == (options.input is None):
        raise UserError("Give either --prompt=TEXT or --input=FILE, with a prompt on each line.")
    if options.prompt == "":
        raise UserError(
            "--prompt is empty, and has no token to continue: give a text, such as --prompt=The."
        )
    if options.input is None:
        prompt = options.prompt or ""
        if "\\n" in prompt and "\n" not in prompt:
            print(
                "The prompt holds a backslash and an n, which no shell turns into a new line: "
                "write $'...' for '...' if a new line is meant.",
                file=sys.stderr,
                flush=True,
            )
        return b""
    try:
        return files.read(options.input)
    except OSError as error:
        reason = error.strerror or error
        near = "" if files.exists(options.input) else files.suggest_existing(options.input)
        raise UserError(f"--input={options.input} cannot be read: {reason}.{near}") from error


def _list_prompts(options: Options, content: bytes, data: DataConfig) -> list[str]:
    """Returns the prompts; in a table, they are the field "prompt" or the data's prompt field."""
    if options.input is None:
        return [options.prompt or ""]
    own = str(getattr(data, "prompt", None) or "")
    advice = "Rename the field that holds the prompt, or give a text file with one prompt per line."
    found = list(text_files.read_texts(options.input, content, "prompt", advice, own))
    for place, prompt in found:
        if not prompt:
            raise UserError(f"--input: {place} holds no prompt.")
    if not found:
        raise UserError(f"--input={options.input} holds no prompt.")
    return [prompt for _, prompt in found]


def _stream(writer: "Writer", codec: texts.Codec, prompt: str, row: "Row") -> None:
    decode = codec.build_decoder(row.prompt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Replaces characters that the terminal cannot show.
        sys.stdout.reconfigure(errors="replace")
    parts = writer.write([row])
    with output.reporting("Compiling"):
        begin = list(itertools.islice(parts, 1))
    print(prompt, end="", flush=True)
    count = 0
    try:
        for [part] in itertools.chain(begin, parts):
            count += len(part)
            text = decode(part)
            shown = replace_control_characters(text) if sys.stdout.isatty() else text
            print(shown, end="", flush=True)
            if output.is_reader_gone():
                return
    finally:
        print(flush=True)
    by_token = f"by its end token after {counted(count, 'token')}"
    ended = f"at --tokens={count}" if count == row.length else by_token
    print(f"The text ended {ended}.", file=sys.stderr, flush=True)


def replace_control_characters(text: str) -> str:
    """Replaces characters that control a terminal, which a model may write, with U+FFFD."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)


def _print_lines(
    writer: "Writer", codec: texts.Codec, prompts: list[str], rows: "list[Row]"
) -> None:
    failure: NotFiniteError | None = None
    for first in range(0, len(prompts), _TOGETHER):
        part, failed = slice(first, first + _TOGETHER), ()
        written: list[list[int]] = [[] for _ in prompts[part]]
        try:
            for parts in writer.write(rows[part]):
                for tokens, more in zip(written, parts):
                    tokens += more
        except NotFiniteError as error:
            failure, failed = error, error.rows
        for place, (prompt, row, tokens) in enumerate(zip(prompts[part], rows[part], written)):
            text = codec.build_decoder(row.prompt)(tokens)
            line = {"prompt": prompt, "text": text, "tokens": len(tokens)}
            if place in failed:
                line["error"] = str(failure)
            print(_as_json(line), flush=True)
        if output.is_reader_gone():
            return
    if failure:
        raise failure


def _as_json(line: dict[str, Any]) -> str:
    """Returns a line of JSON, in ASCII if standard output cannot show all its characters."""
    found = json.dumps(line, ensure_ascii=False)
    try:
        found.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return json.dumps(line)
    return found
