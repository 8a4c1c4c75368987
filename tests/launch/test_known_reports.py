"""Reports that a repeated `tftpu preflight` gives again, and all that makes it check again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import projects
from tftpu.launch import known_reports

# Runs what the command does without the check itself: prints whether the report is known.
RUN = """
import sys
from tftpu.launch import config_flags, known_reports
from tftpu.preflight.report import Report
from tftpu.preflight.slice_report import SliceReport

with known_reports.recorded() as inputs:
    config, fits, price, *overrides = sys.argv[1:]
    experiment = config_flags.load(config, overrides)
    prices = {"v3": float(price)}
    name = known_reports.key(experiment, ["v3-8"], prices, inputs)
    known = known_reports.find(name)
    if known is None:
        experiment.model.build()
        found = SliceReport("v3-8", 8, fits=fits == "fits", step_ms=1.5)
        known_reports.keep(name, Report(16, "float32", 3, [found]), inputs)
print("new" if known is None else known)
"""
MODEL = """
import dataclasses
import os
import pathlib
import tftpu

@dataclasses.dataclass
class Linear(tftpu.Model):
    outputs: int = 1

    def build(self):
        import helper
        return helper.SIZE, pathlib.Path("words.txt").read_text(), os.listdir("classes")
"""
DATA = """
import dataclasses
import tftpu

@dataclasses.dataclass
class Sums(tftpu.Data):
    global_batch_size: int = 16

    def batch_spec(self, examples):
        return ()
"""
KNOWN = "Report(global_batch_size=16, precision='float32', steps=3, slices=[SliceReport("


@pytest.fixture
def project(tmp_path):
    """Writes a project whose model imports a module, reads a file and lists a folder."""
    folder = tmp_path / "project"
    files = {"model": MODEL, "data": DATA, "helper": "SIZE = 3\n"}
    projects.write(folder, "train=tftpu.Train(steps=3)", **files)
    (folder / "words.txt").write_text("a b c")
    (folder / "classes" / "cat").mkdir(parents=True)
    return folder


def checked(folder, *overrides, fits="fits", price="2", **environment):
    arguments = [sys.executable, "-c", RUN, "mine.py", fits, price, *overrides]
    changed = {"TFTPU_CACHE": str(folder.parent / "cache"), "PYTHONDONTWRITEBYTECODE": ""}
    changed |= environment
    inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        arguments, cwd=folder, env=inherited | changed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def edit(folder, name, text):
    """Changes a file's content, and neither its size nor its date."""
    path = folder / name
    before = path.stat()
    path.write_text(text)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_same_command_gives_the_same_report_again(project):
    assert checked(project) == "new"
    known = checked(project)
    assert known.startswith(KNOWN) and "step_ms=1.5" in known
    # Dates, and what a run writes beside the project, decide nothing.
    (project / "helper.py").touch()
    (project / "runs" / "mine").mkdir(parents=True)
    assert checked(project, SHLVL="7").startswith(KNOWN)


def package(folder):
    (folder / "helper").mkdir()
    (folder / "helper" / "__init__.py").write_text("SIZE = 3\n")


