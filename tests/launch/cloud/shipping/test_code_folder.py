"""Which files of a config's folder travel to a rented machine, and which end the launch."""

import json
import subprocess
import tarfile
import time
from io import BytesIO
from pathlib import Path

import pytest

from tftpu.errors import UserError
from tftpu.launch.cloud.shipping import code_folder, secret_files, shipment

# In parts, or this file looks like one.
KEY = "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIE\n"
LETTERS = "aB3dE6gH9jK2mN5pQ8rS1tU4vW7xY0z" * 3
HEX = "0123456789abcdef" * 2
WEB_TOKEN = f"eyJhbGciOiJIUzI1NiJ9.eyJhIjoiXXXXkCJ9.{LETTERS[:43]}"
DOCKER = json.dumps({"auths": {"gcr.io": {"auth": "bWU6aHVudGVyMg=="}}}, indent=2)
KUBERNETES = "apiVersion: v1\n" + "kind: Config\nclusters: []\nusers: []\n"


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
    assert list(code_folder.read_files(tmp_path)) == [
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
    assert list(code_folder.read_files(root / "project")) == expected


def test_the_gitignore_of_the_repository_counts_in_a_folder_that_has_none(tmp_path):
    write(tmp_path, ".gitignore", text="data\n")
    write(tmp_path, ".git/HEAD", "project/config.py", "project/data/x")
    assert list(code_folder.read_files(tmp_path / "project")) == ["config.py"]


def test_gitignore_counts_without_a_repository_too(tmp_path):
    write(tmp_path, ".gitignore", text="data\n")
    write(tmp_path, "config.py", "data/x", "more/data/x")
    assert list(code_folder.read_files(tmp_path)) == [".gitignore", "config.py"]


def test_a_repository_of_another_user_is_read(tmp_path, monkeypatch):
    """Git itself refuses to list its files, for example of a folder mounted in a container."""
    write(tmp_path, "config.py", "a.log")
    write(tmp_path, ".gitignore", text="*.log\n")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    refused = subprocess.run(["git", "status"], cwd=tmp_path, capture_output=True, text=True)
    assert "dubious ownership" in refused.stderr
    assert list(code_folder.read_files(tmp_path)) == [".gitignore", "config.py"]


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
        code_folder.read_files(tmp_path)
    assert f"deep/{name} (its name)" in str(refused.value)
    write(tmp_path, ".gitignore", text=f"{name}\n")  # the way out
    assert list(code_folder.read_files(tmp_path)) == [".gitignore", "config.py"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("gcp.json", json.dumps({"type": "service_account"}), "credentials for Google Cloud"),
        ("adc.json", '{"x": 1,\n "type" : "authorized_user"}', "credentials for Google Cloud"),
        ("notes.txt", f"see\n{KEY}", "private key, line 2"),
        ("config2.py", f'KEY = """{KEY}"""', "private key, line 1"),
        ("backup.asc", "-----BEGIN PGP PRIVATE " + "KEY BLOCK-----\n", "private key"),
        ("x.txt", "-----BEGIN ENCRYPTED PRIVATE " + "KEY-----\n", "private key"),
        ("a.py", f"\nlogin('hf_{LETTERS[:34]}')\n", "Hugging Face token, line 2"),
        ("a.py", f"key = 'AIza{LETTERS[:35]}'", "Google API key"),
        ("a.py", f"wandb.login(key='{'0123456789' * 4}')", "Weights & Biases key"),
        ("run.sh", f"export WANDB_API_KEY={'0123456789' * 4}", "Weights & Biases key"),
        ("a.py", f"os.environ['KAGGLE_KEY'] = '{'0123456789ab' * 2}01234567'", "Kaggle key"),
        ("a.py", f"wandb.init(project='example'); wandb.login(key='{'0123456789' * 4}')",
         "Weights & Biases key"),
        ("a.py", f"wandb.login('{'0123456789' * 4}' or '{'0' * 40}')",
         "Weights & Biases key"),
        ("a.py", f"kaggle = {{'username': 'example', 'key': '{HEX}'}}", "Kaggle key"),
        ("a.py", f"KAGGLE_SECRET = '{HEX}'", "Kaggle key"),
        ("a.py", f"kaggle.login('joe', '{HEX}')", "Kaggle key"),
        ("a.sh", f"kaggle config set --name=key --value={HEX}", "Kaggle key"),
        ("a.py", f"KAGGLE_API_TOKEN = 'KGAT_{HEX}'", "Kaggle key"),
        ("npmrc", f"//r.io/:_authToken=npm_{LETTERS[:36]} # an example", "NPM tokens"),
        ("a.sh", f"export NPM_TOKEN=npm_{LETTERS[:36]}", "NPM tokens"),
        (".yarnrc.yml", f'npmAuthToken: "npm_{LETTERS[:36]}"', "NPM tokens"),
        ("npmrc", "//r.io/:_auth=bWU6aHVudGVyMg==", "NPM tokens"),
        ("npmrc", "//r.io/:_password='aHVudGVyMmh1bnRlcg=='", "NPM tokens"),
        ("a.py", f"wandb.login('{'0' * 40}' or '{'0123456789' * 4}')", "Weights & Biases key"),
        ("a.py", f"get('WANDB_API_KEY', '{'0' * 40}') or '{'0123456789' * 4}'",
         "Weights & Biases key"),
        ("a.py", f"KAGGLE_KEY = '{'0' * 32}' or '{HEX}'", "Kaggle key"),
        ("a.py", f"TOKEN = '{WEB_TOKEN}'", "JSON Web Token"),
        ("a.py", f"TOKEN = 'ghp_{LETTERS[:36]}'", "GitHub Token"),
        ("a.py", f"TOKEN = 'github_pat_{LETTERS[:60]}'", "GitHub token"),
        ("a.py", f"TOKEN = 'glpat-{LETTERS[:20]}'", "GitLab Token"),
        ("a.py", f"id = 'AKIA{'ABCD2345' * 2}'", "AWS Access Key"),
        ("a.py", f"client = OpenAI(api_key='sk-proj-{LETTERS[:40]}')", "token of a model's API"),
        ("a.py", f"client = Anthropic(api_key='sk-ant-{LETTERS[:40]}')", "token of a model's API"),
        ("hook.py", f"x = 'xoxb-123456789012-123456789012-{LETTERS[:24]}'", "Slack Token"),
        ("requirements.txt", "--index-url https://me:s3cr3t@pypi.mine.io/simple\n", "Basic Auth"),
        ("token.json", json.dumps({"refresh_token": f"1//0{LETTERS[:45]}"}), "Google OAuth token"),
        ("token.json", json.dumps({"client_secret": LETTERS[:30]}), "OAuth token"),
        ("token.pickle", f"\x80\x04ya29.{LETTERS[:30]}\x94", "Google OAuth token"),
        ("config.json", DOCKER, "logins to container registries"),
        ("cluster.yaml", KUBERNETES, "kubeconfig"),
        ("cluster.json", json.dumps({"kind": "Config", "users": []}), "kubeconfig"),
        (".bashrc", f"export AWS_SECRET_ACCESS_KEY={LETTERS[:40]}\n", "AWS Access Key, line 1"),
        ("aws.ini", f"\naws_secret_access_key = {LETTERS[:40]}", "AWS Access Key, line 2"),
        ("a.yaml", f"secretAccessKey: {LETTERS[:40]}", "AWS Access Key"),
        ("a.py", f"pc = Pinecone('pcsk_{LETTERS[:6]}_{LETTERS[:63]}')", "Pinecone key"),
        ("a.py", f"VAULT_TOKEN = 'hvs.{LETTERS[:24]}'", "HashiCorp Vault token"),
        ("a.sh", f"curl -H dop_v1_{'0123456789abcdef' * 4}", "DigitalOcean token"),
        ("a.py", f"'lsv2_pt_{'0123456789abcdef' * 2}_0123456789'", "LangSmith key"),
        ("a.json", json.dumps({"kaggle": {"key": "0123456789abcdef" * 2}}), "Kaggle key"),
        ("a.ipynb", json.dumps({"source": [f'os.environ["AWS_SECRET_KEY"] = "{LETTERS[:40]}"\n']}),
         "AWS Access Key"),
    ],
)  # fmt: skip
def test_a_secret_under_another_name_is_found_by_its_content(tmp_path, name, text, why):
    write(tmp_path, name, text=text)
    with pytest.raises(UserError, match=rf"{name} \({why}"):
        code_folder.read_files(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("text", [KEY, f"hf_{LETTERS[:34]}", DOCKER, KUBERNETES])
def test_a_secret_is_found_in_every_encoding_of_unicode(text, encoding):
    assert secret_files.find_secret("x.dat", f"é\r\n{text}".encode(encoding))


def test_a_line_with_the_mark_of_detect_secrets_travels(tmp_path):
    line = f"login('hf_{LETTERS[:34]}')"
    write(tmp_path, "a.py", text=f"{line}  # pragma: allowlist secret\n")
    assert list(code_folder.read_files(tmp_path)) == ["a.py"]
    write(tmp_path, "a.py", text=f"{line}  # pragma: allowlist secret\n{line}\n")
    with pytest.raises(UserError, match="Hugging Face token, line 2"):
        code_folder.read_files(tmp_path)


@pytest.mark.parametrize(("name", "offered"), [("a.py", True), ("a.json", False), (".env", False)])
def test_the_mark_is_offered_where_a_comment_can_hold_it(tmp_path, name, offered):
    write(tmp_path, name, text=f'{{"a": "hf_{LETTERS[:34]}"}}')
    with pytest.raises(UserError, match=r"name it in \.gitignore") as refused:
        code_folder.read_files(tmp_path)
    assert ("pragma: allowlist secret" in str(refused.value)) == offered


def test_tftpu_and_its_starter_project_hold_no_secret():
    """Code as models, data and launchers typically have it."""
    root = Path(code_folder.__file__).parents[3]
    paths = [
        p for folder in ("launch", "models", "input_pipelines") for p in (root / folder).rglob("*")
    ]
    found = {str(p): secret_files.find_secret(p.name, p.read_bytes()) for p in paths if p.is_file()}
    assert set(found.values()) == {""}
    assert len(found) > 200


@pytest.mark.medium
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(["https://example.com/a?x=1 me@example.com"] * 40_000),
        "eyJ" * 500_000,
        "_authToken " + "//x " * 400_000,
        "iVBORw0KGgo_AAAA-NSUhEUgAAAAEAAAAB/CAYAAAAf" * 40_000,
        "kaggle key " * 70_000,
        "kaggle keys, login, auth " * 40_000,
        "aws_secret_key= " * 50_000,
        "hvs.a" * 300_000,
        "pcsk_" * 300_000,
        "npm_" * 300_000,
        f"wandb {'0' * 40} " * 10_000,
        "wandb " + f"{'0' * 40} " * 40_000,
        f"kaggle key {'0' * 32} " * 10_000,
        ":_auth=" + "a" * 1_000_000,
        '"client_secret": "aaaaaaaaaaaaaaaa", ' * 10_000,
    ],
    ids=[
        *("links", "like a JSON web token", "like one of npm", "base64", "like one of Kaggle"),
        "with words for keys of Kaggle",
        *("like one of AWS", "like one of Vault", "like one of Pinecone"),
        *("like one of npm without a login", "zeros for Weights & Biases", "zeros behind one word"),
        *("zeros for Kaggle", "like a login of npm", "placeholders of OAuth"),
    ],
)
def test_long_lines_are_searched_in_a_time_that_grows_with_their_length(text):
    began = time.process_time()
    assert secret_files.find_secret("data.json", text.encode()) == ""
    assert time.process_time() - began < 2


