"""Reads reports that `Report.to_json` wrote."""

import dataclasses
import json
from typing import Any, Union

from tftpu.config import FieldType, read_fields, read_type
from tftpu.errors import UserError
from tftpu.preflight.report import Report
from tftpu.storage import side_files
from tftpu.tpu.slices import parse_slice
from tftpu.version import __version__

_SMALLEST, _LARGEST = 1e-15, 1e24  # other numbers, except 0, mean that a report is damaged


def read_report(path: str) -> Report:
    """Reads a report of this version of tftpu.

    Args:
        path: the path of the file, local or remote.

    Raises:
        UserError: there is no such file, it cannot be read, is damaged or is not a report, or
            another version of tftpu wrote it.
    """
    if not side_files.is_there(path):
        raise UserError(f"There is no report {path}.")
    try:
        record = json.loads(side_files.read_content(path).decode())
        json.dumps(record, ensure_ascii=False).encode()  # raises for text that is not valid Unicode
    except OSError as error:
        raise UserError(f"The report {path} cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a report of tftpu preflight: {error}.") from error
    if not isinstance(record, dict) or "slices" not in record:
        raise UserError(
            f"{path} is not a report of tftpu preflight: give a preflight.json that it wrote."
        )
    version = record.get("version", "")
    if version != __version__:
        found = f"tftpu {version}" if version else "an earlier version of tftpu"
        raise UserError(
            f"{path} was written by {found}, but this is {__version__}, whose predictions may "
            "differ. Run tftpu preflight again for that config."
        )
    record.setdefault("settings", "")  # an older report has none
    try:
        report: Report = _build_value(read_type(Report), record, "the report")
        if not report.global_batch_size:
            raise ValueError("the report has no examples.")
        for item in report.slices:
            parse_slice(item.slice)
            if item.fits and not item.hbm_limit_bytes:
                raise ValueError(f"{item.slice} has no memory.")
    except (ValueError, UserError) as error:
        raise UserError(f"{path} is damaged: {error} Run tftpu preflight again.") from error
    return report


def _build_value(kind: FieldType, value: Any, where: str) -> Any:
    """Converts a JSON value to its declared type; raises ValueError if it does not match.

    Args:
        kind: the declared type: a plain type, a dataclass, a list or dictionary of such values, or
            a union of one of these with None.
        value: the JSON value.
        where: the path of the value in the report, for the error message.
    """
    if kind.container is Union:
        if value is None:
            return None
        kind = next(part for part in kind.parts if part.declared is not type(None))
        return _build_value(kind, value, where)
    if kind.container is list and isinstance(value, list):
        inner = kind.parts[0]
        return [_build_value(inner, item, f"{where}[{n}]") for n, item in enumerate(value)]
    if kind.container is dict and isinstance(value, dict):
        inner = kind.parts[1]
        return {name: _build_value(inner, v, f"{where}.{name}") for name, v in value.items()}
    if kind.is_dataclass and isinstance(value, dict):
        return _build_instance(kind.declared, value, where)
    # JSON keeps the exact type of a value, except that a float may be written as an integer.
    known = (float, int) if kind.declared is float else (kind.declared,)
    if type(value) not in known or kind.container is not None:
        raise ValueError(f"{where} cannot be {str(value)[:40]!r}.")
    if isinstance(value, int | float) and value and not _SMALLEST < value < _LARGEST:
        raise ValueError(f"{where} cannot be {str(value)[:40]}.")
    return value


def _build_instance(kind: Any, value: dict[str, Any], where: str) -> Any:
    declared = read_fields(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    for name in {*names} ^ {*value}:
        state = "does not have" if name in names else "has an unknown"
        raise ValueError(f"{where} {state} {name!r}.")
    return kind(**{n: _build_value(declared[n], value[n], f"{where}.{n}") for n in names})
