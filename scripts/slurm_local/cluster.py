"""Start and stop a SLURM cluster of one node on this machine, for trying out and checking job scripts; no services are installed.

    apt-get install slurm-wlm munge
    python scripts/slurm_local/cluster.py start          # prints the line that lets a shell use it
    eval "$(python scripts/slurm_local/cluster.py env)"  # sbatch, squeue and scancel speak to it
    python scripts/slurm_local/cluster.py stop

Everything lies in one temporary folder: configuration, key, sockets, state and logs. Starting twice is one start, and
stopping twice is not an error. The daemons run as root, listen on the loopback address only, and keep no accounts. The
partition `main` is the default; jobs of the partition `urgent` preempt those of `main`, which SLURM requeues. CPUs are
counted, but not enforced: the node has as many as --cpus says.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / f"slurm_local.{os.getuid()}"
_PROGRAMS = ("munged", "slurmctld", "slurmd")
_READY_S = 60.0
_ENDED_S = 20.0
_CONFIG = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,requeue_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PreemptExemptTime=0
KillWait=10
InactiveLimit=0
MinJobAge=600
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes={host} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing() -> str:
    """Why no cluster can be started here; an empty string if one can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in (*_PROGRAMS, "sbatch") if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "the daemons have to be started by root"


def environment(folder: Path = FOLDER) -> dict[str, str]:
    """The variables that let SLURM's commands use the cluster."""
    return {"SLURM_CONF": str(folder / "slurm.conf")}


def start(folder: Path = FOLDER, cpus: int = 4) -> None:
    """Start the cluster in a folder unless it runs already, and wait until it takes jobs.

    Raises:
        RuntimeError: a program is missing, or the cluster did not become ready; the logs are in the folder.
    """
    if problem := missing():
        raise RuntimeError(problem)
    if _state(folder) == "idle":
        return
    stop(folder)
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(parents=True, mode=0o755)
    folder.chmod(0o755)
    port, memory = 20_000 + int.from_bytes(secrets.token_bytes(2)) % 20_000, _memory_mib()
    text = _CONFIG.format(folder=folder, host=_host(), port=port, node_port=port + 1, cpus=cpus, memory=memory)
    (folder / "slurm.conf").write_text(text)
    (folder / "plugstack.conf").touch()
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    _spawn(folder, "munged", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
           f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed")  # fmt: skip
    _spawn(folder, "slurmctld", "-c", "-f", str(folder / "slurm.conf"))
    _start_node(folder)


def restart_node(folder: Path = FOLDER) -> None:
    """End the daemon of the node, whose jobs continue, and start it again.

    Raises:
        RuntimeError: the node does not become ready.
    """
    _end(folder, "slurmd")
    _start_node(folder)


def _start_node(folder: Path) -> None:
    _spawn(folder, "slurmd", "-f", str(folder / "slurm.conf"), "-N", _host())
    deadline = time.monotonic() + _READY_S
    while (state := _state(folder)) != "idle":
        if time.monotonic() > deadline:
            stop(folder, keep=True)
            raise RuntimeError(f"the node is '{state}' after {_READY_S:g} s; see the logs in {folder}")
        time.sleep(0.2)


def stop(folder: Path = FOLDER, keep: bool = False) -> None:
    """Cancel all jobs, end the daemons, and remove the folder unless `keep`."""
    if (folder / "slurmctld.pid").exists():
        with contextlib.suppress(subprocess.SubprocessError):
            _call(folder, "scancel", "--user=root", "--signal=KILL", "--full")
            _call(folder, "scancel", "--user=root")
    for name in ("slurmd", "slurmctld", "munged"):
        _end(folder, name)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)


def _end(folder: Path, name: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        process = int((folder / f"{name}.pid").read_text())
        if name not in Path(f"/proc/{process}/comm").read_text():
            return  # another one has the number now
        os.kill(process, signal.SIGTERM)
        deadline = time.monotonic() + _ENDED_S
        while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process, signal.SIGKILL)


@contextlib.contextmanager
def cluster(folder: Path = FOLDER, cpus: int = 4) -> Iterator[dict[str, str]]:
    """A cluster while the context lasts; gives the variables that SLURM's commands need."""
    start(folder, cpus)
    try:
        yield environment(folder)
    finally:
        stop(folder)


def _spawn(folder: Path, name: str, *arguments: str) -> None:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    done = subprocess.run([str(path), *arguments], env=_variables(folder), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} did not start: {done.stdout}{done.stderr}")


def _state(folder: Path) -> str:
    """The state of the node as `sinfo` says it, `idle` for any that takes jobs; an empty string without a cluster."""
    if not (folder / "slurm.conf").exists():
        return ""
    with contextlib.suppress(subprocess.SubprocessError):
        state = _call(folder, "sinfo", "--noheader", "--partition=main", "--format=%T").strip().rstrip("*~#!%$@^-")
        return "idle" if state in ("idle", "mixed", "allocated") else state
    return ""


def _call(folder: Path, *command: str) -> str:
    return subprocess.run(
        command, env=_variables(folder), capture_output=True, text=True, check=True, timeout=30
    ).stdout


def _variables(folder: Path) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | environment(folder)


def _host() -> str:
    return os.uname().nodename.split(".")[0]


def _memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def main() -> int:
    """Start or stop the cluster, or print the shell line that selects it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["start", "stop", "env"])
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"where everything lies (default {FOLDER})")
    parser.add_argument("--cpus", type=int, default=4, help="CPUs that the node says it has (default 4)")
    options = parser.parse_args()
    if options.action == "stop":
        stop(options.folder)
        return 0
    if options.action == "start":
        try:
            start(options.folder, options.cpus)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    for name, value in environment(options.folder).items():
        print(f"export {name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
