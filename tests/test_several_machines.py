"""Two machines: as two processes of one, though one is switched off.

A machine is a network of its own with a name of its own, made by Linux'
namespaces on this one; a virtual cable lies between the two. Its disk is this
one's, as if shared.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import one_of_several
import pytest
from helpers import ONE_THREAD, SCRIPT, assert_same_run, training_command
from test_distributed import LEVERS, STEPS, run_of_two

NAMES = "one", "two"
ADDRESSES = "10.77.0.1", "10.77.0.2"
HOSTS = "127.0.0.1 localhost\n" + "".join(
    f"{address} machine-{name}\n" for address, name in zip(ADDRESSES, NAMES)
)
INSIDE = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def ip(*words):
    """Run iproute2's ip."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


# Or torch 2.13 keeps waiting: a machine that comes later never hears where to
# meet, since the first says so only once.
REJOIN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Machines:
    """Two machines that know each other by name."""

    def __init__(self, folder):
        self.hosts = folder / "hosts"
        self.hosts.write_text(HOSTS, encoding="utf-8")
        self.spaces = [f"book-{os.getpid()}-{name}" for name in NAMES]
        self.cable = [f"b{os.getpid()}-{name}" for name in NAMES]

    def __enter__(self):
        try:
            self.build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def build(self):
        for space in self.spaces:
            ip("netns", "add", space)
        ip("link", "add", self.cable[0], "type", "veth",
           "peer", self.cable[1])  # fmt: skip
        for space, end, address in zip(self.spaces, self.cable, ADDRESSES):
            ip("link", "set", end, "netns", space)
            ip("-n", space, "address", "add", f"{address}/24", "dev", end)
            ip("-n", space, "link", "set", "lo", "up")
        for i in range(2):
            self.plug(i, "up")

    def plug(self, i, state):
        """Put the cable in, or pull it out, at machine i: "up", "down"."""
        ip("-n", self.spaces[i], "link", "set", self.cable[i], state)

    def __exit__(self, *error):
        for i, space in enumerate(self.spaces):
            self.switch_off(i)
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", space)

    def command(self, i, *words):
        """How `words` are run on machine i."""
        inside = ["sh", "-ec", INSIDE, "sh", f"machine-{NAMES[i]}", self.hosts]
        outside = ["ip", "netns", "exec", self.spaces[i], "unshare", "--uts"]
        return [*map(str, [*outside, *inside, *words])]

    def torchrun(self, i, *arguments, restarts=0, output=None, **environment):
        """Start torchrun on machine i, with one process there."""
        launch = ["-m", "torch.distributed.run", "--nnodes=2"]
        launch += ["--nproc-per-node=1", "--rdzv-backend=c10d"]
        launch += ["--rdzv-endpoint=machine-one:29500", "--rdzv-id=1"]
        launch += [f"--max-restarts={restarts}", one_of_several.__file__]
        path = {"PYTHONPATH": str(SCRIPT.parent)}
        with open(output, "a", encoding="utf-8") as log:
            return subprocess.Popen(
                self.command(i, sys.executable, *launch, *arguments),
                env=ONE_THREAD | path | environment, stdout=log, stderr=log,
            )  # fmt: skip

    def switch_off(self, i):
        """Kill all that runs on machine i, at once."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.spaces[i]], capture_output=True
        )
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two machines, where this one may make them: as root, on Linux."""
    try:
        asked = ["unshare", "--net", "--uts", "ip", "link"]
        subprocess.run(asked, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no networks of one's own: needs Linux, root, iproute2")
    with Machines(tmp_path_factory.mktemp("machines")) as two:
        command = two.command(0, "true")
        subprocess.run(command, check=True, capture_output=True)
        yield two


whole = pytest.fixture(run_of_two, scope="module")


def finish(machines, launches, log, patience=240):
    """Wait for both; what they have said."""
    end = time.monotonic() + patience
    try:
        for launch in launches:
            launch.wait(max(0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pytest.fail(log.read_text("utf-8"))
    finally:
        for i, launch in enumerate(launches):
            machines.switch_off(i)
            launch.wait()
    said = log.read_text("utf-8")
    assert [launch.returncode for launch in launches] == [0, 0], said
    return said


def wait_for(file, launch, log):
    """Wait until a process makes a file, for as long as `launch` lives."""
    end = time.monotonic() + 300
    while not file.exists():
        assert launch.poll() is None, log.read_text("utf-8")
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
def test_two_machines_train_as_two_processes_of_one(
    machines, few, whole, tmp_path
):
    """Also where the process of each machine is killed once."""
    command = training_command(few, tmp_path / "run", STEPS, *LEVERS)
    log, killed = tmp_path / "log", tmp_path / "killed"
    options = {"restarts": 5, "output": log, "DIE": f"{killed} 1@6 0@10"}
    launches = [machines.torchrun(i, *command, **options) for i in range(2)]
    said = finish(machines, launches, log)
    for words in (
        "each of 2 processes",
        "50 training pairs",
        "resuming after update 4",
        "resuming after update 8",
        "done: ",
    ):
        assert words in said
    assert all((tmp_path / f"killed-{step}").exists() for step in (6, 10))
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_machine_that_was_off_joins_again(machines, few, whole, tmp_path):
    """The process of one stands still after update 6, and it is cut off."""
    command = training_command(few, tmp_path / "run", STEPS, *LEVERS)
    log, halted = tmp_path / "log", tmp_path / "halted"
    options = {"restarts": 5, "output": log} | REJOIN
    stop = {"HALT": f"{halted} 0@6 1@6"}  # whichever rank it has
    one = machines.torchrun(0, *command, **options)
    two = machines.torchrun(1, *command, **options, **stop)
    wait_for(tmp_path / "halted-6", one, log)
    machines.plug(1, "down")  # a power cut says no farewell
    machines.switch_off(1)
    two.wait()
    machines.plug(1, "up")
    again = machines.torchrun(1, *command, **options)
    said = finish(machines, [one, again], log)
    assert "resuming after update 4" in said
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_without_the_machine_where_they_meet_all_end_and_resume(
    machines, few, whole, tmp_path
):
    """It is the first, whose torchrun serves the store."""
    command = training_command(few, tmp_path / "run", STEPS, *LEVERS)
    log, halted = tmp_path / "log", tmp_path / "halted"
    options = {"restarts": 5, "output": log}
    stop = {"HALT": f"{halted} 0@6 1@6"}
    launches = [
        machines.torchrun(i, *command, **options, **stop) for i in range(2)
    ]
    wait_for(tmp_path / "halted-6", launches[0], log)
    machines.switch_off(0)
    assert launches[1].wait(300) != 0
    launches[0].wait()
    again = [
        machines.torchrun(i, *command, "--resume", **options) for i in range(2)
    ]
    said = finish(machines, again, log)
    assert "resuming after update 4" in said
    assert_same_run(tmp_path / "run", whole)
