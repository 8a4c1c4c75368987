"""`tftpu launch gke` with Kubernetes' real client against a cluster on loopback."""

import itertools
import time
from types import SimpleNamespace

import pytest
import yaml

from tests.support.fakes.fake_google_cloud import SECRET, SECRETS, storage
from tests.support.fakes.fake_kubernetes import RUNS, Kubernetes, Moment, ended, pod, serving
from tests.support.interrupts import interrupt_waiting
from tftpu.launch import main
from tftpu.launch.cloud import waiting
from tftpu.launch.cloud.gke import follow

FLAGS = (
    *("--config=digits_resnet", "--config.model.norm_batch=8", "--config.cluster.engine=jax"),
    *("--slice=v5e-16", "--workdir=gs://b/run", "--namespace=research"),
)
ALL_RUN = Moment([pod(i, RUNS) for i in range(4)])
ALL_ENDED = Moment([pod(i, ended(0)) for i in range(4)], "Completed", "jobset completed")
QUEUED = Moment([pod(i) for i in range(4)])


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    fake = Kubernetes()
    fake.moments = [QUEUED, ALL_RUN, ALL_ENDED]
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.3)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with serving(fake, tmp_path) as kubeconfig, storage({}) as host:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        yield fake


def launch(*flags: str) -> int:
    return main.main(["launch", "gke", *FLAGS, *flags])


def attach(*words: str) -> int:
    return main.main(["launch", "gke-attach", *words])


def name_of(cluster: Kubernetes) -> str:
    return cluster.created[0]["metadata"]["name"]


def ends(cluster: Kubernetes) -> str:
    return f"kubectl delete jobset {name_of(cluster)} --namespace=research"


def stamped(*lines: str) -> str:
    return "".join(f"2026-11-22T10:00:{i:02}.5Z {line}\n" for i, line in enumerate(lines))


def states(said: str) -> list[str]:
    return [line.split("  ", 1)[1] for line in said.splitlines() if line[2:3] == line[5:6] == ":"]


@pytest.mark.medium
def test_the_dry_run_prints_the_request_that_is_sent(cluster, capsys):
    assert launch("--dry_run", "--spot", "--labels=team=vision") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert not cluster.created
    assert launch("--spot", "--labels=team=vision") == 0
    [sent] = cluster.created
    name = sent["metadata"]["name"]
    assert (
        yaml.safe_load(yaml.safe_dump(printed).replace(printed["metadata"]["name"], name)) == sent
    )


def test_it_follows_the_first_pod_and_all_states_to_the_end(cluster, capsys):
    cluster.logs["0-00000"] = stamped("step 60", "step 120")
    cluster.logs["1-00000"] = stamped("not shown")
    assert launch() == 0
    said = capsys.readouterr().out
    assert f"This ends it:   {ends(cluster)}" in said
    assert "code-" in said and "constraints.txt" in said  # what travels
    waits = f"{name_of(cluster)}-slice-0-0-00000 waits: Unschedulable: 0/3 nodes are available"
    queued, run, done = states(said)
    assert queued.startswith(f"0 of 4 pods run; {waits}")
    assert run == "4 of 4 pods run"
    assert done == "0 of 4 pods run; 4 ended with code 0"
    assert said.count("step 60\nstep 120\n") == 1
    assert "not shown" not in said
    assert "The run has ended, and nothing runs any more." in said
    assert f"kubectl logs --selector=jobset.sigs.k8s.io/jobset-name={name_of(cluster)}" in said


def test_new_lines_are_printed_once_and_in_their_order(cluster, capsys):
    cluster.moments = [ALL_RUN, ALL_RUN, ALL_RUN, ALL_ENDED]
    parts = [stamped("a", "b"), stamped("a", "b"), stamped("a", "b", "c"), stamped(*"abcd")]
    original = cluster.log

    def growing(name, query):
        cluster.logs["0-00000"] = parts.pop(0) if len(parts) > 1 else parts[0]
        return original(name, query)

    cluster.log = growing
    assert launch() == 0
    assert "a\nb\nc\nd\n" in "".join(
        line for line in capsys.readouterr().out.splitlines(keepends=True) if len(line) == 2
    )
    assert "sinceSeconds" not in cluster.asked[0]
    assert int(cluster.asked[-1]["sinceSeconds"][0]) >= 60


