"""The journal: numbered files that any number of writers add to without locks."""

import threading

import optuna
import pytest
from optuna.storages import JournalStorage

from tests.support.fakes import fake_storage
from tests.support.fakes.fake_storage import BUCKET, Fault
from tftpu.errors import UserError
from tftpu.launch.search.journal import Journal
from tftpu.storage import files


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path):
    """Yields a folder for a journal, and its service; None for a disk."""
    if request.param == "disk":
        yield str(tmp_path / "study"), None
        return
    with (
        fake_storage.serving() as service,
        fake_storage.in_this_process({"STORAGE_EMULATOR_HOST": service.url}),
    ):
        yield f"gs://{BUCKET}/study", service


def test_what_one_writer_appends_another_reads_from_any_number_on(folder):
    place, _ = folder
    one, other = Journal(place), Journal(place)
    one.append_logs([{"a": 1}, {"a": 2}])
    other.append_logs([{"a": 3}])
    one.append_logs([{"a": 4}])
    assert list(Journal(place).read_logs(0)) == [{"a": n} for n in (1, 2, 3, 4)]
    assert list(other.read_logs(2)) == [{"a": 3}, {"a": 4}]
    assert list(other.read_logs(4)) == []


@pytest.mark.medium
def test_entries_of_writers_at_the_same_time_are_all_kept_in_one_order(folder):
    place, _ = folder
    journals = [Journal(place) for _ in range(4)]

    def write(index):
        for number in range(10):
            journals[index].append_logs([{"writer": index, "number": number}])

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = list(Journal(place).read_logs(0))
    assert len(found) == 40
    for index in range(4):  # each writer's own order stays
        assert [e["number"] for e in found if e["writer"] == index] == list(range(10))
    assert all(list(journal.read_logs(0)) == found for journal in journals)


def test_a_file_that_is_missing_is_named_and_its_number_is_not_taken_again(folder):
    place, _ = folder
    for number in range(3):
        Journal(place).append_logs([{"a": number}])
    lost = f"{place}/00000001.jsonl"
    files.remove(lost)
    for act in (lambda: Journal(place).read_logs(0), lambda: Journal(place).append_logs([{}])):
        with pytest.raises(UserError, match=r"00000001\.jsonl of the search's record is missing"):
            act()


def test_an_answer_that_is_lost_writes_an_entry_once(tmp_path):
    with (
        fake_storage.serving() as service,
        fake_storage.in_this_process({"STORAGE_EMULATOR_HOST": service.url}),
    ):
        place = f"gs://{BUCKET}/study"
        Journal(place).append_logs([{"a": 1}])
        service.faults.append(Fault("POST", "/upload/", "drop"))
        Journal(place).append_logs([{"a": 2}])
        assert list(Journal(place).read_logs(0)) == [{"a": 1}, {"a": 2}]


def test_optuna_shares_a_study_by_it(folder):
    place, _ = folder
    studies = [
        optuna.create_study(
            storage=JournalStorage(Journal(place)), study_name="search", load_if_exists=True
        )
        for _ in range(2)
    ]
    trial = studies[0].ask()
    trial.suggest_float("x", 0, 1)
    studies[1].tell(trial.number, 0.25)
    assert studies[0].best_value == 0.25
    with pytest.raises(ValueError, match="Cannot tell"):  # once only
        studies[0].tell(trial.number, 0.5)


def test_a_record_of_an_earlier_version_is_named_as_such(tmp_path):
    (tmp_path / "00000000.jsonl").write_text('{"a": 1}')
    with pytest.raises(UserError, match=r"00000000\.jsonl .* an earlier version of tftpu wrote it"):
        Journal(str(tmp_path)).read_logs(0)