CHANGES = {
    "the config": lambda f: edit(f, "mine.py", (f / "mine.py").read_text().replace("=3", "=4")),
    "the model": lambda f: edit(f, "model.py", MODEL.replace("int = 1", "int = 2")),
    "a module that the model imports": lambda f: edit(f, "helper.py", "SIZE = 4\n"),
    "a package in place of the module": package,
    "a file that the model reads": lambda f: edit(f, "words.txt", "a b d"),
    "a folder that the model lists": lambda f: (f / "classes" / "dog").mkdir(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_edit_of_what_was_read_is_checked_again(project, change):
    assert checked(project) == "new" and checked(project) != "new"
    CHANGES[change](project)
    assert checked(project) == "new"


def test_other_words_another_price_and_another_environment_are_checked_again(project):
    assert checked(project) == "new" and checked(project) != "new"
    assert checked(project, "--config.model.outputs=2") == "new"
    assert checked(project, price="3") == "new"
    assert checked(project, XLA_FLAGS="--xla_cpu_enable_fast_math=true") == "new"


@pytest.mark.parametrize(
    "body",
    [
        "import subprocess; subprocess.run(['true'])",
        "os.system('true')",
        "pass  # reads by tf.io, which Python does not see",
    ],
)
def test_what_cannot_be_compared_is_checked_every_time(project, body):
    text = MODEL.replace("        import helper\n", f"        {body}\n        import helper\n")
    (project / "model.py").write_text(text)
    assert checked(project) == checked(project) == "new"


@pytest.mark.parametrize("rest", ["train=tftpu.Train(epochs=3)", "train=tftpu.Train(steps=3)"])
def test_data_that_have_to_be_opened_are_opened_every_time(project, rest):
    (project / "data.py").write_text(
        DATA.replace("batch_spec", "other") if "steps" in rest else DATA
    )
    (project / "mine.py").write_text(projects.CONFIG.format(rest=rest))
    assert checked(project) == checked(project) == "new"


def test_a_module_whose_file_python_did_not_open_is_not_trusted(project, tmp_path):
    prefix = {"PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    assert checked(project, **prefix) == "new"
    assert checked(project, **prefix) == "new"  # it reads compiled modules, which lie elsewhere
    edit(project, "helper.py", "SIZE = 4\n")
    assert checked(project, **prefix) == "new"


def test_a_report_of_a_failure_is_not_kept(project):
    assert checked(project, fits="no") == checked(project, fits="no") == "new"


def test_a_damaged_report_is_made_again(project):
    checked(project)
    (kept,) = (project.parent / "cache" / "preflight" / "reports").glob("*.json")
    for text in ("", "{}", "[]", '{"inputs": {}, "report": {}}'):
        kept.write_text(text)
        assert checked(project) == "new"
        assert checked(project) != "new"


def test_a_file_that_changes_during_the_check_is_not_trusted(project):
    lines = [
        *("words = pathlib.Path('words.txt')", "text = words.read_text()"),
        *("words.write_text('x')", "words.read_text()", "words.write_text(text)"),
    ]
    body = "\n        ".join([*lines, "import helper"])
    (project / "model.py").write_text(MODEL.replace("import helper", body))
    assert checked(project) == checked(project) == "new"


def test_tftpus_own_code_and_the_installed_packages_count_by_content(monkeypatch, tmp_path):
    module = tmp_path / "own" / "part" / "module.py"
    listed = tmp_path / "installed" / "keras-3.15.1.dist-info" / "RECORD"
    for path in (module, listed):
        path.parent.mkdir(parents=True)
        path.write_text("a = 1")
    monkeypatch.setattr(known_reports, "_own", lambda: [tmp_path / "own"])
    monkeypatch.setattr(known_reports, "_installed", lambda: [f"{tmp_path}/installed/"])
    found = [known_reports._code()]
    os.utime(module)
    assert known_reports._code() == found[0]
    for path in (module, listed):
        edit(path.parent, path.name, "a = 2")
        found.append(known_reports._code())
    (module.parent / "new.py").write_text("")
    found.append(known_reports._code())
    assert len(set(found)) == 4


@pytest.mark.compiles
def test_the_command_answers_again_without_tensorflow(tmp_path):
    def run(*flags):
        command = [
            *(sys.executable, "-X", "importtime", "-c"),
            *("from tftpu.launch.main import run; run()", "preflight", "--config=digits_resnet"),
            *("--slices=v3-8", f"--workdir={tmp_path / 'run'}", *flags),
        ]
        inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        reports = {"XDG_CACHE_HOME": str(tmp_path)}  # the compiled programs stay in TFTPU_CACHE
        done = subprocess.run(
            command, env=inherited | reports, capture_output=True, text=True, check=True
        )
        return done.stdout, "tensorflow.python" in done.stderr

    first, imported = run()
    written = json.loads(Path(tmp_path, "run", "preflight.json").read_text())
    again, imported_again = run()
    assert imported and not imported_again
    assert again == first
    assert json.loads(Path(tmp_path, "run", "preflight.json").read_text()) == written
    assert run("--price=v3=9")[1]
