"""Files to and from buckets: Google's own client, an emulator of the service, and its faults."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent import futures

import google_crc32c
import numpy as np
import pytest

from tests.support.fakes import fake_storage
from tests.support.fakes.fake_storage import BUCKET, Fault
from tftpu.errors import UserError
from tftpu.input_pipelines.reading import cache as cache_module
from tftpu.input_pipelines.reading.cache import Cache
from tftpu.storage import buckets, retry
from tftpu.storage.buckets import Stored

FOLDER = f"gs://{BUCKET}/set"
MIB = 1 << 20


@pytest.fixture(scope="module")
def service():
    with (
        fake_storage.serving() as service,
        fake_storage.in_this_process({"STORAGE_EMULATOR_HOST": service.url}),
    ):
        yield service


@pytest.fixture(autouse=True)
def _clean(service, monkeypatch):
    service.empty()
    monkeypatch.setattr(retry, "POLICY", retry.Policy(seconds=20.0, first_wait=0.3))


def local_files(folder, *sizes: int) -> dict:
    """Files of random bytes."""
    folder.mkdir(exist_ok=True)
    paths = {}
    for number, size in enumerate(sizes):
        paths[f"part-{number}"] = folder / f"local-{number}"
        data = np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
        paths[f"part-{number}"].write_bytes(data)
    return paths


def test_a_set_is_uploaded_and_downloaded_unchanged(service, tmp_path):
    paths = local_files(tmp_path, 0, 1, 1000, 3 * MIB)
    stored = buckets.upload(paths, FOLDER)
    for name, path in paths.items():
        assert service.content(f"set/{name}") == path.read_bytes()
        crc = google_crc32c.value(path.read_bytes())
        assert stored[name][:2] == (path.stat().st_size, f"{crc:08x}")
    assert buckets.list_files(FOLDER) == stored
    down = buckets.download(stored, FOLDER, tmp_path / "down")
    assert {n: p.read_bytes() for n, p in down.items()} == {
        n: p.read_bytes() for n, p in paths.items()
    }
    assert sorted(os.listdir(tmp_path / "down")) == sorted(paths)


def test_existing_files_are_not_transferred_again(service, tmp_path):
    paths = local_files(tmp_path, 10, 20)
    stored = buckets.upload(paths, FOLDER)
    buckets.download(stored, FOLDER, tmp_path / "down")
    service.requests.clear()
    paths["part-1"].write_bytes(b"changed")
    assert buckets.upload(paths, FOLDER)["part-0"] == stored["part-0"]
    assert service.requested("POST", "upload") == 1
    assert service.content("set/part-1") == b"changed"
    buckets.download({"part-0": stored["part-0"]}, FOLDER, tmp_path / "down")
    assert service.requested("GET", "download") == 0


@pytest.mark.medium
@pytest.mark.parametrize("what", [429, 500, 503, "drop"])
def test_failed_and_broken_requests_are_retried(service, tmp_path, what):
    paths = local_files(tmp_path, 100, 200)
    service.faults += [Fault("POST", "upload", what, times=2), Fault("GET", r"/o\?", what)]
    stored = buckets.upload(paths, FOLDER)
    service.faults.append(Fault("GET", "download.*part-1", what, times=2))
    down = buckets.download(stored, FOLDER, tmp_path / "down")
    assert down["part-1"].read_bytes() == paths["part-1"].read_bytes()
    assert not any(fault.times for fault in service.faults)


@pytest.mark.parametrize("what", ["truncate", "corrupt"])
def test_a_body_damaged_in_transfer_is_downloaded_again(service, tmp_path, what):
    paths = local_files(tmp_path, MIB)
    stored = buckets.upload(paths, FOLDER)
    service.faults.append(Fault("GET", "download", what, times=2))
    down = buckets.download(stored, FOLDER, tmp_path / "down")
    assert down["part-0"].read_bytes() == paths["part-0"].read_bytes()
    assert service.requested("GET", "download") == 3


def test_a_connection_that_breaks_in_a_refusal_hides_nothing(service, monkeypatch):
    generation = buckets.publish(f"{FOLDER}/lease", b"first")
    with monkeypatch.context() as patch:  # renewed after it was looked at, before it is read
        patch.setattr(buckets, "_describe_stored", lambda _: buckets.Stored(5, "", generation + 1))
        service.faults.append(Fault("GET", "alt=media", "truncate"))
        with pytest.raises(buckets.ChangedError):
            buckets.read_version(f"{FOLDER}/lease")
    assert service.faults[0].times == 0  # it was met


def test_a_body_that_is_always_damaged_fails_and_leaves_no_file(service, tmp_path):
    stored = buckets.upload(local_files(tmp_path, 1000), FOLDER)
    service.faults.append(Fault("GET", "download", "corrupt", times=None))
    with pytest.raises(UserError, match=r"set/part-0: the content did not match its checksum"):
        buckets.download(stored, FOLDER, tmp_path / "down")
    assert os.listdir(tmp_path / "down") == []


def test_an_interrupted_upload_continues_where_it_broke(service, tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "_CHUNK", 4 * MIB)
    paths = local_files(tmp_path, 18 * MIB)
    sent = []

    # The second part is lost before it arrives, the third after.
    def take_fault(method, path):
        if method == "PUT":
            sent.append(path)
            return {2: 503, 4: "drop"}.get(len(sent))
        return None

    monkeypatch.setattr(service, "take_fault", take_fault)
    buckets.upload(paths, FOLDER)
    assert service.content("set/part-0") == paths["part-0"].read_bytes()
    # Five parts; one sent twice; at most two requests for the place to continue at.
    assert 6 <= len(sent) <= 8
    assert service.requested("POST", "uploadType=resumable") == 1


@pytest.mark.medium
def test_a_service_that_never_answers_fails_with_a_clear_error(service, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "POLICY", retry.Policy(seconds=1.0, first_wait=0.3))
    service.faults.append(Fault("POST", "upload", 503, times=None))
    expected = r"Failed uploading gs://bucket/set/part-0: .*1 s"
    with pytest.raises(buckets.UnavailableError, match=expected):
        buckets.upload(local_files(tmp_path, 10), FOLDER)


@pytest.mark.parametrize(
    ("status", "sentence"), [(403, "roles/storage.objectAdmin"), (401, "gcloud auth"), (404, "no")]
)
def test_an_error_of_the_service_gives_advice(service, tmp_path, status, sentence):
    service.faults.append(Fault("GET", "/o", status, times=None))
    with pytest.raises(UserError, match=sentence) as caught:
        buckets.list_files(FOLDER)
    assert not isinstance(caught.value, buckets.UnavailableError)
    with pytest.raises(UserError, match="not an address in a bucket"):
        buckets.list_files("s3://bucket/set")


def test_no_error_names_the_key_of_an_upload(service, tmp_path, monkeypatch):
    """The address of a resumable upload lets anybody write."""
    monkeypatch.setattr(retry, "POLICY", retry.Policy(seconds=1.0, first_wait=0.3))
    service.faults.append(Fault("PUT", "upload_id", 503, times=None))
    with pytest.raises(UserError) as caught:
        buckets.upload(local_files(tmp_path, 9 * MIB), FOLDER)
    assert "upload_id" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_shard_that_changed_since_the_manifest_is_named(service, tmp_path):
    stored = buckets.upload(local_files(tmp_path, 100, 100), FOLDER)
    service.overwrite("set/part-1", b"other")
    with pytest.raises(UserError, match=r"gs://bucket/set/part-1 changed since its manifest"):
        buckets.download(stored, FOLDER, tmp_path / "down")
    assert "part-1" not in os.listdir(tmp_path / "down")


def test_one_of_two_concurrent_publishers_gets_an_error(service):
    uri = f"{FOLDER}/dataset.json"
    assert buckets.read_version(uri) == (b"", 0)
    first = buckets.publish(uri, b"one", 0)
    assert buckets.read_version(uri) == (b"one", first)
    with pytest.raises(UserError, match="another process wrote it meanwhile"):
        buckets.publish(uri, b"two", 0)
    assert service.content("set/dataset.json") == b"one"
    assert buckets.publish(uri, b"two", first) != first
    assert service.content("set/dataset.json") == b"two"


def test_a_publication_whose_answer_was_lost_has_succeeded(service):
    service.faults.append(Fault("POST", "upload", "drop"))
    generation = buckets.publish(f"{FOLDER}/dataset.json", b"one", 0)
    assert buckets.read_version(f"{FOLDER}/dataset.json") == (b"one", generation)


@pytest.mark.medium
def test_an_upload_after_a_kill_sends_the_missing_files_only(service, tmp_path):
    paths = local_files(tmp_path, *[3000] * 12)
    code = (
        "import pathlib, sys\nfrom tftpu.storage import buckets\n"
        "buckets.WORKERS = 1\nroot = pathlib.Path(sys.argv[1])\n"
        "buckets.upload({f'part-{n}': root / f'local-{n}' for n in range(12)}, sys.argv[2])\n"
    )
    # It stays at the fifth file, however late this process looks.
    service.faults.append(Fault("POST", "upload", 503, times=None, after=4))
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), FOLDER])
    while service.requested("POST", "upload") < 5 and child.poll() is None:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert len(service.names()) == 4
    service.faults.clear()
    service.requests.clear()
    buckets.upload(paths, FOLDER)
    assert service.requested("POST", "upload") == 8
    assert all(service.content(f"set/{n}") == p.read_bytes() for n, p in paths.items())


def cached(cache: Cache, stored: dict[str, Stored], *names: str) -> list[bytes]:
    with contextlib.ExitStack() as stack:
        return [
            stack.enter_context(cache.local_copy(f"{FOLDER}/{name}", stored[name])).read_bytes()
            for name in names
        ]


def test_a_cached_file_is_downloaded_once(service, tmp_path):
    paths = local_files(tmp_path, 1000)
    stored = buckets.upload(paths, FOLDER)
    for _ in range(2):  # the second is a new process as far as the cache knows
        cache = Cache(tmp_path / "cache", 5000)
        for _ in range(2):
            assert cached(cache, stored, "part-0") == [paths["part-0"].read_bytes()]
    assert service.requested("GET", "download") == 1


def test_the_least_recently_used_make_room(service, tmp_path):
    stored = buckets.upload(local_files(tmp_path, *[1000] * 4), FOLDER)
    cache = Cache(tmp_path / "cache", 3000)
    for name in ("part-0", "part-1", "part-2", "part-0", "part-3"):
        cached(cache, stored, name)
        assert cache.measure_size() <= 3000
        time.sleep(0.01)  # the clock of the file system
    service.requests.clear()
    cached(cache, stored, "part-0", "part-2", "part-3")
    assert service.requested("GET", "download") == 0
    cached(cache, stored, "part-1")
    assert service.requested("GET", "download") == 1


def test_a_file_in_use_is_not_removed(service, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "PATIENCE", 0.2)
    stored = buckets.upload(local_files(tmp_path, 1000, 1000, 1000), FOLDER)
    cache = Cache(tmp_path / "cache", 2000)
    with cache.local_copy(f"{FOLDER}/part-0", stored["part-0"]) as held:
        cached(cache, stored, "part-1")
        cached(cache, stored, "part-2")
        assert held.stat().st_size == 1000
        with pytest.raises(UserError, match="may hold 2,000 bytes"):
            cached(cache, stored, "part-1", "part-2")


def test_a_reader_waits_for_another_to_release_its_file(service, tmp_path):
    stored = buckets.upload(local_files(tmp_path, *[1000] * 6), FOLDER)
    cache = Cache(tmp_path / "cache", 2000)

    def read(name: str) -> int:
        with cache.local_copy(f"{FOLDER}/{name}", stored[name]) as path:
            time.sleep(0.02)
            return path.stat().st_size

    with futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(read, stored)) == [1000] * 6
    assert cache.measure_size() <= 2000


def test_readers_that_miss_the_same_file_at_once_do_not_wait_for_each_other(
    service, tmp_path, monkeypatch
):
    stored = buckets.upload(local_files(tmp_path, 1000), FOLDER)
    cache, both = Cache(tmp_path / "cache", 5000), threading.Barrier(2)
    is_whole, seen = Cache._is_whole, threading.local()

    def together(self, *given):
        found = is_whole(self, *given)
        if not getattr(seen, "before", False):
            seen.before = True
            both.wait(30)
        return found

    monkeypatch.setattr(Cache, "_is_whole", together)
    with futures.ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(cache.hold, f"{FOLDER}/part-0", stored["part-0"], reader)
            for reader in range(2)
        ]
        done, waiting = futures.wait(asked, timeout=30)
        for held in cache._held.values():
            held.close()  # or a reader that waits would keep the pool from its end
    assert len(done) == 2 and not waiting
    assert service.requested("GET", "download") == 1


def test_a_corrupt_or_truncated_cached_file_is_downloaded_again(service, tmp_path):
    paths = local_files(tmp_path, 1000)
    stored = buckets.upload(paths, FOLDER)
    for damage in (lambda data: data[:500], lambda data: data[:-1] + bytes([data[-1] ^ 1])):
        cached(Cache(tmp_path / "cache", 5000), stored, "part-0")
        (path,) = (p for p in (tmp_path / "cache").iterdir() if "-" in p.name)
        path.write_bytes(damage(path.read_bytes()))
        found = cached(Cache(tmp_path / "cache", 5000), stored, "part-0")
        assert found == [paths["part-0"].read_bytes()]
    assert service.requested("GET", "download") == 3


@pytest.mark.medium
def test_processes_share_a_cache_and_survive_a_killed_one(service, tmp_path):
    paths = local_files(tmp_path, 200_000, 200_000)
    stored = buckets.upload(paths, FOLDER)
    code = (
        "import sys\nfrom tftpu.input_pipelines.reading import cache\n"
        "from tftpu.storage import buckets\n"
        "folder, uri, size, crc = sys.argv[1:]\n"
        "stored = buckets.Stored(int(size), crc)\n"
        "with cache.Cache(folder, 400_000).local_copy(uri, stored) as path:\n"
        "    print(buckets.describe_file(path).crc32c)\n"
    )

    def child(name: str):
        expected = stored[name]
        arguments = (str(tmp_path / "cache"), f"{FOLDER}/{name}", str(expected.bytes))
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments, expected.crc32c],
            stdout=subprocess.PIPE,
            text=True,
        )

    # Killed while it waits for an answer.
    service.faults.append(Fault("GET", "download.*part-1", 503, times=None))
    killed = child("part-1")
    while not service.requested("GET", "download.*part-1") and killed.poll() is None:
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    service.faults.clear()
    readers = [child("part-0") for _ in range(3)] + [child("part-1")]
    said = [reader.communicate(timeout=60)[0].strip() for reader in readers]
    assert said == [stored["part-0"].crc32c] * 3 + [stored["part-1"].crc32c]
    assert service.requested("GET", "download.*part-0") == 1
    assert Cache(tmp_path / "cache", 400_000).measure_size() == 400_000
