"""The logs of trials: they outlive the machine of a search in a bucket."""

from pathlib import Path

from tests.support.fakes import gs_proxy
from tests.support.fakes.fake_storage import BUCKET
from tftpu.launch.search.logs import Logs
from tftpu.storage import files


def test_a_log_in_a_bucket_holds_what_all_workers_of_its_trial_printed(tmp_path):
    with gs_proxy.bucket(tmp_path) as (service, _):
        for text in ("one\n", "two\n"):
            with Logs(f"gs://{BUCKET}/search") as logs:
                path = Path(logs.begin(7))
                with path.open("a") as file:
                    file.write(text)
                assert logs.keep(7) == ""
            assert not path.parent.exists()  # nothing stays on the machine
        assert logs.resolve_destination(7) == f"gs://{BUCKET}/search/trials/0007/log"
        assert service.content("search/trials/0007/log") == b"one\ntwo\n"


def test_a_log_that_cannot_be_uploaded_is_said(monkeypatch):
    def refuse(path, _):
        raise OSError(f"{path}: denied")

    monkeypatch.setattr(files, "write_whole", refuse)
    monkeypatch.setattr(files, "exists", lambda _: False)
    with Logs("gs://bucket/search") as logs:
        Path(logs.begin(0)).write_text("one\n")
        assert logs.keep(0) == (
            "its log could not be uploaded: gs://bucket/search/trials/0000/log: denied"
        )


def test_a_log_on_a_disk_stays_where_it_is_written(tmp_path):
    with Logs(str(tmp_path)) as logs:
        path = Path(logs.begin(7))
        path.write_text("one\n")
        assert logs.keep(7) == "" and logs.resolve_destination(7) == str(path)
    assert path == tmp_path / "logs" / "0007.log" and path.read_text() == "one\n"
