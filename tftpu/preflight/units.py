"""Formats times, sizes and prices for people, in units that fit."""

_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
SIZES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_DAYS = ((86_400.0, "d"),)  # from two days on

Units = tuple[tuple[float, str], ...]  # (scale, name), the largest first


def number(value: float) -> str:
    """Returns three significant digits, never an exponent: "0.108", "12.3", "1,180,000"."""
    if 0 < abs(value) < 0.001:
        return "<0.001"
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e" in text else text


def duration(seconds: float) -> str:
    """Returns a time as "108 us", "12.3 ms", "45 s", "12.5 min", "3.81 h" or "2.5 d"."""
    return _format_in_unit(seconds, _choose_unit(seconds, _choose_times(seconds)))


def duration_range(low: float, high: float) -> str:
    """Returns a range of times in one unit: "92.2-125 us"."""
    unit = _choose_unit(high, _choose_times(high))
    return f"{number(low / unit[0])}-{_format_in_unit(high, unit)}"


def size(count: float) -> str:
    """Returns a number of bytes with a binary prefix: "9.8 MiB"."""
    return _format_in_unit(count, _choose_unit(count, SIZES))


def quantity(count: float, unit: str) -> str:
    """Returns a count with an SI prefix: "131 Mcycles" for 131e6 and "cycles"."""
    scale, prefix = _choose_unit(count, _COUNTS)
    return _format_in_unit(count, (scale, prefix + unit))


def price(usd: float) -> str:
    """Returns a price: "14.4 cents", "$30.41" or "$12,346"."""
    if usd >= 1000:
        return f"${usd:,.0f}"
    if usd >= 0.9995:
        return f"${usd:.2f}"
    cents = number(100 * usd)
    return f"{cents} cent" if cents == "1" else f"{cents} cents"


def energy(kwh: float) -> str:
    """Returns an energy: "23.9 mWh", "450 Wh" or "3.35 kWh"."""
    return _format_in_unit(
        kwh, _choose_unit(kwh, ((1e3, "MWh"), (1.0, "kWh"), (1e-3, "Wh"), (1e-6, "mWh")))
    )


def _choose_times(seconds: float) -> Units:
    return (*_DAYS, *_TIMES) if seconds >= 2 * _DAYS[0][0] else _TIMES


def _choose_unit(value: float, units: Units) -> tuple[float, str]:
    """Returns the largest unit in which the value, rounded to three digits, is at least 1."""
    rounded = abs(float(f"{value:.3g}"))
    return next((unit for unit in units if rounded >= unit[0]), units[-1])


def _format_in_unit(value: float, unit: tuple[float, str]) -> str:
    return f"{number(value / unit[0])} {unit[1]}"
