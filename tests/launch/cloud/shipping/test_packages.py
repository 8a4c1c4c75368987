"""The packages of a rented machine: pinned as here, and complete for what the code imports."""

import re
from importlib import metadata

import pytest

from tftpu.errors import UserError
from tftpu.launch.cloud.shipping import code_imports, packages


def imports(**files: str) -> list[str]:
    texts = {f"{name.replace('__', '/')}.py": text.encode() for name, text in files.items()}
    return [found.module for found in code_imports.find_external(texts, "config.py")]


def check(code: str, requirements: str = "") -> None:
    found = code_imports.find_external({"config.py": code.encode()}, "config.py")
    packages.check(found, requirements, "mine", "tensorflow")


def test_imports_are_followed_through_the_folder_and_no_further():
    found = imports(
        config="import os, model\nfrom net.layers import Block\n",
        model="def build():\n    import lazily\n",
        net____init__="from . import layers",
        net__layers="import below.deep as b\nfrom .other import x",
        net__other="import other_needs",
        unused="import never",
    )
    assert sorted(found) == ["below", "lazily", "other_needs"]


def test_imports_that_may_fail_or_never_run_do_not_count():
    code = (
        "try:\n    import one\nexcept ImportError:\n    one = None\n"
        "if typing.TYPE_CHECKING:\n    import two\nelse:\n    import three\n"
        "try:\n    import four\nexcept ValueError:\n    pass\n"
    )
    assert imports(config=code) == ["three", "four"]


def test_modules_are_reached_by_statements_alone(tmp_path):
    texts = {
        "mine": "import json, net.layers\nfrom far.deep import x\ntry:\n    from .near import y\n"
        "except ImportError:\n    from near import y\nfrom broken import z",
        "near": "def later():\n    from net.late import *\nif TYPE_CHECKING:\n    import never",
        "net/__init__": "",
        "net/layers": "from . import inner\nfrom .inner import thing",
        "net/inner/__init__": "from ..beside import a\nfrom .. import above",
        "broken": "print 1\nimport never",
    }
    names = ("net/late", "net/beside", "net/above", "net/__main__", "never", "net/inner/unused")
    for name, text in (texts | dict.fromkeys(names, "")).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    within, others, names = code_imports.trace_modules(tmp_path, "mine")
    assert within == {
        *("mine", "near", "broken", "net", "net.layers", "net.late", "net.inner", "net.beside"),
        "net.above",
    }
    assert {name.partition(".")[0] for name in others - within} >= {"json", "far"}


def test_code_that_is_not_python_names_the_line():
    with pytest.raises(UserError, match=r"model.py, line 2 is not valid Python"):
        imports(config="import model", model="x = 1\ny = (\n")


def test_a_template_in_a_package_that_nothing_imports_need_not_be_python():
    files = {
        "config.py": b"from net import layers\nfrom far import x",
        "net/__init__.py": b"",
        "net/layers.py": b"",
        "net/templates/model.py": b"class {{ name }}:",
    }
    assert [found.module for found in code_imports.find_external(files, "config.py")] == ["far"]
    wrong = {"net/layers.py": b"x = ("}, {"net/__init__.py": b"from .templates import model"}
    for broken in wrong:
        with pytest.raises(UserError, match=r"net/.* is not valid Python"):
            code_imports.find_external(files | broken, "config.py")


@pytest.mark.medium
def test_the_machine_has_what_tftpu_and_its_tpu_extra_bring():
    check("import tftpu, keras, tensorflow as tf, numpy, jax, h5py, PIL, yaml, sklearn, absl\n")


def test_a_package_that_the_machine_would_lack_is_named_with_the_line_to_write():
    version = metadata.version("matplotlib")
    code = "import numpy\nimport matplotlib.pyplot\nimport nowhere_at_all\n"
    with pytest.raises(UserError) as refused:
        check(code)
    said = str(refused.value)
    assert f"mine/config.py, line 2, imports matplotlib: matplotlib=={version};" in said
    assert "mine/config.py, line 3, imports nowhere_at_all: its package." in said
    assert "mine/requirements.txt" in said
    line = re.search(r"matplotlib==[\d.]+\d", said)[0]
    check(code, f"# mine\n{line}\nnowhere-at-all>1\n")  # as it says


@pytest.mark.medium
def test_a_package_from_a_folder_is_not_asked_of_an_index(tmp_path, monkeypatch):
    """A name that is installed here from a folder may belong to somebody else on an index."""
    info = tmp_path / "house_layers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-layers\nVersion: 1.0\n")
    (info / "top_level.txt").write_text("house_layers\n")
    origin = info / "direct_url.json"
    monkeypatch.syspath_prepend(tmp_path)
    packages._list_providers.cache_clear()
    origin.write_text('{"url": "file:///src/house", "dir_info": {"editable": true}}')
    with pytest.raises(UserError, match="installed here from a folder: copy it to mine"):
        check("import house_layers\n")
    commit = '"vcs_info": {"vcs": "git", "commit_id": "abc"}'
    origin.write_text(f'{{"url": "https://example.com/house.git", {commit}}}')
    with pytest.raises(UserError, match=r"house-layers @ git\+https://example.com/house.git@abc"):
        check("import house_layers\n")
    packages._list_providers.cache_clear()


def test_pins_are_the_installed_versions_of_what_tftpu_requires():
    pins = dict(pin.split("==") for pin in packages.list_pins())
    for name in ("keras", "numpy", "tensorflow-datasets", "google-cloud-storage"):
        assert pins[name] == metadata.version(name)
    # The extra `tpu` decides: another TensorFlow, its libtpu and its jax.
    assert not {"tensorflow", "tensorflow-cpu", "tensorboard", "jax", "libtpu"} & set(pins)
    assert packages.describe_driver("tensorflow").startswith("tensorflow-tpu==2.20.0")
    assert packages.describe_driver("jax").startswith("jax[tpu]<0.11,>=0.10")


def test_extras_that_are_complete_here_are_installed_there(monkeypatch):
    found = metadata.version
    without = {"tokenizers"}

    def version(name: str) -> str:
        if name in without:
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name.startswith("google-cloud-bigquery") else found(name)

    monkeypatch.setattr(metadata, "version", version)
    assert packages.list_extras("tensorflow") == ["tpu", "bigquery"]
    assert packages.list_extras("jax") == ["jax-tpu", "bigquery"]
    without.add("google-cloud-bigquery-storage")
    assert packages.list_extras("tensorflow") == ["tpu"]
