"""Ranks on several hosts, and scripts/multi_node.

Two hosts are made inside this machine: network namespaces with names of their own, joined by a virtual cable (no root
needed where users may make namespaces). mpirun reaches the second one through a stand-in for ssh. They share the kernel
and the file system, as hosts of a cluster share the latter. Slurm is a stand-in too: what it would be asked is
recorded, and one task is run.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import pytest

import launcher

from test_ranks import (
    COMM,
    CONFIG,
    MARGIN,
    MPIRUN,
    ROOT,
    TIMEOUT,
    TRAINER,
    Job,
    checkpoint,
    comm,
    curve,
    data,
    read,
    run_words,
    slow_disk,
    steps_saved,
    stopped,
    succeeds,
    train,
)  # noqa: F401

SCRIPTS = ROOT / "scripts/multi_node"
LONG = ["-n", "100000", "-x", "1000000"]
needs_mpi = pytest.mark.skipif(not MPIRUN, reason="no MPI (make toolkit)")
pytestmark = [launcher.on_linux, launcher.thorough]


class Hosts:
    """alpha and beta, until close(). 2 slots each."""

    def __init__(self, folder):
        self.folder, self.holders = folder, []
        try:
            self.hold("alpha", ["unshare", "--map-root-user"])
            self.hold("beta", [*self.inside(0, names=False), "unshare"])
            address = "ip addr add 10.77.0.{} dev cable && ip link set cable up"
            self.run(
                0,
                f"ip link add cable type veth peer name cable netns {self.holders[1].pid} && " + address.format("1/24"),
            )
            self.run(1, address.format("2/24"))
        except (OSError, subprocess.CalledProcessError) as e:
            self.close()
            pytest.skip(f"no network namespaces here: {e}")
        # Stands for ssh with ServerAliveInterval, which the script sets: when the other host is lost it stays until
        # mpirun has ended.
        (folder / "ssh").write_text(f"""#!/bin/sh
