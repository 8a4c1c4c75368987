"""Being asked to stop: real signals to real processes, and a metadata server on loopback."""

import contextlib
import http.server
import signal
import socketserver
import subprocess
import sys
import threading
import time

import pytest

from tests.support import warm
from tftpu.errors import ExitCode
from tftpu.runtime import preemption

# The main thread is where no Python runs: a signal must be noticed nevertheless.
DEAF = """
import signal, sys, time
from tftpu.runtime.preemption import PreemptionNotice
with PreemptionNotice(float(sys.argv[1]), lambda: 40) as notice:
    print("ready", flush=True)
    try:
        {busy}
    finally:
        pass
    print("noted", notice.requested, flush=True)
"""
WAITING = (
    "end = time.monotonic() + 60\n"
    "        while not notice.requested and time.monotonic() < end: time.sleep(0.01)"
)


def start(busy: str, grace_seconds: float = 60.0) -> subprocess.Popen:
    process = warm.Popen(
        [sys.executable, "-c", DEAF.format(busy=busy), str(grace_seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_recorded_and_reported(number):
    process = start(WAITING)
    process.send_signal(number)
    output, said = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, f"noted {number.name}\n")
    assert f"{number.name}: finishing the current step, then saving." in said


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_exits_at_once_even_if_the_main_thread_is_busy(number):
    process = start("time.sleep(60)")
    process.send_signal(number)
    assert "finishing the current step" in process.stderr.readline()
    time.sleep(preemption._TOGETHER[number])
    process.send_signal(number)
    output, said = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "A second signal" in said
    assert "noted" not in output


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_a_group_that_a_parent_passes_on_is_one_notice(number):
    """`timeout` signals its command, and then the group that both are in."""
    process = start(f"{WAITING}\n        time.sleep(1)")  # in which the second one arrives
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.05)
    output, said = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, f"noted {number.name}\n")
    assert "A second signal, " not in said


def test_the_process_exits_at_the_end_of_the_grace_period():
    process = start("time.sleep(60)", grace_seconds=0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == ExitCode.PREEMPTED
    assert time.monotonic() - began >= 0.5
    assert "did not finish within 0 s after SIGTERM. Newest checkpoint: step 40." in said


@pytest.mark.medium
def test_ctrl_c_has_no_grace_period():
    process = start("time.sleep(1.5)", grace_seconds=0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "noted SIGINT\n")


def test_signal_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with preemption.PreemptionNotice():
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_clock_that_jumps_changes_nothing(monkeypatch):
    """All times are from the monotonic clock; the wall clock may jump."""
    monkeypatch.setattr(time, "time", lambda: 1e12)
    with preemption.PreemptionNotice(grace_seconds=30) as notice:
        signal.raise_signal(signal.SIGTERM)
        end = time.monotonic() + 10
        while notice.requested is None and time.monotonic() < end:
            time.sleep(0.01)
        assert notice.requested == "SIGTERM"
        time.sleep(0.2)  # alive


@pytest.fixture
def metadata(monkeypatch):
    """Serves the metadata in the dictionary, and 404 otherwise."""
    answers = {"maintenance-event": "NONE", "preempted": "FALSE"}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            key = self.path.removeprefix("/computeMetadata/v1/instance/")
            known = key in answers and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200 if known else 404)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            if known:
                self.wfile.write(answers[key].encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.05)
    yield answers
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("key", "value"),
    [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("preempted", "TRUE")],
)
def test_a_maintenance_event_is_a_notice(metadata, key, value, capfd):
    with preemption.PreemptionNotice(grace_seconds=60) as notice:
        time.sleep(0.3)
        assert notice.requested is None
        metadata[key] = value
        end = time.monotonic() + 10
        while notice.requested is None and time.monotonic() < end:
            time.sleep(0.01)
    assert notice.requested == "a maintenance event"
    assert "a maintenance event: finishing the current step, then" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("steps", "pending"),
    [(50, "the current 50 steps"), (0, "what runs between the steps, such as an evaluation")],
)
def test_a_notice_says_what_is_finished_first(steps, pending, capfd):
    with preemption.PreemptionNotice() as notice:
        notice.loop_steps = steps
        signal.raise_signal(signal.SIGTERM)
        end = time.monotonic() + 10
        while notice.requested is None and time.monotonic() < end:
            time.sleep(0.01)
    assert f"finishing {pending}, then saving" in capfd.readouterr().err


