"""The server answers programs, and of web pages only those from its own host names."""

import pytest

from tests.support.serving import JSON, ask, running
from tftpu.inference.exporting.inputs import Input
from tftpu.inference.server import origins
from tftpu.inference.server.served import Served

DOUBLE = Served((Input("x", (), "int32"),), ("y",), lambda given: {"y": given["x"] * 2})
BODY = {"instances": [4]}


@pytest.fixture(scope="module")
def port():
    with running(DOUBLE) as found:
        yield found


@pytest.mark.parametrize(
    "kind",
    [
        *("text/plain", "text/plain; charset=UTF-8", "application/x-www-form-urlencoded"),
        *("multipart/form-data; boundary=x", "application/jsonx", "text/plain, application/json"),
        *("", None),
    ],
)
def test_what_a_page_sends_without_asking_is_no_json(port, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    status, answer = ask(port, "POST", "/predict", BODY, headers)
    assert status == 415 and "Content-Type: application/json" in answer["error"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_is_answered_however_it_is_written(port, kind):
    assert ask(port, "POST", "/predict", BODY, {"Content-Type": kind})[1] == {"predictions": [8]}


@pytest.mark.parametrize("route", ["/predict", "/health", "/metrics", "/v1/models/m", "/nothing"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},  # a name whose owner lets it point to this machine
        {"Host": "localhost.evil.example:80"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "10.1.2.3"},
        {"Host": ""},
        {"Host": "[::1"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://10.1.2.3"},
        {"Origin": "null"},
    ],
)
def test_pages_of_others_are_refused(port, route, headers):
    method = "POST" if route == "/predict" else "GET"
    status, answer = ask(port, method, route, BODY, {**JSON, **headers})
    assert status == 403 and "--allow_hosts" in answer["error"]


def test_a_refusal_at_an_address_of_openai_has_its_form(port):
    status, answer = ask(port, "POST", "/v1/completions", BODY, {**JSON, "Host": "evil.example"})
    assert status == 403 and "--allow_hosts" in answer["error"]["message"]


def test_no_page_of_others_is_allowed_to_ask(port):
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert ask(port, "OPTIONS", "/predict", headers=asked)[0] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "LOCALHOST:1234"},
        {"Host": "127.0.0.1"},
        {"Host": "[::1]:80"},
        {"Host": "localhost", "Origin": "http://localhost:3000"},
        {"Host": "localhost", "Origin": "http://127.0.0.1"},
    ],
)
def test_this_machine_is_answered_by_its_own_names(port, headers):
    assert ask(port, "POST", "/predict", BODY, {**JSON, **headers})[1] == {"predictions": [8]}


def status_of(hosts: tuple[str, ...], *headers: dict[str, str]) -> list[int]:
    with running(DOUBLE, hosts=hosts) as port:
        return [ask(port, "POST", "/predict", BODY, {**JSON, **given})[0] for given in headers]


def test_at_all_addresses_it_answers_to_any_address_and_to_no_foreign_name():
    probe, name = {"Host": "10.1.2.3:8080"}, {"Host": "evil.example"}
    page = {**probe, "Origin": "http://10.9.9.9"}
    own = {**probe, "Origin": "http://10.1.2.3:8080"}
    for host in "0.0.0.0", "::":
        assert status_of(origins.list_own_hosts(host), probe, own, name, page) == [
            200,
            200,
            403,
            403,
        ]
    assert status_of(origins.list_own_hosts("10.1.2.3"), probe, {"Host": "10.1.2.4"}) == [200, 403]


def test_hosts_that_are_allowed():
    one, below = {"Host": "a.example"}, {"Host": "x.a.example", "Origin": "https://x.a.example"}
    other = {"Host": "xa.example"}
    assert status_of(("a.example",), one, below, other) == [200, 403, 403]
    assert status_of(("*.a.example",), one, below, other) == [403, 200, 403]
    assert status_of(("*",), one, below, {**other, "Origin": "null"}) == [200, 200, 200]
