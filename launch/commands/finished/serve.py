"""Serves a model over HTTP: predictions, or texts of a language model.

The server understands requests in the form of Vertex AI, TensorFlow Serving, and OpenAI's
completions. Vertex AI's variables (AIP_HTTP_PORT, AIP_STORAGE_URI and others) are the defaults of
the flags. It runs on CPUs and GPUs.

    tftpu serve runs/digits_resnet --port=8080
    tftpu serve --model=digits.onnx
"""

import dataclasses
import os
import sys
import time
from typing import TYPE_CHECKING

from tftpu.errors import UserError
from tftpu.installation import command
from tftpu.launch.output import reporting
from tftpu.launch.run import finished, texts
from tftpu.launch.settings.options import TIME, flag
from tftpu.runtime import leaving
from tftpu.runtime.slow import report_activity
from tftpu.storage import files

if TYPE_CHECKING:
    from tftpu.inference.server.served import Served
    from tftpu.inference.server.text import Language

_PORT = 8080
_TOKENS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(texts.TextOptions, finished.FinishedRunOptions):
    """The model, the address, and the limits of a request."""

    workdir: str | None = flag(
        None, "folder of the run, or an export, local or gs://", metavar="RUN", word=True
    )
    model: str | None = flag(
        None, "ONNX file, or folder of a SavedModel", metavar="PATH", shown="AIP_STORAGE_URI"
    )
    host: str | None = flag(
        None, "address to listen at", metavar="HOST", shown="127.0.0.1; 0.0.0.0 on Vertex AI"
    )
    port: int | None = flag(
        None, "port; 0 takes a free one", metavar="PORT", minimum=0, shown="AIP_HTTP_PORT, or 8080"
    )
    allow_hosts: str | None = flag(
        None,
        "host names that requests may use, besides the server's own; * for any",
        metavar="NAME,...",
        shown="* on Vertex AI",
    )
    name: str | None = flag(
        None, "model name in URLs of TensorFlow Serving", metavar="NAME", shown="name of the run"
    )
    batch_size: int = flag(
        64, "largest number of examples or texts in a batch", minimum=1, aliases=("batch",)
    )
    waiting: int = flag(1024, "largest number of waiting examples or texts", minimum=1)
    timeout: float = flag(
        60.0,
        "how long a request may take",
        minimum=0.001,
        metavar=TIME,
        aliases=("timeout_s",),
    )
    body_mib: float = flag(16.0, "largest size of a request in MiB", minimum=0.001)
    tokens: int | None = flag(
        None, "largest number of tokens for a prompt", metavar="N", minimum=1, shown=str(_TOKENS)
    )