@pytest.mark.parametrize("before", [0, 1_000, 2_047, 2_048, 3_071, 100_000])
def test_a_secret_is_found_anywhere_in_a_long_line(before):
    links = "https://example.com/hf_" + "https://example.com/" * 5_000
    text = f"{{}}\n{links[:before]} hf_{LETTERS[:34]} {links}\n"
    assert secret_files.find_secret("data.json", text.encode()) == "Hugging Face token, line 2"


ORDINARY = """
sha = "da39a3ee5e6b4b0d3255bfef95601890afd80709"
uuid = "123e4567-e89b-12d3-a456-426614174000"
pip install git+https://github.com/wandb/wandb@da39a3ee5e6b4b0d3255bfef95601890afd80709
token = os.environ["HF_TOKEN"]; api_key = "YOUR_API_KEY"; password = getpass()
url = f"https://{user}:{token}@github.com/me/private"; clone = "https://$USER:$TOKEN@github.com"
from metrics import APCalculator
names = "MyMultimodalTransformerNet.layers.self_attention_layer_norm_weight"
{"image": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5"}
{"auth": "none", "kind": "Config", "pad_token": "<pad>", "client_secret": "<your client secret>"}
{"client_secret": "$GOOGLE_CLIENT_SECRET", "refresh_token": "${GOOGLE_REFRESH_TOKEN}"}
{"client_secret": "YOUR_CLIENT_SECRET_HERE", "a": "hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"}
AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY
AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE
export AWS_SECRET_ACCESS_KEY=$AWS_SECRET PAGE=https://me:xxxxxxxx@pypi.mine.io
KEY=sk-ant-api03-xxxxxxxxxxxxxxxxxxxx
download("https://kaggle.com/dogs.zip", md5="0123456789abcdef0123456789abcdef")  # kaggle
kaggle_key = None; md5 = "0123456789abcdef0123456789abcdef"
kaggle_tokenizer = "0123456789abcdef0123456789abcdef"
KAGGLE_KEY = "00000000000000000000000000000000"
kaggle keys for data set, id 0123456789abcdef0123456789abcdef
kaggle keys of {"dataset_id": "0123456789abcdef0123456789abcdef"}
wandb.login(key="0000000000000000000000000000000000000000")
KEY=sk-ant-api03-xxxx-xxxx-xxxx-xxxx-xxxx
//r.io/:_authToken=npm_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
NPM_TOKEN=npm_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx npm_config_registry=https://r.io
//r.io/:_auth=${NPM_AUTH} //r.io/:_auth=<base64> //r.io/:_password="$NPM_PASSWORD"
hvs.hidden_values_of_the_second_layer = lsv2_model
"""