def test_times_with_fewer_digits_are_in_order(cluster, capsys):
    cluster.moments = [ALL_RUN, ALL_ENDED]
    times = ("00Z", "00.1Z", "00.12Z", "00.123456789Z", "01Z")
    lines = [f"2026-11-22T10:00:{at} line {at}\n" for at in times]
    cluster.logs["0-00000"] = "".join(lines)
    assert launch() == 0
    said = capsys.readouterr().out
    assert "".join(f"line {at}\n" for at in times) in said


def test_with_detach_it_returns_at_once_and_says_what_runs(cluster, capsys):
    assert launch("--detach") == 0
    said = capsys.readouterr().out
    assert not cluster.looks
    assert f"`tftpu launch gke-attach {name_of(cluster)} --namespace=research`" in said
    assert f"`{ends(cluster)}` ends it" in said


def test_a_run_is_followed_again(cluster, capsys):
    assert launch("--detach") == 0
    cluster.logs["0-00000"] = stamped("step 60")
    capsys.readouterr()
    assert attach(name_of(cluster), "--namespace=research", "--context=here") == 0
    assert "step 60\n" in capsys.readouterr().out


def test_there_may_be_nothing_to_follow(cluster, capsys):
    assert attach("gone", "--namespace=research") == 2
    error = capsys.readouterr().err
    assert "There is no JobSet gone in the namespace research" in error
    assert error.count("\n") == 1


def test_one_pod_never_starts_and_the_jobset_is_deleted_in_time(cluster, capsys, monkeypatch):
    image = {"waiting": {"reason": "ImagePullBackOff", "message": 'pulling "i"\nfailed'}}
    stuck = [*(pod(i, RUNS) for i in (0, 1, 3)), pod(2, image)]
    cluster.moments = [QUEUED, Moment(stuck)]
    pass_quickly(monkeypatch)
    assert launch("--queue_timeout=10m") == 2
    said = capsys.readouterr()
    why = f'{name_of(cluster)}-slice-0-2-00000 waits: ImagePullBackOff: pulling "i" failed'
    assert states(said.out)[-1] == f"3 of 4 pods run; {why}"
    assert f"Only 3 of 4 pods started in the time that --queue_timeout allows. {why}." in said.err
    assert cluster.deleted == [name_of(cluster)]


def pass_quickly(monkeypatch) -> None:
    """Lets a minute pass at each look at the clock."""
    minutes = itertools.count(step=60)
    clock = SimpleNamespace(
        monotonic=lambda: next(minutes), sleep=time.sleep, strftime=time.strftime
    )
    monkeypatch.setattr(follow, "time", clock)


@pytest.mark.medium
def test_the_time_in_the_queue_counts_anew_after_a_restart_and_not_while_pods_run(
    cluster, monkeypatch
):
    taken = Moment([pod(i, attempt=1) for i in range(4)], restarts=1)
    cluster.moments = [*[QUEUED] * 6, *[ALL_RUN] * 30, *[taken] * 6, ALL_RUN, ALL_ENDED]
    pass_quickly(monkeypatch)
    assert launch("--queue_timeout=10m") == 0
    cluster.moments = [*[QUEUED] * 6, *[taken] * 6, ALL_RUN, ALL_ENDED]
    assert attach(name_of(cluster), "--namespace=research") == 0
    cluster.moments = [*[QUEUED] * 6, *[taken] * 6, ALL_RUN, ALL_ENDED]
    assert launch("--queue_timeout=10m") == 0
    assert not cluster.deleted


def test_pods_of_an_attempt_that_has_ended_do_not_count_as_started(cluster, capsys, monkeypatch):
    lost = [pod(i, ended(69)) for i in range(4)]  # JobSet deletes them after it counted the restart
    again = [*(pod(i, RUNS, attempt=1) for i in range(3)), pod(3, attempt=1)]
    cluster.moments = [ALL_RUN, Moment(lost, restarts=1), Moment(again, restarts=1)]
    pass_quickly(monkeypatch)
    assert launch("--queue_timeout=10m") == 2
    said = capsys.readouterr()
    assert "Only 3 of 4 pods started in the time that --queue_timeout allows." in said.err
    assert cluster.deleted == [name_of(cluster)]
    assert "0 of 4 pods run (restart 1 of 10)" in states(said.out)