while :; do case $1 in -o) shift 2;; -*) shift;; *) break;; esac; done
shift
nsenter -t {self.holders[1].pid} -n -u sh -c "$*"
status=$?
[ $status -le 128 ] || while kill -0 $PPID 2> /dev/null; do sleep 0.2; done
exit $status
""")
        (folder / "ssh").chmod(0o755)
        (folder / "hosts").write_text("# two of them\nalpha slots=2\nbeta slots=2\n")

    def hold(self, name, prefix):
        """A process whose namespaces are the host; it ends with this one."""
        p = subprocess.Popen(
            [*prefix, "--net", "--uts", "sh", "-c", f"hostname {name} && ip link set lo up && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.holders.append(p)
        if p.stdout.readline() != "ready\n":
            raise OSError(p.stderr.read().strip())

    def close(self):
        for p in self.holders:
            p.communicate()

    def inside(self, host, names=True):
        return [
            "nsenter",
            "-t",
            str(self.holders[host].pid),
            "-U",
            "--preserve-credentials",
            *(["-n", "-u"] if names else []),
        ]

    def run(self, host, command):
        subprocess.run([*self.inside(host), "sh", "-c", command], check=True, capture_output=True, text=True)

    def job(self, program, *arguments, environment=()):
        """mpirun of a program on both."""
        launch = [*self.inside(0), MPIRUN, "--hostfile", str(self.folder / "hosts"), "-np", "4"]
        return Job(
            4,
            program,
            *arguments,
            launch=launch,
            environment={
                "TMPDIR": str(self.folder),
                "OMPI_MCA_mpi_yield_when_idle": "1",
                "PRTE_MCA_plm_ssh_agent": str(self.folder / "ssh"),
                "OMPI_MCA_plm_rsh_agent": str(self.folder / "ssh"),
            }
            | dict(environment),
        )

    def script(self, words, output, **variables):
        """scripts/multi_node/mpirun.sh on both."""
        job = Job(
            4,
            SCRIPTS / "mpirun.sh",
            *words,
            launch=self.inside(0),
            environment={
                "TMPDIR": str(self.folder),
                "OMPI_MCA_mpi_yield_when_idle": "1",
                "HOSTFILE": str(self.folder / "hosts"),
                "PROGRAM": str(TRAINER),
                "MPIRUN": MPIRUN,
                "SSH": f"{self.folder}/ssh -o BatchMode=yes",
                "INTERFACE": "cable",
                "OUTPUT": str(output),
            }
            | variables,
        )
        job.program = str(TRAINER)
        return job

    def processes(self, job, host):
        """Those of a job that run there, the ranks and the daemon."""
        name = os.readlink(f"/proc/{self.holders[host].pid}/ns/net")
        return [
            p
            for p in job.processes()
            if os.path.exists(f"/proc/{p}/ns/net") and os.readlink(f"/proc/{p}/ns/net") == name
        ]

    def lose(self, job, how):
        """Something happens to beta. Afterwards the job must end in time; its output, and the status of the
        launcher."""
        there = self.processes(job, 1)
        if how != "frozen":
            self.run(1, "ip link set cable down")
        for p in there if how != "network" else []:
            os.kill(p, signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
        begin = time.time()
        status = job.process.wait(TIMEOUT + MARGIN + 5)
        seconds = time.time() - begin
        if how == "frozen":
            left = set(there) & set(job.processes())
            assert left
            for p in left:  # they find that they are alone, and end; the first to do so ends others
                with contextlib.suppress(ProcessLookupError):
                    os.kill(p, signal.SIGCONT)
        text = job.finish(memory_may_stay=True)[1]
        assert status != 0 and seconds < TIMEOUT + MARGIN, (status, seconds, text)
        print(f"{how}: status {status} after {seconds:.1f} s")
        return text


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    made.close()


@needs_mpi
def test_ranks_know_their_hosts(comm, hosts):
    text = succeeds(hosts.job(COMM, "sums"))
    assert sorted(re.findall(r"rank (\d of 4, local \d of 2):", text)) == [
        "0 of 4, local 0 of 2",
        "1 of 4, local 1 of 2",
        "2 of 4, local 0 of 2",
        "3 of 4, local 1 of 2",
    ], text
    job = hosts.job(COMM, "handshake", "build")
    status, text = job.finish()
    assert (
        status != 0
        and job.seconds < 10
        and re.search("rank 3 on beta has build another, rank 0 on alpha has build", text)
    ), text


@needs_mpi
def test_a_group_on_two_hosts_is_refused(comm, hosts):
    """What a build for GPUs asks for; on CPUs it may be."""
    text = succeeds(hosts.job(COMM, "mesh", 2))
    assert sorted(re.findall(r"rank (\d): the group is on (\w+)", text)) == [
        ("0", "alpha"),
        ("1", "alpha"),
        ("2", "beta"),
        ("3", "beta"),
    ], text
    status, text = hosts.job(COMM, "mesh", 4).finish(20)
    assert status != 0 and "a group of --tp 4 ranks lies on several hosts" in text and "hint: " in text, text


@needs_mpi
def test_hosts_without_a_way_between_them(comm, hosts):
    """MPI is told to use an interface from which nothing reaches the other host: its start would hang. And then mpirun
    has no way either."""
    for host, other in ((0, 1), (1, 0)):
        hosts.run(
            host,
            f"ip link add nowhere type veth peer name wall && ip addr add 10.88.0.{host + 1}/24 dev "
            f"nowhere && ip link set nowhere up && ip link set wall up && "
            f"ip neigh add 10.88.0.{other + 1} lladdr 02:00:00:00:00:01 dev nowhere",
        )
    job = hosts.job(COMM, "loop", TIMEOUT, environment={"OMPI_MCA_btl_tcp_if_include": "nowhere"})
    while len(job.ranks()) < 4:
        time.sleep(0.05)
    time.sleep(0.5)
    hosts.run(1, "ip link set cable down")
    status, text = job.finish(4 * TIMEOUT + MARGIN + 5, memory_may_stay=True)
    assert status != 0 and job.seconds < 4 * TIMEOUT + MARGIN
    assert re.search(
        r"\[rank \d\] error: no progress for 8 s .*\n.*\n.*last collectives.*\n.*#1 start of MPI 0 " r"started", text
    ), text


@needs_mpi
def test_two_hosts_train_as_one(train, hosts, data, tmp_path):
    """By the script, into one folder: the same bits as four ranks of one host. SIGTERM to the script's process group,
    as from timeout(1), saves and stops; started again, it goes on."""
    succeeds(train(4, "one", "-n", "6", "-u", "700", "-q", "0.1", "-c", "0.1", "-sl", "0"))
    words = run_words(tmp_path / "two", "-n", "6", "-i", data / "train_*.bin", "-j", data / "val.bin")
    text = succeeds(hosts.script(words, tmp_path / "two"))
    assert "ranks     4, 2 of them on this host" in text and steps_saved(tmp_path / "two") == [6, 12]
    assert curve(tmp_path / "two") == curve(tmp_path / "one") and checkpoint(tmp_path / "two", 12) == checkpoint(
        tmp_path / "one", 12
    )
    again = ["-y", "1", "-x"]
    job = hosts.script([*words, *again, "1000000"], tmp_path / "two").wait_for("step     14/")
    os.killpg(job.process.pid, signal.SIGTERM)
    text = stopped(job)
    saved = steps_saved(tmp_path / "two")[-1]
    assert re.search(rf"stopped by .* after step {saved}; --resume 1", text) and saved >= 14
    assert f"step {saved + 1:6d}/" in succeeds(hosts.script([*words, *again, str(saved + 2)], tmp_path / "two"))


@needs_mpi
def test_a_long_sample_is_no_hang(hosts, data, tmp_path):
    """Of another host: longer than the time-out."""
    words = run_words(
        tmp_path / "run",
        "-e",
        "d2,channels=64,vocab=256,seq=256",
        "-d",
        str(4 * 32),
        "-x",
        "2",
        "-s",
        "2",
        "-g",
        "10000",
        "--temperature",
        "0",
        "--debug",
        "kv-cache=0",
        "--timeout",
        "2",
        "-i",
        data / "train_*.bin",
        "-j",
        data / "val.bin",
    )
    begin = time.time()
    text = succeeds(hosts.job(TRAINER, *words))
    assert "(10000 tokens, " in text, text
    print(f"{time.time() - begin:.1f} s")


@needs_mpi
@pytest.mark.parametrize("save_async", [0, 1])
def test_a_slow_disk_is_no_hang(hosts, data, slow_disk, tmp_path, save_async):
    """Of one host: it writes for longer than the time-out after the other."""
    words = run_words(
        tmp_path / "run",
        "-e",
        "llama3.2:1B,layers=6,channels=64,heads=4,kv_heads=2,vocab=256,seq=32",
        "-d",
        str(4 * 32),
        "-x",
        "2",
        "-n",
        "2",
        "--debug",
        f"save-async={save_async}",
        "--timeout",
        TIMEOUT,
        "-i",
        data / "train_*.bin",
        "-j",
        data / "val.bin",
    )
    text = succeeds(hosts.job(TRAINER, *words, environment=slow_disk))
    assert float(re.search(r"checkpoint .* written in ([\d.]+) s", text)[1]) > 1.2 * TIMEOUT, text


@needs_mpi
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_losing_a_rank_of_another_host(comm, hosts, how):
    job = hosts.job(COMM, "loop", TIMEOUT).wait_for("started")
    text, seconds = job.hit(3, how)
    named = r"\[rank 2\] error: (a rank is lost|no progress for .*): rank 3 " + (
        r"\(process \d+\) gives no sign of life" if how == signal.SIGSTOP else "has ended: it was killed"
    )
    assert re.search(named, text), text
    assert not re.search(r"error: .*: rank [012] .*(behind|has ended|no sign)", text), text  # nobody else is accused
    if how == signal.SIGSTOP:
        assert re.search(
            r"\[rank 0\] error: no progress .*: every rank of this host waits for others: .*rank [01] "
            r"for rank [23] on beta",
            text,
        ), text
    print(f"{how.name}: all ended after {seconds:.1f} s")


@needs_mpi
def test_a_rank_of_another_host_never_comes(comm, hosts):
    status, text = hosts.job(COMM, "late", 3, TIMEOUT).finish(TIMEOUT + MARGIN + 5)
    assert status != 0
    # both of beta see it,
    assert len(re.findall(r"rank 3 \(process \d+\) is behind: it began 1 collectives, others 2", text)) == 2, text
    # both of alpha that it is none of them
    assert len(re.findall(r"every rank of this host waits for others: ranks 2 to 3 on beta", text)) == 2, text


@needs_mpi
@pytest.mark.parametrize("how", ["network", "power", "frozen"])
def test_losing_a_host(hosts, data, tmp_path, how):
    """The cable is pulled; the host is gone without a word; the host's kernel answers but nothing runs. mpirun alone
    would wait for ever."""
    words = run_words(
        tmp_path / "run", *LONG, "-i", data / "train_*.bin", "-j", data / "val.bin", "--timeout", str(TIMEOUT)
    )
    text = hosts.lose(hosts.job(TRAINER, *words).wait_for("step      3/"), how)
    assert re.search(
        r"\[rank [01]\] error: no progress .*: every rank of this host waits for others: .*rank [01] "
        r"for rank [23] on beta",
        text,
    ), text


@needs_mpi
def test_mpirun_that_loses_a_host_fails(hosts, data, tmp_path):
    """mpirun asks whether the host is there (KEEPALIVE) and names it, but ends with status 0: the script does not."""
    words = run_words(tmp_path / "run", *LONG, "-i", data / "train_*.bin", "-j", data / "val.bin")
    job = hosts.script(words, tmp_path / "run").wait_for("step      3/")
    for p in hosts.processes(job, 1):
        os.kill(p, signal.SIGKILL)
    status, text = job.finish(20, memory_may_stay=True)
    assert status != 0 and re.search("Remote daemon: .* on node beta", text), text
    assert status != 1 or "error: the run did not come to its end" in text


# ---- scripts


def accepts(program, words):
    """The option parser reads all words: --help is the last."""
    run = subprocess.run([program, *words, "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "usage:" in run.stdout, run.stderr


@pytest.mark.parametrize("name", ["mpirun.sh", "slurm.sbatch"])
def test_scripts_are_bash(name):
    run = subprocess.run(["bash", "-n", SCRIPTS / name], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert os.access(SCRIPTS / name, os.X_OK)


RECORDER = f"""#!{sys.executable}
import os, sys
with open(os.environ["RECORD"], "a") as f:
    passed_on = ("NCCL_", "OMPI_ALLOW_", "OMPI_MCA_", "PRTE_MCA_", "OMP_", "HWLOC_")
    known = {{k: v for k, v in os.environ.items() if k.startswith(passed_on)}}
    f.write(repr((os.path.basename(sys.argv[0]), sys.argv[1:], known)) + "\\n")
