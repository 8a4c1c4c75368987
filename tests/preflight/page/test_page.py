"""The page of a report: complete, self-contained, readable by screen readers, and escaped."""

import collections
import math
import re
from xml.etree import ElementTree

import pytest

from tests.support.written_reports import MIB, plots, report, written
from tftpu.preflight.page.page import build_page
from tftpu.preflight.page.style import STYLE
from tftpu.preflight.plots import MemoryCurve, Plots
from tftpu.preflight.pricing.cost import LargeTensor
from tftpu.preflight.slice_report import Spent

MARKUP = "<script>alert('x')</script>&\"<b>"


def parsed(*slices):
    """Returns the body of a page, which is well-formed XML."""
    text = build_page(report(*slices))
    return ElementTree.fromstring(re.search(r"<body>.*</body>", text, re.DOTALL)[0])


def texts(root):
    return [" ".join("".join(found.itertext()).split()) for found in root.iter()]


def section(root, number=1):
    return next(s for s in root.iter("section") if s.get("id").startswith(f"slice-{number}-"))


def by_class(root, tag, name):
    return [found for found in root.iter(tag) if found.get("class") == name]


def test_a_page_has_every_part_of_a_slice():
    root = parsed(written("v3-8", lints=["A finding."], advice=["A change."]), written("v5e-8"))
    assert [found.text for found in root.iter("h2")] == ["v3-8", "v5e-8"]
    titles = [found.text for found in section(root).iter("h3")]
    assert titles == [
        *("Memory over the instructions", "Time by layer", "Time by kind of work"),
        *("Roofline", "Collectives", "Findings and advice"),
    ]
    found = texts(section(root))
    assert "A finding." in found and "A change." in found
    # Of 2 ms, 0.5 ms are waited for, of a step of 4 ms.
    assert "The step waits 500 us for them, 12.5%." in found
    assert "all-reduce (exchange outside layers) 2 5 MB 2 ms 500 us 75%".replace(" ", "") in [
        text.replace(" ", "") for text in found
    ]


def test_the_first_table_ranks_the_slices_with_a_verdict():
    misfit = written("v2-8", fits=False, usd_per_1000_steps=None, step_ms=None, plots=None)
    dear = written("v3-8", usd_per_1000_steps=2.0)
    table = next(parsed(misfit, dear, written("v5e-8", step_ms=9.0)).iter("table"))
    rows = [[cell.text for cell in row[:2]] for row in table.iter("tr")]
    assert rows == [
        ["slice", "verdict"],
        *(["v5e-8", "cheapest"], ["v3-8", "fastest"], ["v2-8", "does not fit"]),
    ]


def test_a_page_loads_nothing():
    text = build_page(report(written()))
    assert "default-src 'none'" in text
    assert not re.findall(r"https?:|src=|url\(|@import|<script|<link|<iframe", text)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))
    root = parsed(written())
    names = {found.get("id") for found in root.iter() if found.get("id")}
    assert {found.get("href")[1:] for found in root.iter("a")} <= names


def test_names_of_users_stay_text():
    spent = [Spent(MARKUP, 4.0, 1.0, 1)]
    item = written(by_layer=spent, by_kind=spent, lints=[MARKUP], mesh=MARKUP, plots=plots())
    curve = item.plots.memory
    curve.layers[1], curve.arrays = MARKUP, [LargeTensor(MARKUP, 100 * MIB, 0, MARKUP)]
    item.plots.points[0].layer = item.plots.exchanges[0].layer = MARKUP
    text = build_page(report(item))
    assert "<script" not in text and "<b>" not in text and 'alert("' not in text
    shown = texts(parsed(item))
    assert sum(MARKUP in found for found in shown) > 10


def test_every_plot_is_named_and_described_for_screen_readers():
    root = parsed(written("v3-8"), written("v5e-8"))
    ids = collections.Counter(found.get("id") for found in root.iter() if found.get("id"))
    assert set(ids.values()) == {1}
    drawings = [svg for svg in root.iter("svg") if svg.get("role") == "img"]
    assert len(drawings) == 2 * 2 * 5  # two slices, two widths, five plots
    for svg in drawings:
        title, description = svg[0], svg[1]
        assert (title.tag, description.tag) == ("title", "desc")
        assert svg.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert title.text and description.text
    others = [svg for svg in root.iter("svg") if svg.get("role") != "img"]
    assert all(svg.get("aria-hidden") == "true" for svg in others)