def test_a_metadata_server_that_does_not_answer_gives_no_notice(metadata, monkeypatch):
    metadata.clear()
    assert preemption.fetch_maintenance_event() is None
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    assert preemption.fetch_maintenance_event() is None


@contextlib.contextmanager
def server(answer, monkeypatch):
    """Answers each request by a function of its socket, as the metadata server."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1024)
            with contextlib.suppress(OSError):
                answer(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        threading.Thread(target=found.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{found.server_address[1]}")
        monkeypatch.setattr(preemption, "POLL_SECONDS", 0.05)
        yield
        found.shutdown()


@pytest.mark.medium
def test_an_answer_that_is_not_of_googles_metadata_server_is_no_notice(monkeypatch):
    text = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n%s\r\nTRUE"
    with server(lambda s: s.sendall(text % b""), monkeypatch):
        assert preemption.fetch_maintenance_event() is None
    with server(lambda s: s.sendall(text % b"Metadata-Flavor: Google\r\n"), monkeypatch):
        assert preemption.fetch_maintenance_event() == "TRUE"


def drip(start):
    def answer(request):
        request.sendall(start)
        while True:
            request.sendall(b"x")
            time.sleep(0.05)

    return answer


HEAD = b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\n"


@pytest.mark.medium
@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nX: ", HEAD + b"\r\n"])
def test_an_answer_that_drips_ends_and_delays_no_signal(start, monkeypatch):
    monkeypatch.setattr(preemption, "_TOTAL", 1.0)
    with server(drip(start), monkeypatch):
        began = time.monotonic()
        assert preemption.fetch_maintenance_event() is None
        assert time.monotonic() - began < 20  # two answers, of 60 s in all
        monkeypatch.setattr(preemption, "_TOTAL", 60.0)
        monkeypatch.setattr(preemption, "_JOIN_SECONDS", 0.1)
        with preemption.PreemptionNotice(grace_seconds=30) as notice:
            time.sleep(0.3)
            began = time.monotonic()
            signal.raise_signal(signal.SIGTERM)
            while notice.requested is None and time.monotonic() < began + 5:
                time.sleep(0.01)
            assert notice.requested == "SIGTERM"
            assert time.monotonic() - began < 5
            began = time.monotonic()
        assert time.monotonic() - began < 20  # of 60


@pytest.mark.parametrize("host", ["a b", "[", "a:b", "\u2603" * 80, "a\nb", "127.0.0.1:99999999"])
def test_a_host_that_is_none_gives_no_notice(host, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", host)
    assert preemption.fetch_maintenance_event() is None


@pytest.mark.parametrize("answer", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe"])
def test_signals_arrive_for_any_answer_of_the_metadata_server(answer, monkeypatch):
    with server(lambda s: s.sendall(answer), monkeypatch):
        with preemption.PreemptionNotice(grace_seconds=30) as notice:
            time.sleep(0.3)
            signal.raise_signal(signal.SIGTERM)
            end = time.monotonic() + 5
            while notice.requested is None and time.monotonic() < end:
                time.sleep(0.01)
        assert notice.requested == "SIGTERM"


def test_loops_too_long_for_the_grace_period_cause_one_warning(caplog, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    notice = preemption.PreemptionNotice(grace_seconds=25)
    notice.check_loop_time(50, 10.0)
    assert not caplog.text
    notice.check_loop_time(500, 50.0)
    notice.check_loop_time(500, 50.0)
    assert caplog.text.count("--config.train.steps_per_loop=125.") == 1


def test_a_machine_that_nobody_preempts_gets_no_warning(caplog, monkeypatch):
    monkeypatch.setattr(preemption, "on_google_cloud", lambda: False)
    preemption.PreemptionNotice(grace_seconds=25).check_loop_time(500, 50.0)
    assert not caplog.text


def test_a_signal_before_the_first_step_also_exits_with_75():
    """The machine that is preempted then runs the command again."""
    code = (
        "import time\nfrom tftpu.runtime.preemption import PreemptionNotice, exit_on_notice\n"
        "with exit_on_notice():\n"
        "    with PreemptionNotice():\n        pass\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    process = warm.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == ExitCode.PREEMPTED
    assert "run the same command again to resume" in said