words = sys.argv[1:]
if sys.argv[0].endswith("srun") and os.environ.get("RUN"):
    while words[0].startswith("-"):
        words.pop(0)
    os.execvp(words[0], words)
"""


@needs_mpi
def test_a_lost_host_s_lock_is_waited_for(hosts, data, tmp_path):
    """As a file server keeps it for a while: a job on several hosts goes on when it is gone."""
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run/.lock.train", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = hosts.job(
            TRAINER, *run_words(tmp_path / "run", "-i", data / "train_*.bin", "-j", data / "val.bin", "-x", "2")
        ).wait_for("waiting up to 120 s: another run")
    assert "step      2/2" in succeeds(job)


@pytest.fixture
def recorded(tmp_path):
    """recorded(command, **variables) -> (status, output, [(name, words, environment), ...]): srun, scontrol and mpirun
    only note how they are called; with RUN=1 srun runs its program once."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("srun", "scontrol", "mpirun"):
        (tools / name).write_text(RECORDER)
        (tools / name).chmod(0o755)

    def run(*command, **variables):
        record = tmp_path / "record"
        record.unlink(missing_ok=True)
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "OMPI_", "PRTE_", "SLURM_", "HWLOC_"))
        }
        p = subprocess.run(
            [str(c) for c in command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=environment
            | {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(record)}
            | {k: str(v) for k, v in variables.items()},
        )
        return (
            p.returncode,
            p.stdout + p.stderr,
            [eval(line) for line in record.read_text().splitlines()] if record.exists() else [],
        )

    return run


@pytest.fixture
def sbatch(recorded, tmp_path):
    """What sbatch does: runs a copy of the file from elsewhere."""
    copy = tmp_path / "spool"
    shutil.copy(SCRIPTS / "slurm.sbatch", copy)
    return lambda *words, **variables: recorded(
        "bash", copy, *words, **{"SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": 42, "SLURM_CPUS_PER_TASK": 8} | variables
    )


def test_what_slurm_is_asked(sbatch, tmp_path):
    lines = (SCRIPTS / "slurm.sbatch").read_text().splitlines()
    asked = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH "))
    assert asked["ntasks-per-node"] == asked["gpus-per-node"] and "requeue" in asked and asked["open-mode"] == "append"
    assert re.fullmatch(r"USR1@\d+", asked["signal"])  # to the tasks: a B: would send it to this script alone
    status, text, calls = sbatch("-x", "7", OUTPUT=tmp_path / "none", INTERFACE="ib0")
    ((name, words, environment),) = calls
    assert status == 1 and "did not come to its end" in text  # srun did nothing and said all was well
    assert name == "srun" and {"--mpi=pmix", "--kill-on-bad-exit=1"} <= set(words)
    assert (
        environment["NCCL_NVLS_ENABLE"] == "0"
        and environment["NCCL_SOCKET_IFNAME"] == environment["OMPI_MCA_btl_tcp_if_include"] == "ib0"
        and environment["OMP_NUM_THREADS"] == "8"
    )
    program = words.index("./train_gpt2cu")
    assert words[-2:] == ["-x", "7"]
    accepts(TRAINER, words[program + 1 :])


def test_slurm_saves_and_goes_on(sbatch, data, tmp_path):
    """The time limit comes (srun's task gets SIGUSR1): saved and queued again; that job ends the run and is not, nor
    one that made no step."""
    words = run_words(tmp_path / "run", "-n", "100000", "-i", data / "train_*.bin", "-j", data / "val.bin")
    slow = tmp_path / "slow"
    slow.write_text(
        f"#!/bin/sh\n"
        f'{TRAINER} "$@" -x 1000000 $MORE &\n'
        f"while ! grep -q \"$UNTIL\" '{tmp_path}/run/main.jsonl' 2> /dev/null; do sleep 0.05; done\n"
        f"kill -USR1 $!; wait $!\n"
    )
    slow.chmod(0o755)
    (tmp_path / "long.bin").write_bytes(struct.pack("<256i", 20240520, 1, 1 << 24, 256, 1, *[0] * 251) + bytes(2 << 24))
    # in an evaluation that takes longer than the limit
    status, text, calls = sbatch(*words, RUN=1, PROGRAM=slow, MORE=f"-v 1 -m -1 -j {tmp_path}/long.bin", UNTIL="start")
    assert status == 1 and [c[0] for c in calls] == ["srun"] and "before the first step" in text, text
    status, text, calls = sbatch(*words, RUN=1, PROGRAM=slow, MORE="", UNTIL='"step":5,')
    assert status == 0 and [c[0] for c in calls] == ["srun", "scontrol"] and calls[1][1] == ["requeue", "42"], text
    saved = steps_saved(tmp_path / "run")[-1]
    status, text, calls = sbatch(*words, "-x", saved + 2, RUN=1, OUTPUT=tmp_path / "run", PROGRAM=TRAINER)
    assert status == 0 and [c[0] for c in calls] == ["srun"] and f"step {saved + 1:6d}/{saved + 2}" in text, text
    status, text, calls = sbatch(*words, "-b", "nonsense", RUN=1, OUTPUT=tmp_path / "run", PROGRAM=TRAINER)
    assert status != 0 and [c[0] for c in calls] == ["srun"], text


@pytest.mark.parametrize(
    "given", [["-o", "{}"], ["--output", "{}"], ["--output={}"], ["-o", "elsewhere", "--output={}"]]
)
def test_the_log_is_looked_for_where_the_run_writes(sbatch, recorded, data, tmp_path, given):
    """Its last line says whether the run came to its end."""
    (tmp_path / "hosts").write_text("a\n")
    for k, start in enumerate(
        (
            sbatch,
            lambda *words, **more: recorded(
                SCRIPTS / "mpirun.sh", *words, HOSTFILE=tmp_path / "hosts", **more | {"MPIRUN": more["PROGRAM"]}
            ),
        )
    ):
        folder = tmp_path / f"run{k}"
        folder.mkdir()
        (folder / "main.jsonl").write_text('{"event":"end","step":1}\n')  # an earlier run's
        (tmp_path / "logs").write_text(
            f'#!/bin/sh\n[ $LOGS = 0 ] || echo \'{{"event":"end","step":2}}\' >> {folder}/main.jsonl\n'
        )
        (tmp_path / "logs").chmod(0o755)
        for logs in 0, 1:
            status, text, _ = start(
                "-x",
                "1",
                *(w.format(folder) for w in given),
                "-b",
                "1",
                OUTPUT=tmp_path / "none",
                RUN=1,
                PROGRAM=tmp_path / "logs",
                LOGS=logs,
            )
            assert status == 1 - logs and ("did not come to its end" in text) == (logs == 0), text


def test_what_mpirun_is_asked(recorded, tmp_path):
    script = SCRIPTS / "mpirun.sh"
    status, text, calls = recorded(script, HOSTFILE=tmp_path / "none")
    assert status == 1 and "hint: write one" in text and not calls
    (tmp_path / "hosts").write_text("# ours\na slots=8\n\nb slots=8 max-slots=8\nc\n")
    status, text, calls = recorded(
        script,
        "-x",
        "7",
        HOSTFILE=tmp_path / "hosts",
        MPIRUN="mpirun",
        INTERFACE="eth0",
        OUTPUT=tmp_path / "none",
        NCCL_DEBUG="INFO",
    )
    ((name, words, environment),) = calls
    assert status == 1 and "did not come to its end" in text and name == "mpirun"
    assert words[:4] == ["--hostfile", str(tmp_path / "hosts"), "-np", "17"]
    passed = {words[i + 1] for i, w in enumerate(words) if w == "-x" and not words[i + 1].isdigit()}
    assert {"NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG"} <= passed
    assert (
        environment["NCCL_NVLS_ENABLE"] == "0"
        and environment["NCCL_SOCKET_IFNAME"] == environment["OMPI_MCA_btl_tcp_if_include"] == "eth0"
    )
    assert (
        "ServerAliveInterval" in environment["PRTE_MCA_plm_ssh_agent"] and environment["HWLOC_COMPONENTS"] == "-opencl"
    )
    # as root mpirun starts nothing by itself
    root, note = os.geteuid() == 0, "note: mpirun may run as root here"
    allowed = [environment.get("OMPI_ALLOW_RUN_AS_ROOT" + more) == "1" for more in ("", "_CONFIRM")]
    assert allowed == [root, root] and (note in text) == root
    both = {"HOSTFILE": tmp_path / "hosts", "OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}
    assert note not in recorded(script, MPIRUN="mpirun", OUTPUT=tmp_path / "none", **both)[1]
    status, text, calls = recorded(script, MPIRUN=tmp_path / "gone", **both)
    assert status == 1 and f"there is no {tmp_path}/gone to start ranks with" in text and "hint: make mpi" in text
    assert not calls
    accepts(TRAINER, words[words.index("./train_gpt2cu") + 1 :])
