"""Amounts as people read them."""

import pytest

from tftpu import amounts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (2.5e-10, "<0.001 us"),
        (1.08e-4, "108 us"),
        (9.996e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (45, "45 s"),
        (59.99, "1 min"),
        (750, "12.5 min"),
        (13_716, "3.81 h"),
        (47 * 3600, "47 h"),
        (60 * 3600, "2.5 d"),
    ],
)
def test_a_time_has_the_unit_that_fits(seconds, text):
    assert amounts.format_duration(seconds) == text


def test_both_ends_of_a_range_share_a_unit():
    assert amounts.format_duration_range(92.2e-6, 124.7e-6) == "92.2-125 us"
    assert amounts.format_duration_range(0.9e-3, 1.1e-3) == "0.9-1.1 ms"


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 B"), (10_276_045, "9.8 MiB"), (2**30, "1 GiB"), (4.58 * 2**30, "4.58 GiB")],
)
def test_a_size_has_a_binary_prefix(count, text):
    assert amounts.format_size(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 FLOP"), (201.4e6, "201 MFLOP"), (3.0028e12, "3 TFLOP")]
)
def test_a_count_has_an_si_prefix(count, text):
    assert amounts.format_quantity(count, "FLOP") == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0.0, "0 cents"),
        (2e-9, "<0.001 cents"),
        (0.000217, "0.0217 cents"),
        (0.01, "1 cent"),
        (0.144, "14.4 cents"),
        (0.9999, "$1.00"),
        (30.41, "$30.41"),
        (12_345.6, "$12,346"),
    ],
)
def test_prices_below_a_dollar_are_in_cents(usd, text):
    assert amounts.format_price(usd) == text


@pytest.mark.parametrize(
    ("kwh", "text"), [(2.39e-5, "23.9 mWh"), (0.45, "450 Wh"), (3.35, "3.35 kWh")]
)
def test_energy_has_the_unit_that_fits(kwh, text):
    assert amounts.format_energy(kwh) == text


def test_a_number_has_three_digits_and_no_exponent():
    assert amounts.format_number(1_180_130) == "1,180,000"
    assert amounts.format_number(86.94) == "86.9"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (725, "12:05"), (12000, "3:20:00"), (184200, "2 d 03:10")],
)
def test_durations_are_read_at_a_glance(seconds, text):
    assert amounts.format_clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (5400, "90m"), (0.00001, "0.00001s"), (1.5, "1.5s"), (1.1 * 3600, "3960s")]
    + [(1_000_001, "1000001s"), (3600 * 1_234_567, "1234567h"), (86_400 * 1e16, f"1{'0' * 16}d")],
)
def test_a_period_is_parsed_as_what_was_formatted(seconds, text):
    assert amounts.format_period(seconds) == text
    assert amounts.parse_period(text) == pytest.approx(seconds, rel=1e-12)


def test_a_metric_has_four_digits_or_is_a_whole_number():
    assert amounts.format_metric(0.61234) == "0.6123"
    assert amounts.format_metric(7_388.4) == "7,388"
