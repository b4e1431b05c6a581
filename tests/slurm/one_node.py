"""A SLURM cluster of one node in a temporary folder: munge, the controller and the node as processes of this user."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Of Debian or Ubuntu, 3.6 MB: what most installations do not have yet.
PACKAGES = ("munge", "libmunge2", "slurm-client", "slurm-wlm-basic-plugins", "slurmctld", "slurmd", "libhwloc15")
START_SECONDS = 60.0
# `proctrack/linuxproc` and `task/none` need no cgroups; `ReturnToService=2` takes the node as it comes.
CONF = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
PluginDir={plugins}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 OverSubscribe=NO
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=10 OverSubscribe=NO PreemptMode=OFF
"""


def unpack_packages(cache: Path) -> Path:
    """The root folder of SLURM's Debian packages, downloaded by apt into `cache` at the first time. Nothing is installed."""
    root = cache / "root"
    if not (root / "usr" / "bin" / "sbatch").exists():
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=cache, check=True)
        for package in sorted(cache.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return root


@contextmanager
def one_node_slurm(folder: Path, root: Path = Path("/")) -> Iterator[Mapping[str, str]]:
    """Start a cluster with its files in `folder` from the programs below `root`; yields the environment of its users.

    It has the CPUs of this machine and no GPU. Everything is stopped after the block. Raises RuntimeError where the node
    does not come up.
    """
    (plugins,) = root.glob("usr/lib/*/slurm*/auth_munge.so")
    paths = [str(root / "usr" / "bin"), str(root / "usr" / "sbin"), os.environ["PATH"]]
    libraries = [str(plugins.parent), str(plugins.parent.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {
        "PATH": ":".join(paths),
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    host, cpus = socket.gethostname().split(".")[0], os.cpu_count() or 1
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    controller_port, node_port = free_ports(2)
    (folder / "slurm.conf").write_text(
        CONF.format(
            host=host,
            cpus=cpus,
            controller_port=controller_port,
            node_port=node_port,
            user=subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip(),
            folder=folder,
            plugins=plugins.parent,
        ),
        "utf-8",
    )

    def program(name: str) -> str:
        """Debian names the daemons after its flavor of SLURM, and links them."""
        for each in (f"{name}-wlm", name):
            if found := shutil.which(each, path=environment["PATH"]):
                return found
        raise RuntimeError(f"{root} has no program {name}.")

    munge = ["--socket", "munge.socket", "--key-file", "munge.key", "--log-file", "munged.log"]
    munge += ["--pid-file", "munged.pid", "--seed-file", "munged.seed", "--foreground", "--force"]
    commands = [
        [program("munged"), *munge],
        [program("slurmctld"), "-D", "-c"],
        [program("slurmd"), "-D", "-c", "-N", host, "-d", program("slurmstepd")],
    ]
    with (folder / "daemons.txt").open("wb") as output:
        daemons = list[subprocess.Popen[bytes]]()
        try:
            for command in commands:
                daemons.append(
                    subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
                time.sleep(0.5)  # each needs the one before
            wait_for_node(environment, daemons)
            yield environment
        finally:
            subprocess.run(
                ["scancel", "--full", "--signal=KILL", "--state=RUNNING"], env=environment, timeout=60, check=False
            )
            for daemon in reversed(daemons):
                daemon.terminate()
                try:
                    daemon.wait(30)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()


def wait_for_node(environment: Mapping[str, str], daemons: list[subprocess.Popen[bytes]]) -> None:
    end, states = time.monotonic() + START_SECONDS, ""
    while time.monotonic() < end:
        if gone := [daemon.args for daemon in daemons if daemon.poll() is not None]:
            raise RuntimeError(f"{gone[0]} ended; see the logs in {Path(environment['SLURM_CONF']).parent}.")
        found = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, check=False
        )
        states = found.stdout.split()
        if states and set(states) == {"idle"}:
            return
        time.sleep(0.5)
    raise RuntimeError(f"The node is {states or 'not there'} after {START_SECONDS:g} s.")


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
