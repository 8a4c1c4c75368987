"""Amounts of money and of time, as people read them."""

from tftpu.observe.writers import format_number


def format_dollars(usd: float) -> str:
    """Formats an amount: "$12.34", or "3.1 cents" below a dollar."""
    return f"${usd:,.2f}" if usd >= 1 else f"{100 * usd:.2g} cents"


def format_milliseconds(value: float) -> str:
    """Formats a duration of that many milliseconds: "1.234 s", "12.3 ms", "310 us"."""
    if value >= 1000:
        return f"{format_number(value / 1000)} s"
    return f"{format_number(value)} ms" if value >= 1 else f"{1000 * value:.3g} us"