def test_machines_that_are_taken_away_again_are_waited_for_anew(cluster, capsys):
    taken = Moment([pod(i, attempt=1) for i in range(4)], restarts=1)
    again = Moment([pod(i, RUNS, attempt=1) for i in range(4)], restarts=1)
    cluster.moments = [QUEUED, taken, again, ALL_ENDED]
    assert launch("--spot") == 0
    said = capsys.readouterr().out
    assert "0 of 4 pods run (restart 1 of 10); " in said
    assert "4 of 4 pods run (restart 1 of 10)" in said
    assert not cluster.deleted


def test_a_preempted_run_resumes_and_its_new_first_pod_is_shown(cluster, capsys):
    lost = Moment([pod(0, ended(69)), pod(1, ended(75)), pod(2, ended(69)), pod(3, ended(69))])
    again = Moment([pod(i, RUNS, attempt=1) for i in range(4)], restarts=1)
    cluster.moments = [ALL_RUN, lost, again, Moment([*again.pods], "Completed", restarts=1)]
    cluster.logs = {"0-00000": stamped("step 60"), "0-00001": stamped("resumed at step 60")}
    assert launch("--spot") == 0
    said = capsys.readouterr().out
    assert said.index("step 60\n") < said.index("resumed at step 60\n")
    assert "0 of 4 pods run; 3 ended with code 69; 1 ended with code 75" in said


def test_the_first_pod_of_the_first_slice_is_shown(cluster, capsys):
    pods = [pod(i, RUNS, job=job) for job in (1, 0) for i in range(4)]
    cluster.moments = [Moment(pods), Moment(pods, "Completed")]
    cluster.logs = {"0-00000": stamped("step 60"), "1-0-00000": stamped("of the second slice")}
    assert launch("--slice=2xv5e-16", "--config.model.norm_batch=4") == 0
    said = capsys.readouterr().out
    assert "step 60" in said and "of the second slice" not in said
    assert "8 of 8 pods run" in said


def test_one_pod_fails_and_is_shown(cluster, capsys):
    codes = [ended(69), ended(69), ended(1), ended(143)]
    failed = [pod(i, code) for i, code in enumerate(codes)]
    message = "jobset failed due to reaching max number of restarts"
    cluster.moments = [ALL_RUN, Moment(failed, "Failed", message, restarts=10)]
    cluster.logs["2-00000"] = stamped(*(f"line {i}" for i in range(30)))
    assert launch() == 2
    said = capsys.readouterr()
    name = f"{name_of(cluster)}-slice-0-2-00000"
    assert f"The last lines of {name}:\nline 10\n" in said.out
    assert f"The run failed: {name} ended with code 1 ({message}). Nothing runs" in said.err
    assert said.err.count("\n") == 1


def test_a_failure_without_pods_says_what_the_cluster_does(cluster, capsys):
    cluster.moments = [QUEUED, Moment([], "Failed", "jobset failed: DeadlineExceeded")]
    assert launch() == 2
    assert "The run failed: jobset failed: DeadlineExceeded. Nothing" in capsys.readouterr().err


def test_a_suspended_jobset_is_called_so(cluster, capsys):
    cluster.moments = [Moment([], "Suspended"), ALL_RUN, ALL_ENDED]
    assert launch() == 0
    assert states(capsys.readouterr().out)[0] == "0 of 4 pods run; suspended"


def test_a_jobset_that_somebody_deletes_ends_the_wait(cluster, capsys):
    cluster.moments = [ALL_RUN]
    look = cluster.look

    def deleted_at_the_third(name):
        if cluster.looks == 2:
            cluster.alive.clear()
        return look(name)

    cluster.look = deleted_at_the_third
    assert launch() == 2
    assert "it was deleted, or never existed. None of its pods runs." in capsys.readouterr().err


def test_the_network_is_lost_after_the_creation(cluster, capsys):
    cluster.loses_answer = True
    cluster.after_creation = {"GET": [0] * 10_000}
    assert launch() == 2
    error = capsys.readouterr().err
    assert f"The JobSet {name_of(cluster)} may run, and incur costs; this ends it: " in error
    assert ends(cluster) in error
    assert cluster.alive


def test_an_answer_lost_after_the_creation(cluster, capsys):
    cluster.loses_answer = True
    assert launch() == 0
    assert len(cluster.created) == 1
    assert "looking for it" in capsys.readouterr().out


