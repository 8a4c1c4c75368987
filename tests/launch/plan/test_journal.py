"""The journal of a plan: what is found again, and what is not."""

import pytest

from tftpu.engines.lowered import StateBytes
from tftpu.launch.plan.bounds import Facts
from tftpu.launch.plan.candidates import Candidate, Space
from tftpu.launch.plan.journal import FILE, Journal, compute_key
from tftpu.launch.plan.search import Verdict
from tftpu.launch.settings import config_flags

STATES = {"8 fsdp:8": StateBytes(4, 8, 0), "8 tensor:8": "no layer of the model has units"}
FACTS = Facts(10**15, 16, None, 1 << 29, 30 << 28, 30 << 30, 30 << 30, False, True, STATES)
PLAIN = Candidate("v6e-8", "fsdp:8", "block", 1, "flash")
VERDICT = Verdict(True, 17 << 30, 0, 0.652)


def test_facts_and_verdicts_are_found_again_by_their_key(tmp_path):
    journal = Journal(str(tmp_path), "key")
    journal.write_facts(FACTS)
    journal.write_verdict(PLAIN, VERDICT)
    again = Journal(str(tmp_path), "key")
    assert again.facts == FACTS and again.verdicts == {PLAIN: VERDICT}
    other = Journal(str(tmp_path), "other")
    assert other.facts is None and other.verdicts == {}


def test_a_line_that_was_cut_off_is_left_out_and_the_next_ones_are_kept(tmp_path):
    Journal(str(tmp_path), "key").write_verdict(PLAIN, VERDICT)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + b'{"key": "key", "candi')
    Journal(str(tmp_path), "key").write_facts(FACTS)
    again = Journal(str(tmp_path), "key")
    assert again.verdicts == {PLAIN: VERDICT} and again.facts == FACTS


def test_a_damaged_line_of_many_brackets_is_left_out(tmp_path):
    Journal(str(tmp_path), "key").write_verdict(PLAIN, VERDICT)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"[" * 100_000 + b"\n")
    assert Journal(str(tmp_path), "key").verdicts == {PLAIN: VERDICT}


def key_of(*overrides):
    return compute_key(Space(config_flags.load("python_gpt", list(overrides))))


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=7",
        "model.remat=block",
        "model.attention=flash",
        "cluster.mesh=fsdp:-1",
        "train.gradient_accumulation_steps=2",
    ],
)
def test_the_length_and_what_a_plan_chooses_are_not_part_of_the_key(override):
    assert key_of(f"--config.{override}") == key_of()


@pytest.mark.parametrize(
    "override", ["model.width=64", "data.global_batch_size=64", "cluster.engine=tensorflow"]
)
def test_what_changes_the_programs_is_part_of_the_key(override):
    assert key_of(f"--config.{override}") != key_of()


def test_the_compilers_variables_are_part_of_the_key(monkeypatch):
    before = key_of()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    assert key_of() != before
