"""Formats numbers, times, sizes and prices for people, in units that fit; reads times."""

import re

_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_PERIODS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LONGER = {"sec": "s", "min": "m", "hour": "h", "hours": "h", "day": "d", "days": "d"}
_DAYS = ((86_400.0, "d"),)  # the unit of times of two days or more

Units = tuple[tuple[float, str], ...]  # (scale, name), the largest first


def format_metric(value: float) -> str:
    """Formats a number with four significant digits, or as a whole number from 1,000 up."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_number(value: float) -> str:
    """Formats a number with three significant digits: "0.108", "1,180,000" or "<0.001"."""
    if 0 < abs(value) < 0.001:
        return "<0.001"
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e" in text else text


def format_duration(seconds: float) -> str:
    """Formats a time as "108 us", "12.3 ms", "45 s", "12.5 min", "3.81 h" or "2.5 d"."""
    return _format_in_unit(seconds, _choose_unit(seconds, _choose_times(seconds)))


def format_duration_range(low: float, high: float) -> str:
    """Formats a range of times in one unit: "92.2-125 us"."""
    unit = _choose_unit(high, _choose_times(high))
    return f"{format_number(low / unit[0])}-{_format_in_unit(high, unit)}"


def parse_period(text: str) -> float:
    """Parses a duration such as "30s", "5m", "2h", "7d" or "45" (seconds); returns the seconds.

    Raises:
        ValueError: the text is not a duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([a-z]*)", text.strip())
    unit = _LONGER.get(match[2], match[2] or "s") if match else ""
    if match is None or unit not in _PERIODS:
        raise ValueError(f"{text!r} is not a time")
    return float(match[1]) * _PERIODS[unit]


def format_period(seconds: float) -> str:
    """Formats a duration for `parse_period`, in the largest unit that divides it: "90m"."""
    unit = next((u for u in "dhm" if seconds and seconds % _PERIODS[u] == 0), "s")
    # Not ":g": `parse_period` reads no exponents.
    return f"{seconds / _PERIODS[unit]:.9f}".rstrip("0").rstrip(".") + unit


def format_clock(seconds: float) -> str:
    """Formats a time as a clock shows it: "0:07", "12:05", "3:20:00", "2 d 03:10"."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}"
    if hours:
        return f"{hours}:{minutes:02}:{whole_seconds:02}"
    return f"{minutes}:{whole_seconds:02}"


def format_size(count: float) -> str:
    """Formats a number of bytes with a binary prefix: "9.8 MiB"."""
    return _format_in_unit(count, _choose_unit(count, SIZES))


def format_quantity(count: float, unit: str) -> str:
    """Formats a count with an SI prefix: "131 Mcycles" for 131e6 and "cycles"."""
    scale, prefix = _choose_unit(count, _COUNTS)
    return _format_in_unit(count, (scale, prefix + unit))


def format_price(usd: float) -> str:
    """Formats a price: "14.4 cents", "$30.41" or "$12,346"."""
    if usd >= 1000:
        return f"${usd:,.0f}"
    if usd >= 0.9995:
        return f"${usd:.2f}"
    cents = format_number(100 * usd)
    return f"{cents} cent" if cents == "1" else f"{cents} cents"


def format_energy(kwh: float) -> str:
    """Formats an energy in kWh: "23.9 mWh", "450 Wh" or "3.35 kWh"."""
    return _format_in_unit(
        kwh, _choose_unit(kwh, ((1e3, "MWh"), (1.0, "kWh"), (1e-3, "Wh"), (1e-6, "mWh")))
    )


def _choose_times(seconds: float) -> Units:
    return (*_DAYS, *_TIMES) if seconds >= 2 * _DAYS[0][0] else _TIMES


def _choose_unit(value: float, units: Units) -> tuple[float, str]:
    """Returns the largest unit in which the value rounds to 1 or more, or the smallest unit."""
    return next((u for u in units if abs(float(f"{value / u[0]:.3g}")) >= 1), units[-1])


def _format_in_unit(value: float, unit: tuple[float, str]) -> str:
    return f"{format_number(value / unit[0])} {unit[1]}"