def test_hashes_placeholders_and_what_looks_like_tokens_travel():
    assert secret_files.find_secret("a.ipynb", ORDINARY.encode()) == ""


@pytest.mark.parametrize(
    "name",
    [
        *("environment.py", "keys.py", "monkey.py", "secrets.py", "model.json", ".env.example"),
        *("credentials.py", "id_embedding.py", "tokenizer.json"),
    ],
)
def test_ordinary_files_travel(name):
    assert secret_files.find_secret(name, b'{"type": "BPE"}') == ""


def test_a_folder_with_data_in_it_is_refused_with_its_largest_files(tmp_path, monkeypatch):
    monkeypatch.setattr(code_folder, "LIMIT", 10_000)
    write(tmp_path, "config.py", "model.py")
    write(tmp_path, "train.npy", text="x" * 20_000_000)
    with pytest.raises(UserError, match=r"20 MB.*train.npy \(20.0 MB\).*move data to a bucket"):
        code_folder.read_files(tmp_path)


def test_a_link_to_a_file_that_travels_is_followed(tmp_path):
    write(tmp_path, "mine/config.py", "mine/net/model.py", text="y = 2\n")
    (tmp_path / "mine" / "model.py").symlink_to("net/model.py")
    (tmp_path / "mine" / "gone.py").symlink_to("nowhere")
    (tmp_path / "alias").symlink_to("mine")
    for folder in ("mine", "alias"):  # of a folder that is a link itself, too
        found = code_folder.read_files(tmp_path / folder)
        assert found["model.py"] == b"y = 2\n" and "gone.py" not in found


