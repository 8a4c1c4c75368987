"""A request that the server answers, as a line for the shell."""

import json
import math
import shlex
from collections.abc import Sequence

import numpy as np

from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server.payloads import SENTENCE
from tftpu.inference.server.served import Served
from tftpu.inference.server.text import Language

_FEW = 20  # most values that a command contains
_TEXT = "so good"


def build_curl(model: Served | Language, address: str, route: str, prompt: str = "") -> str:
    """Returns a curl command that requests a text, or a prediction for a text or for zeros.

    Args:
        model: the model that is served.
        address: the address of the server, such as "http://127.0.0.1:8080".
        route: the route of the POST request.
        prompt: the prompt for a language model.
    """
    call = f"curl {address}{route} -H 'Content-Type: application/json'"
    if isinstance(model, Language):
        request = json.dumps(_build_text_request(route, prompt), ensure_ascii=False)
        return f"{call} -d {shlex.quote(request)}"
    if model.encode is not None:
        return f"{call} -d '{json.dumps({'instances': [{SENTENCE: _TEXT}]})}'"
    if sum(math.prod(given.shape) for given in model.inputs) <= _FEW:
        zeros = [json.dumps(np.zeros(given.shape, given.dtype).tolist()) for given in model.inputs]
        return f"{call} -d '{_write_instances(model.inputs, zeros)}'"
    body = _write_instances(model.inputs, [_write_zeros(given) for given in model.inputs])
    # Only the beginning of the answer is shown, because it may be long. The rest is read, because
    # curl would complain otherwise.
    shown = "(head -c 300; cat >/dev/null)"
    return f"python3 -c 'import json; print(json.dumps({body}))' | {call} -sS -d @- | {shown}"


def _build_text_request(route: str, prompt: str = "") -> dict[str, object]:
    parameters = {"max_tokens": 32, "temperature": 0}  # small models write nonsense if sampled
    if route.endswith("/completions"):
        return {"prompt": prompt, **parameters}
    return {"instances": [{"prompt": prompt}], "parameters": parameters}


def _write_instances(inputs: Sequence[Input], values: Sequence[str]) -> str:
    """Returns a request with one example, given its values as JSON or Python code."""
    named = (f"{json.dumps(given.name)}: {value}" for given, value in zip(inputs, values))
    example = values[0] if len(values) == 1 else "{" + ", ".join(named) + "}"
    return '{"instances": [' + example + "]}"


def _write_zeros(given: Input) -> str:
    """Returns an example of zeros in Python, such as "[[0]*28]*28"."""
    zero = "False" if given.dtype == "bool" else "0"
    return "[" * len(given.shape) + zero + "".join(f"]*{size}" for size in given.shape[::-1])
