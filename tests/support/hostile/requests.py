"""HTTP requests that were made to harm a server."""

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

_JSON = "Content-Type: application/json"


def drawn(number: int, path: str) -> bytes:
    """Returns the bytes of a request, always the same for a number.

    Args:
        number: that decides.
        path: that most are sent to.
    """
    rng = random.Random(number)
    return rng.choice(_KINDS)(rng, path)


def _post(path: str, body: bytes, **headers: str) -> bytes:
    length = {"Content-Length": str(len(body))}
    lines = [f"{name}: {value}" for name, value in {**length, **headers}.items()]
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", _JSON, *lines]
    return "\r\n".join([*head, "", ""]).encode() + body


def _garbage(rng: random.Random, path: str) -> bytes:
    return rng.randbytes(rng.randrange(1, 4000)) + b"\r\n\r\n"


def _bad_json(rng: random.Random, path: str) -> bytes:
    body = bytearray(json.dumps({"instances": [[1, 2]], "prompt": "a"}).encode())
    for _ in range(rng.randrange(1, 5)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return _post(path, bytes(body[: rng.randrange(1, len(body) + 1)]))


def _deep(rng: random.Random, path: str) -> bytes:
    depth = rng.randrange(100, 100_000)
    field = rng.choice(['"instances"', '"inputs"', '"prompt"', '"parameters"'])
    opened = rng.choice(["[", '{"a":'])
    closed = {"[": "]"}.get(opened, "}") * depth if rng.random() < 0.5 else ""
    inside = "1" if closed else ""
    return _post(path, ("{" + field + ":" + opened * depth + inside + closed + "}").encode())


def _wrong_type(rng: random.Random, path: str) -> bytes:
    fields = [*("instances", "inputs", "prompt", "parameters", "signature_name", "stream")]
    fields += ["temperature", "top_k", "top_p", "max_tokens", "seed", "model", "\ud800", ""]
    chosen = rng.sample(fields, rng.randrange(1, 4))
    return _post(path, json.dumps({name: _value(rng, 0) for name in chosen}).encode())


def _value(rng: random.Random, depth: int) -> Any:
    numbers = [0, -1, 256, 2**31, 2**63, 2**64, -(2**70), 10**400, 1e308, -0.0, 0.5, 1e-320]
    plain = [*numbers, None, True, "", "a", "\0", "💥" * 50, [], {}, {"b64": 1}, {"b64": "="}]
    if depth > 3 or rng.random() < 0.5:
        return rng.choice(plain)
    inside = [_value(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    return inside if rng.random() < 0.7 else {str(n): value for n, value in enumerate(inside)}


def _long_texts(rng: random.Random, path: str) -> bytes:
    """A text among many short ones: an array of NumPy would have its length for each."""
    values = ["a" * rng.randrange(200_000, 900_000), *["b"] * rng.randrange(100, 1000)]
    rng.shuffle(values)
    nested = [values, [[value] for value in values], {"images": values}]
    field = rng.choice(["instances", "inputs"])
    return _post(path, json.dumps({field: rng.choice(nested)}).encode())


def _numbers(rng: random.Random, path: str) -> bytes:
    text = rng.choice(["NaN", "Infinity", "1e999", "-1e999", "1" * 5000, "0x10", "01", "1.", "+1"])
    shape = rng.choice(
        ['{"instances":[%s]}', '{"inputs":[[%s]]}', '{"prompt":"a","temperature":%s}']
    )
    return _post(path, (shape % text).encode())


def _many(rng: random.Random, path: str) -> bytes:
    value = rng.choice(['"a"', "1", "[1]", "null", '{"b64":"AAAA"}'])
    field = rng.choice(["instances", "inputs", "prompt"])
    count = rng.randrange(1000, 60_000)
    return _post(path, f'{{"{field}":[{",".join([value] * count)}]}}'.encode())


def _image(rng: random.Random, path: str) -> bytes:
    """An image file that is damaged, or states a size of many gigabytes."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (4, 6)).save(file, rng.choice(["PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF"]))
    data = bytearray(file.getvalue())
    if data[1:4] == b"PNG" and rng.random() < 0.7:
        header = data[12:16] + struct.pack(">II", rng.choice([4, 60_000, 2**31 - 1]), 60_000)
        header += data[24:29]
        data[12:33] = header + struct.pack(">I", zlib.crc32(header))
    else:
        for _ in range(rng.randrange(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    encoded = base64.b64encode(data).decode()
    return _post(path, json.dumps({"instances": [{"b64": encoded}]}).encode())


def _wrong_length(rng: random.Random, path: str) -> bytes:
    length = rng.choice(["-1", "a", "10000000000000", "1e3", "5, 6", "", "30"])
    return _post(path, b'{"instances":[1]}', **{"Content-Length": length})


def _chunks(rng: random.Random, path: str) -> bytes:
    lines = ["Host: localhost", _JSON, "Transfer-Encoding: chunked"]
    head = "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()
    size = rng.choice([b"ffffffffffffffff", b"-1", b"zz", b"3", b"0"])
    return head + size + b"\r\n" + rng.choice([b"abc\r\n", b"", b'{"a":1}\r\n0\r\n\r\n'])


def _headers(rng: random.Random, path: str) -> bytes:
    kind = rng.randrange(3)
    if kind == 0:
        many = {f"X-{n}": "a" * 100 for n in range(rng.randrange(100, 2000))}
        return _post(path, b"{}", **many)
    if kind == 1:
        return _post(path, b"{}", **{"X-Long": "b" * 200_000})
    return _post(path, b"{}", **{"Content-Type": "\t\x01", "Expect": "100-continue"})


def _addresses(rng: random.Random, path: str) -> bytes:
    method = rng.choice(["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "FOO"])
    odd = ["/../../etc/passwd", "/%00", "/" + "a" * 5000, "//", "/v1/models/m:predict/..", "*"]
    target = rng.choice([*odd, path, path + "?" + "a=1&" * 500])
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


_KINDS: list[Callable[[random.Random, str], bytes]] = [
    *(_garbage, _bad_json, _deep, _wrong_type, _wrong_type, _numbers, _many, _image, _wrong_length),
    *(_chunks, _headers, _addresses, _long_texts),
]