@pytest.mark.parametrize(
    "target", ["../elsewhere/model.py", ".git/config", "ignored.py", "runs/a.json", "/etc/hostname"]
)
def test_a_link_to_what_does_not_travel_is_refused(tmp_path, target):
    write(tmp_path, "elsewhere/model.py", "mine/config.py", "mine/ignored.py")
    write(tmp_path, "mine/.git/config", "mine/runs/a.json")
    write(tmp_path, "mine/.gitignore", text="ignored.py\n")
    (tmp_path / "mine" / "sub").mkdir()
    (tmp_path / "mine" / "sub" / "model.py").symlink_to((tmp_path / "mine" / target).resolve())
    with pytest.raises(UserError, match=r"model\.py is a link to .*: copy the file here, or name"):
        code_folder.read_files(tmp_path / "mine")


def test_a_link_to_a_folder_is_refused(tmp_path):
    write(tmp_path, "mine/config.py", "mine/shared/model.py")
    (tmp_path / "mine" / "lib").symlink_to("shared")
    with pytest.raises(UserError, match="lib is a link to a folder"):
        code_folder.read_files(tmp_path / "mine")


def test_large_files_and_folders_of_small_ones_are_data():
    kilo = 1000
    sizes = {"model.py": 9 * kilo, "vocabulary.txt": 300 * kilo, "corpus.txt": 2000 * kilo}
    sizes |= {f"images/{n}.jpg": 100 * kilo for n in range(15)} | {"images/names.json": kilo}
    sizes |= {
        "net/layers.py": 9 * kilo,
        "net/w.npy": 900 * kilo,
        "export/saved_model.pb": 3000 * kilo,
    }
    found = {"corpus.txt": 2000 * kilo, "images/": 1500 * kilo, "export/": 3000 * kilo}
    assert code_folder.measure_data(sizes) == found


def test_a_config_that_gitignore_names_is_refused(tmp_path):
    write(tmp_path, "config.py")
    write(tmp_path, ".gitignore", text="*.py\n")
    with pytest.raises(UserError, match=r"is ignored by a \.gitignore"):
        shipment.pack(str(tmp_path / "config.py"), None)


def test_the_archive_has_the_folder_and_the_same_bytes_each_time(tmp_path):
    files = {"config.py": b"x", "net/layers.py": b"y" * 1000}
    data = code_folder.build_archive("mine", files)
    assert data == code_folder.build_archive("mine", files)
    with tarfile.open(fileobj=BytesIO(data)) as tar:
        tar.extractall(tmp_path, filter="data")
    assert {name: (tmp_path / "mine" / name).read_bytes() for name in files} == files
