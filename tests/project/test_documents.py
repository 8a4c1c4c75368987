"""Every code block, link and path of README and of the documentation works as written."""

import ast
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.repository import doc_blocks
from tests.support.repository.doc_blocks import PAGES, ROOT

# Blocks that are checked but not executed, page by page: each says why in a comment above it.
CHECKED = {
    "docs/guides/pipelines.md": 4,
    "docs/guides/pods.md": 1,
    "docs/guides/predicting.md": 1,
    "docs/installation.md": 3,
    "docs/keras-hub/guide.md": 3,
    "docs/others/kinetic-and-skypilot.md": 2,
    "docs/guides/input-data.md": 4,
    "docs/guides/larger-than-a-device.md": 2,
    "docs/guides/launching.md": 7,
    "docs/guides/fine-tuning.md": 2,
    "docs/guides/preflight.md": 5,
    "docs/guides/serving.md": 10,
    "docs/guides/searching.md": 3,
    "docs/guides/watching-a-run.md": 2,
}


def executed(page: str) -> bool:
    found = doc_blocks.blocks(page)
    return any(b.language in ("python", "bash") and not b.reason for b in found)


TOTAL = 5000  # seconds for all pages, on cores that others use as well
# `make test-slow` runs these, as a reader does; `make exhaustive` runs the others.
USUAL = {
    *("README.md", "CONTRIBUTING.md", "docs/coming-from-keras.md", "docs/index.md"),
    *("docs/gallery/own-training-logic.md", "docs/guides/own-training-logic.md"),
    *("docs/guides/launching.md", "docs/guides/pods.md", "docs/troubleshooting.md"),
}
assert set(PAGES) >= USUAL
RUN = [
    pytest.param(page, marks=pytest.mark.slow if page in USUAL else pytest.mark.exhaustive)
    for page in PAGES
    if executed(page)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> dict[str, str]:
    """Returns the error of each page that is tested, "" if it has none: one process runs them."""
    folder = tmp_path_factory.mktemp("documents")
    tested = [item for item in request.session.items if item.path == request.path]
    called = [item.callspec.params for item in tested if "results" in item.fixturenames]
    pages = [params["page"] for params in called]
    with (folder / "output.txt").open("w") as output:
        subprocess.run(
            [sys.executable, "-m", "tests.support.repository.doc_blocks", *pages],
            cwd=folder,
            # Compiled well: convolutions of JAX, trained for some steps, take six times as long.
            env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TOTAL,
        )
    print((folder / "output.txt").read_text()[-10_000:])
    return json.loads((folder / "results.json").read_text())


@pytest.mark.timeout(TOTAL)
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page, results):
    assert results[page] == ""


def test_no_block_is_skipped_silently():
    found = {page: sum(bool(b.reason) for b in doc_blocks.blocks(page)) for page in PAGES}
    found = {page: count for page, count in found.items() if count}
    assert found == CHECKED, "CHECKED, in this file, has the number of such blocks of each page"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_names_its_language(page):
    assert {block.language for block in doc_blocks.blocks(page)} <= set(doc_blocks.LANGUAGES)


