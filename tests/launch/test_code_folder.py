"""Which files of a config's folder travel to a rented machine, and which end the launch."""

import json
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tftpu.errors import UserError
from tftpu.launch.cloud import code_folder, secret_files, shipment

KEY = "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIE\n"  # in two, or this file looks like one


def write(folder: Path, *names: str, text: str = "x = 1\n") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_caches_hidden_folders_environments_and_runs_stay(tmp_path):
    write(tmp_path, "config.py", "net/layers.py", "net/data.json", "requirements.txt", ".python")
    write(
        tmp_path, "__pycache__/a.pyc", "old.pyc", ".git/config", ".cache/x", "runs/a/metrics.jsonl"
    )
    write(tmp_path, "env/pyvenv.cfg", "env/lib/x.py", "mine.egg-info/PKG-INFO", ".venv/id_rsa")
    (tmp_path / "net" / "runs").symlink_to(tmp_path / "env")
    assert list(code_folder.contents(tmp_path)) == [
        *(".python", "config.py", "net/data.json", "net/layers.py", "requirements.txt"),
    ]


def test_gitignore_is_read_as_git_reads_it(tmp_path):
    """Compared with what git itself would add, in a repository above the folder."""
    root = tmp_path / "repository"
    write(root, ".gitignore", text="*.log\n/project/data/\n!keep.log\n")
    write(root / "project", ".gitignore", text="local_*\n\\#odd\nsub/*.bin\n**/deep/\n")
    names = ["config.py", "a.log", "keep.log", "data/x.npy", "local_1.py", "#odd", "é ü.py"]
    names += ["sub/w.bin", "sub/deeper/w.bin", "m/deep/x.py", "m/x.py", "sub/data/y.npy"]
    write(root / "project", *names)
    subprocess.run(["git", "init", "--quiet", root], check=True)
    listed = ["git", "ls-files", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(listed, cwd=root / "project", capture_output=True, text=True, check=True)
    expected = sorted(name for name in done.stdout.split("\0") if name)
    assert len(expected) == 7
    assert list(code_folder.contents(root / "project")) == expected


def test_the_gitignore_of_the_repository_counts_in_a_folder_that_has_none(tmp_path):
    write(tmp_path, ".gitignore", text="data\n")
    write(tmp_path, ".git/HEAD", "project/config.py", "project/data/x")
    assert list(code_folder.contents(tmp_path / "project")) == ["config.py"]


def test_gitignore_counts_without_a_repository_too(tmp_path):
    write(tmp_path, ".gitignore", text="data\n")
    write(tmp_path, "config.py", "data/x", "more/data/x")
    assert list(code_folder.contents(tmp_path)) == [".gitignore", "config.py"]


def test_a_repository_of_another_user_is_read(tmp_path, monkeypatch):
    """Git itself refuses to list its files, for example of a folder mounted in a container."""
    write(tmp_path, "config.py", "a.log")
    write(tmp_path, ".gitignore", text="*.log\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    refused = subprocess.run(["git", "status"], cwd=tmp_path, capture_output=True, text=True)
    assert "dubious ownership" in refused.stderr
    assert list(code_folder.contents(tmp_path)) == [".gitignore", "config.py"]


@pytest.mark.parametrize(
    "name",
    [
        *(".env", ".env.production", "prod.env", "server.pem", "tls.KEY", "id_rsa", "id_ed25519"),
        *("credentials.json", "credentials", "my-credentials-2.json", "client_secret_1.json"),
        *(".netrc", "kaggle.json", "service-account.json", "my_service_account.json", "a.p12"),
        *("secrets.toml", ".pypirc"),
    ],
)
def test_a_file_that_looks_like_a_secret_is_refused_by_name(tmp_path, name):
    write(tmp_path, "config.py", f"deep/{name}")
    with pytest.raises(UserError, match=r"name it in \.gitignore, or move it") as refused:
        code_folder.contents(tmp_path)
    assert f"deep/{name} (its name)" in str(refused.value)
    write(tmp_path, ".gitignore", text=f"{name}\n")  # the way out
    assert list(code_folder.contents(tmp_path)) == [".gitignore", "config.py"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("gcp.json", json.dumps({"type": "service_account"}), "credentials for Google Cloud"),
        ("adc.json", '{"x": 1,\n "type" : "authorized_user"}', "credentials for Google Cloud"),
        ("notes.txt", f"see\n{KEY}", "a private key"),
        ("config2.py", f'KEY = """{KEY}"""', "a private key"),
    ],
)
def test_a_secret_under_another_name_is_found_by_its_content(tmp_path, name, text, why):
    write(tmp_path, name, text=text)
    with pytest.raises(UserError, match=f"{name} .*{why}"):
        code_folder.contents(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("environment.py", "keys.py", "monkey.py", "secrets.py", "model.json", ".env.example"),
        *("credentials.py", "id_embedding.py", "tokenizer.json"),
    ],
)
def test_ordinary_files_travel(name):
    assert secret_files.reason(name, b'{"type": "BPE"}') == ""


def test_a_folder_with_data_in_it_is_refused_with_its_largest_files(tmp_path, monkeypatch):
    monkeypatch.setattr(code_folder, "LIMIT", 10_000)
    write(tmp_path, "config.py", "model.py")
    write(tmp_path, "train.npy", text="x" * 20_000_000)
    with pytest.raises(UserError, match=r"20 MB.*train.npy \(20.0 MB\).*move data to a bucket"):
        code_folder.contents(tmp_path)


def test_a_link_to_a_file_is_followed_and_one_to_a_folder_is_refused(tmp_path):
    write(tmp_path, "shared/model.py", text="y = 2\n")
    write(tmp_path, "mine/config.py")
    (tmp_path / "mine" / "model.py").symlink_to(tmp_path / "shared" / "model.py")
    assert code_folder.contents(tmp_path / "mine")["model.py"] == b"y = 2\n"
    (tmp_path / "mine" / "lib").symlink_to(tmp_path / "shared")
    with pytest.raises(UserError, match="lib is a link to a folder"):
        code_folder.contents(tmp_path / "mine")


def test_a_config_that_gitignore_names_is_refused(tmp_path):
    write(tmp_path, "config.py")
    write(tmp_path, ".gitignore", text="*.py\n")
    with pytest.raises(UserError, match=r"is ignored by a \.gitignore"):
        shipment.of(str(tmp_path / "config.py"), None)


def test_the_archive_has_the_folder_and_the_same_bytes_each_time(tmp_path):
    files = {"config.py": b"x", "net/layers.py": b"y" * 1000}
    data = code_folder.archive("mine", files)
    assert data == code_folder.archive("mine", files)
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        tar.extractall(tmp_path, filter="data")
    assert {name: (tmp_path / "mine" / name).read_bytes() for name in files} == files