def run(options: Options) -> None:
    """Answers requests until the process is stopped."""
    start = time.monotonic()
    if options.workdir and options.model is None and finished.is_export(options.workdir):
        options = dataclasses.replace(options, workdir=None, model=options.workdir)
    path = options.model or (None if options.workdir else os.environ.get("AIP_STORAGE_URI") or None)
    if (path is None) == (options.workdir is None):
        both = ", not both" if path else ""
        raise UserError(f"Give a run, `tftpu serve runs/mine`, or an export, --model=PATH{both}.")
    if options.workdir is not None:
        finished.check_no_export(options.workdir)
        finished.check_exists(options.workdir)
    _check_text_flags(options, path)
    try:
        from tftpu.inference.server import example, origins
        from tftpu.inference.server import run as server
        from tftpu.inference.server.answering import Limits
        from tftpu.inference.server.app import About
        from tftpu.inference.server.text import Language
    except ImportError as error:
        raise UserError(f"Serving needs further packages: run `{command('serve')}`.") from error
    on_vertex = "AIP_HTTP_PORT" in os.environ
    if path is not None and not files.exists(path):
        raise UserError(f"There is no file or folder {path}.")
    host = options.host or ("0.0.0.0" if on_vertex else "127.0.0.1")
    at = server.bind_socket(host, _read_port() if options.port is None else options.port)
    source = (options.workdir or path or "").rstrip("/")
    name = os.path.basename(source if files.is_remote(source) else os.path.abspath(source))
    about = About(
        name=options.name or name.removesuffix(".onnx"),
        health=os.environ.get("AIP_HEALTH_ROUTE", "/health"),
        predict=os.environ.get("AIP_PREDICT_ROUTE", "/predict"),
        hosts=(*origins.list_own_hosts(host), *_list_allowed_hosts(options.allow_hosts, on_vertex)),
    )
    with reporting(f"Loading {source}"):
        model, step, prompt = _load_model(options, path)
    about = dataclasses.replace(about, version=max(step, 1))
    limits = Limits(
        batch=options.batch_size,
        waiting=options.waiting,
        body=int(options.body_mib * 2**20),
        seconds=options.timeout,
        tokens=options.tokens or _TOKENS,
    )
    loaded = time.monotonic()
    with reporting("Compiling and computing a first answer"):
        server.warm(model)
    compiled = time.monotonic()
    address = server.listen(at)

    route = "/v1/completions" if isinstance(model, Language) else about.predict

    def print_ready() -> None:
        print(f"{source} on the {model.device}: {address}{route}", flush=True)
        took = f"{compiled - start:.1f} s, {compiled - loaded:.1f} of them to compile"
        print(f"Ready after {took}. Ask it:", flush=True)
        print(example.build_curl(model, address, route, prompt), flush=True)
        print("Ctrl-C ends it.", flush=True)
        if isinstance(model, Language) and model.list_further_sizes(limits.batch):
            report_activity(
                "Compiling for longer texts and for several at once; until then these wait"
            )

    def report_compiled(count: int, seconds: float) -> None:
        print(
            f"Compiled for {count} further sizes in {seconds:.0f} s.", file=sys.stderr, flush=True
        )

    def report_stop() -> None:
        writes = isinstance(model, Language)
        seconds = server.GRACE_S - (server.FAREWELL_S if writes else 0)
        again = "their texts" if writes else "it at once"
        report_activity(
            f"Stopping: requests that have arrived are answered, for up to {seconds} s; "
            f"Ctrl-C again ends {again}"
        )

    server.serve(model, about, limits, at, print_ready, report_stop, report_compiled)
    print("Stopped.", flush=True)
    leaving.exit_at_once(0)  # a normal exit would wait for programs that still compile


def _list_allowed_hosts(hosts: str | None, on_vertex: bool) -> list[str]:
    """Returns the host names that are allowed besides the server's own; "*" allows all."""
    # Only Vertex AI itself reaches its containers, under host names that it chooses.
    if hosts is None:
        return ["*"] if on_vertex else []
    return [name.strip() for name in hosts.split(",") if name.strip()]


def _check_text_flags(options: Options, path: str | None) -> None:
    flags = "tokenizer", "stop", "tokens", "config"
    given = [f"--{name}" for name in flags if getattr(options, name) is not None]
    given += options.overrides
    if path is not None and given:
        raise UserError(
            f"{given[0]} works only with a run (--workdir), because an export answers with "
            "arrays: leave it out."
        )


def _read_port() -> int:
    text = os.environ.get("AIP_HTTP_PORT", str(_PORT))
    if not (text.isascii() and text.isdecimal()):
        raise UserError(f"AIP_HTTP_PORT={text} is not a port.")
    return int(text)


def _load_model(options: Options, path: str | None) -> "tuple[Served | Language, int, str]":
    if path is not None:
        from tftpu.inference.server import served

        return served.load(path), 1, ""
    from tftpu.launch.run import serving

    assert options.workdir is not None
    for_texts = serving.LanguageOptions(options.tokenizer, options.stop, options.tokens)
    return serving.restore_served_run(options.workdir, options, for_texts)