@pytest.mark.parametrize("page", PAGES)
def test_no_code_hides_in_an_indented_block(page):
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    assert not re.findall(r"^    (?:tftpu|pip|make|python|import|from) .*", text, re.M)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_point_to_files(page):
    """The site's own links are checked by `make docs`."""
    for link in re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text()):
        assert link.startswith("https://") or (ROOT / link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_the_paths_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    folders = "tftpu|models|input_pipelines|launch|tests|docs"
    named = re.findall(rf"`((?:{folders})/[\w/.-]*)`", text)
    made_up = re.compile(r".*/greet\.py")  # the command that CONTRIBUTING adds
    assert [p for p in named if not (ROOT / p).exists() and not made_up.fullmatch(p)] == []


def test_the_files_that_architecture_names_exist():
    """By their names alone, such as `losses.py`."""
    named = re.findall(r"`(\w+\.py)`", (ROOT / "docs/architecture.md").read_text())
    folders = ("tftpu", "models", "input_pipelines", "launch")
    known = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert named and set(named) <= known


@pytest.mark.parametrize("page", PAGES)
def test_the_modules_that_are_run_exist(page):
    for module in set(re.findall(r"python -m ((?:tests|tftpu)[\w.]+)", (ROOT / page).read_text())):
        assert importlib.util.find_spec(module), module


def test_every_page_of_the_gallery_has_the_picture_that_it_draws():
    folder, pictures = ROOT / "docs/gallery", ROOT / "docs/images/gallery"
    pages = {path.stem: path.read_text() for path in folder.glob("*.md")}
    index = pages.pop("index")
    assert pages and set(pages) == {path.stem for path in pictures.iterdir()}
    for name, text in pages.items():
        assert (pictures / f"{name}.png").stat().st_size < 80_000, name
        link = f"](../images/gallery/{name}.png)"
        assert link in text.partition("```")[0] and link in index, name
        assert f"]({name}.md)" in index, name
        code = "\n".join(block.text for block in doc_blocks.blocks(f"docs/gallery/{name}.md"))
        assert re.search(rf'savefig\("{name}\.png"|--output={name}\.png', code), name


def test_the_script_in_the_gallery_is_that_of_the_tests():
    script = (ROOT / "tests/compatibility/scripts/vae.py").read_text()
    assert script in [block.text for block in doc_blocks.blocks("docs/gallery/scripts.md")]


def room_of(module: str, rooms: dict[str, int]) -> str | None:
    """Returns the picture's room of a module: the one with the longest matching name."""
    found = [room for room in rooms if f"{module}.".startswith(f"{room}.")]
    return max(found, key=len, default=None)


def imports_of(path) -> set[str]:
    """Returns the modules that a file imports, including lazy and type-checking imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def load_script(path: str) -> Any:
    """Loads a Python file of `docs/`, which is no package."""
    spec = importlib.util.spec_from_file_location("script", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("module", "base"),
    [
        ("tftpu.models.sizes", "tftpu.config.ModelConfig"),
        ("tftpu.input_pipelines.sources", "tftpu.config.DataConfig"),
    ],
)
def test_the_reference_of_configs_has_every_family_and_every_source(module, base):
    page = (ROOT / "docs/reference/config.md").read_text()
    line = f"{{{{ classes {module} {base} }}}}"
    assert line in page and f"{{{{ fields {base} }}}}" in page
    written = load_script("docs/hooks/commands.py").on_page_markdown(line, None, None, None)
    tables = dict(zip(*[iter(re.split(r"^### (\w+)$", written, flags=re.M)[1:])] * 2))
    parts = importlib.import_module(module)
    code = ast.parse(Path(parts.__file__).read_text())
    named = {node.name for node in code.body if isinstance(node, ast.ClassDef)}
    assert named and named <= set(tables)
    package, _, base_name = base.rpartition(".")
    shared = {
        field.name
        for field in dataclasses.fields(getattr(importlib.import_module(package), base_name))
    }
    for name, table in tables.items():
        fields = {field.name for field in dataclasses.fields(getattr(parts, name))}
        assert fields == shared | set(re.findall(r"^\| `(\w+)`", table, re.M)), name


def test_the_guide_names_every_source_of_data():
    from tftpu.input_pipelines import sources

    page = "docs/guides/input-data.md"
    table = (ROOT / page).read_text().partition("## Sources")[2].partition("###")[0]
    for name in set(sources.__all__) - {"Augment", "Streamed"}:  # parts of sources
        assert f"`{name}`" in table, f"add {name} to the table under Sources in {page}"


def test_the_picture_of_the_rooms_matches_the_imports():
    pictures = load_script("docs/pictures.py")
    outside = ("launch", "models", "input_pipelines")
    rooms = {
        f"tftpu.{name}" if name in outside else name: floor
        for floor, (_, names) in enumerate(pictures.FLOORS)
        for name, _ in names
    }
    upwards = []
    for folder in ("tftpu", *outside):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            own = room_of(name if folder == "tftpu" else f"tftpu.{name}", rooms)
            for module in imports_of(path) if own else ():
                other = room_of(module, rooms)
                if other and rooms[other] < rooms[own]:
                    upwards.append(f"{path.relative_to(ROOT)} imports {module}")
    assert upwards == []