def test_the_memory_plot_is_to_scale_and_says_how_far_the_compiler_agrees():
    svg = next(s for s in section(parsed(written())).iter("svg"))
    peak = by_class(svg, "circle", "peak")[0]
    heights = {
        name: float(by_class(svg, "rect", name)[0].get("height")) for name in ("base", "code")
    }
    bottom = float(by_class(svg, "rect", "base")[0].get("y")) + heights["base"]
    scale = heights["base"] / (90 * MIB)
    assert heights["code"] == pytest.approx(10 * MIB * scale, rel=0.01)
    assert bottom - float(peak.get("cy")) == pytest.approx(400 * MIB * scale, rel=0.01)
    assert "peak 400 MiB at instruction 10 of 40, in dense" in svg[1].text
    hovers = [rect[0].text for rect in by_class(svg, "rect", "sense")]
    assert hovers[2] == "instruction 20: 200 MiB, head" and len(hovers) == 4
    assert any(text.endswith("they agree within 0.5%.") for text in texts(parsed(written())))
    apart = texts(parsed(written(hbm_bytes=500 * MIB)))
    assert any("The 100 MiB (20.0%) between them is in no array" in text for text in apart)


def test_points_lie_under_the_roof_where_their_work_and_traffic_put_them():
    drawings = [svg for svg in parsed(written()).iter("svg") if svg.get("role") == "img"]
    svg = next(s for s in drawings if "Roofline" in s[0].text)
    places = svg.find("path").get("d")[1:].split("L")
    (left, low), (ridge, top), (right, level) = [map(float, p.split(",")) for p in places]
    moving, resting = by_class(svg, "circle", "point")
    assert "dense (fusion.1, matrix): 2 ms, 50.0% of the step; 5 TFLOP/s" in moving[0].text
    # The roof of a core of v3 turns at 61.5 TFLOP/s and 136.7 FLOP/B. The point is at 5 and 100.
    below, before = math.log10(61.5 / 5), math.log10(136.7 / 100)
    decade = (float(moving.get("cy")) - top) / below
    decades = (low - top) / decade  # from the left to the ridge: the roof rises as it goes
    assert ridge - float(moving.get("cx")) == pytest.approx((ridge - left) / decades * before, 0.02)
    assert level == top and right < float(resting.get("cx"))  # which moves no bytes


def test_what_cannot_be_drawn_is_said():
    curve = MemoryCurve(1, MIB, {}, [MIB], ["x"], [], [])
    shown = texts(parsed(written(plots=Plots(curve, [], []))))
    assert "No instruction has matrix products." in shown
    assert "The devices exchange nothing." in shown and "None." in shown
    unread = dict.fromkeys(("step_ms", "mfu", "usd_per_1000_steps", "plots"))
    root = parsed(written(**unread, by_layer=[], by_kind=[], lints=["Not priced."]))
    assert [found.text for found in root.iter("h3")] == ["Findings and advice"]


def test_a_step_that_does_not_fit_says_by_how_much_and_what_would():
    none = dict.fromkeys(("step_ms", "mfu", "plots"))
    item = written(
        fits=False,
        hbm_bytes=20 * 2**30,
        error="RESOURCE_EXHAUSTED: <ran out>",
        advice=["--config.train.gradient_accumulation_steps=2 makes this batch fit: 9 GiB."],
        by_layer=[],
        **none,
    )
    found = texts(parsed(item))
    assert any("it needs 20 GiB" in text for text in found)
    assert sum("gradient_accumulation_steps=2" in text for text in found) >= 1
    assert "Does not compile." in texts(parsed(written(compiles=False, fits=False, plots=None)))


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_areas_stand_out_in_both_themes(theme):
    """The ratios of the Web Content Accessibility Guidelines, level AA."""
    block = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[theme]
    colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
    for name in ("text", "soft", "blue"):
        assert contrast(colours[name], colours["page"]) >= 4.5
    assert contrast(colours["soft"], colours["card"]) >= 4.5
    for name in ("grey", "dark", "orange", "violet"):
        assert contrast(colours[name], colours["page"]) >= 3


def test_every_class_has_a_style():
    root = parsed(written(fits=False), written())
    used = {name for found in root.iter() for name in (found.get("class") or "").split()}
    assert {"base", "live", "loops", "point", "waited", "hidden", "bad"} <= used
    assert not {name for name in used if not re.search(rf"\.{name}\b", STYLE)}