def test_a_request_that_never_arrived(cluster, capsys):
    cluster.faults["POST"] = [0]
    assert launch() == 2
    error = capsys.readouterr().err
    assert "the request never arrived. If it appears later, end it with kubectl delete" in error
    assert not cluster.alive


def test_the_network_is_lost_while_it_trains(cluster, capsys):
    cluster.moments = [ALL_RUN]
    look = cluster.look

    def lost_at_the_third(name):
        if cluster.looks == 2:
            cluster.faults["GET"] = [503, 0, 500] * 1000
        return look(name)

    cluster.look = lost_at_the_third
    assert launch() == 2
    error = capsys.readouterr().err
    assert f"The JobSet {name_of(cluster)} keeps running, and incurs costs" in error
    assert f"`{ends(cluster)}` ends it" in error
    assert cluster.alive


def test_credentials_that_expire_while_it_trains_do_not_hide_the_run(cluster, capsys):
    cluster.after_creation = {"GET": [401]}
    assert launch() == 2
    error = capsys.readouterr().err
    assert "did not accept the credentials (watching the JobSet)" in error
    assert f"The JobSet {name_of(cluster)} keeps running, and incurs costs" in error
    assert error.count("\n") == 1


def test_a_deletion_that_is_refused_names_what_runs_on(cluster, capsys, monkeypatch):
    cluster.moments = [QUEUED]
    cluster.faults["DELETE"] = [403]
    pass_quickly(monkeypatch)
    assert launch("--queue_timeout=10m") == 2
    error = capsys.readouterr().err
    assert "Permission denied (deleting the JobSet)" in error
    assert f"`{ends(cluster)}` ends it" in error
    assert cluster.alive


def test_a_lost_network_that_recovers_is_tolerated(cluster, capsys, monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE_S", 120)
    cluster.after_creation = {"GET": [0, 503, 429]}
    assert launch() == 0
    said = capsys.readouterr().out
    assert said.count("Trying again for 2 minutes.") == 1


def test_an_interrupt_leaves_the_run_and_says_so(cluster, capsys, monkeypatch):
    interrupt_waiting(monkeypatch)
    assert launch() == 0
    said = capsys.readouterr().out
    assert f"No longer watching. The JobSet {name_of(cluster)} keeps running, and incurs" in said
    assert f"`{ends(cluster)}` ends it" in said
    assert cluster.alive


@pytest.mark.medium
@pytest.mark.parametrize(
    ("method", "status", "says"),
    [
        ("GET", 0, "No answer from the cluster (looking for JobSets)"),
        ("GET", 503, "fault 503. Is the right context chosen (see `kubectl config get-contexts`"),
        ("GET", 401, "did not accept the credentials (looking for JobSets): run `gcloud auth"),
        ("GET", 404, "does not know JobSets (fault 404.) Install JobSet: https://jobset.sigs"),
        ("POST", 401, "did not accept the credentials (creating the JobSet): run `gcloud auth"),
        ("POST", 403, "Permission denied (creating the JobSet): fault 403. Ask the owner"),
        ("POST", 404, "no namespace research (fault 404.) Create it with `kubectl create"),
        ("POST", 422, "The cluster refused the request (creating the JobSet): fault 422."),
    ],
)
def test_a_rejected_request_fails_with_one_clear_line(cluster, capsys, method, status, says):
    cluster.faults[method] = [status]
    assert launch() == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not cluster.alive


@pytest.mark.parametrize(
    ("flags", "kubeconfig", "says"),
    [
        (["--context=there"], None, "No cluster can be reached"),
        ([], "/nonexistent/kubeconfig", "gcloud container clusters get-credentials"),
    ],
)
def test_without_a_cluster_it_says_how_to_name_one(
    cluster, capsys, monkeypatch, flags, kubeconfig, says
):
    if kubeconfig:
        monkeypatch.setenv("KUBECONFIG", kubeconfig)
    assert launch(*flags) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_bucket_that_cannot_be_written_creates_nothing(cluster, capsys, monkeypatch):
    with storage({}, granted=["storage.objects.get"]) as host:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        assert launch() == 2
    assert "storage.objects.create" in capsys.readouterr().err
    assert not cluster.created


def test_no_secret_leaves_this_machine(cluster, capsys, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, SECRET)
    assert launch() == 0
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err + repr(cluster.created)
