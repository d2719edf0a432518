"""Long use of the runtime: ranks killed at random moments, and many steps in constant memory.

Each function draws its case from a seed, raises AssertionError where a promise is broken, and
returns what it met, to be counted. `make attack` and test_soak.py run them.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

WAIT = 120.0  # seconds until all ranks of a run exist, on a busy machine
END = 15.0  # seconds after a kill in which all processes have ended
RUNS = (
    "1f1b -p 2 -m 4", "1f1b -p 4 -m 8", "zb-h1 -p 3 -m 6", "interleaved -p 4 -m 8 -v 2",
    "zb-v -p 4 -m 8", "dualpipe -p 4 -m 8", "gpipe -p 4 -m 4",
)  # fmt: skip
SLEEPING = "--steps 1000000 --model hocket.demo.sleep:build -O f=0.002 -O i=0.002 -O w=0.002"


# --- processes -----------------------------------------------------------------------------------


def parents():
    """The parent of every living process."""
    out = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                out[int(folder.name)] = int(parent)
    return out


def below(pid):
    """The living processes that descend from one, in the order in which they began."""
    parent_of, out = parents(), {pid}
    while more := {p for p, parent in parent_of.items() if parent in out} - out:
        out |= more
    return sorted(out - {pid}, key=_began)


def _began(pid):
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]), pid
    return 0, pid


def until(seconds, what):
    """What `what()` gives once that is true; None where it is not in time."""
    deadline = time.monotonic() + seconds
    while not (result := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return result or None


class Command:
    """A command in the background; whatever it started has ended with the block."""

    def __init__(self, words, folder, name="run", env=()):
        self.log = (Path(folder) / f"{name}.log").open("w+")
        self.process = subprocess.Popen(
            words, stdout=self.log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(env),
        )  # fmt: skip
        self.seen = set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in {self.process.pid, *self.children(), *self.seen}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()

    def children(self):
        children = below(self.process.pid)
        self.seen = {pid for pid in self.seen | set(children) if alive(pid)}
        return children

    def text(self):
        self.log.flush()
        return Path(self.log.name).read_text()

    def ended(self):
        """True once it and all that it ever started have ended."""
        self.children()
        return self.process.poll() is not None and not self.seen


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(rng, commands, ranks, victim):
    """Kills a rank some time after all exist; how long until everything had ended."""
    time.sleep(rng.uniform(0, 3))
    pids = ranks()
    assert alive(pids[victim]), "\n".join(c.text()[-2000:] for c in commands)
    os.kill(pids[victim], signal.SIGKILL)
    start = time.monotonic()
    until(END * slowness(), lambda: all([c.ended() for c in commands]))
    left = [pid for c in commands for pid in c.seen]
    texts = "\n".join(c.text()[-2000:] for c in commands)
    assert all(c.process.poll() is not None for c in commands), f"did not end:\n{texts}"
    assert not left, f"orphans {left}:\n{texts}"
    assert all(c.process.returncode != 0 for c in commands), texts
    return time.monotonic() - start


def slowness():
    """How many processes want each core; limits on real time are stretched by that."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def named(commands, victim):
    """Asserts that every reason that is given blames the killed rank."""
    texts = "\n".join(c.text() for c in commands)
    blamed = re.findall(r"^hocket: (?:rank )?(\d+|.*)", texts, re.M)
    assert blamed, f"nobody is named for rank {victim}:\n{texts[-3000:]}"
    assert set(blamed) == {str(victim)}, f"rank {victim} was killed:\n{texts[-3000:]}"


# --- kills ---------------------------------------------------------------------------------------


def killed(seed, folder):
    """`hocket run`, and one of its ranks is killed at a random moment."""
    rng = random.Random(f"killed {seed}")
    run = rng.choice(RUNS)
    p = int(run.split()[2])
    words = [sys.executable, "-m", "hocket", "run", *run.split(), *SLEEPING.split()]
    with Command(words, folder) as command:

        def ranks():  # the last that the server has started; before them the server itself
            children = below(command.process.pid)
            return children[-p:] if len(children) >= p + 1 and started(children) else None

        def started(children):
            parent_of = parents()
            server = [pid for pid in children if parent_of.get(pid) == command.process.pid]
            return len([pid for pid in children if parent_of.get(pid) in server]) == p

        assert until(WAIT, ranks), command.text()
        victim = rng.randrange(p)
        took = kill(rng, [command], ranks, victim)
        named([command], victim)
    return f"killed, all ended within {_seconds(took)} s"


def _seconds(took):
    return next(limit for limit in (1, 2, 5, 10, 15, float("inf")) if took <= limit)


# --- kills under torchrun ------------------------------------------------------------------------


class Hosts:
    """Two network namespaces with a link between them, each as a machine of its own."""

    def __init__(self):
        self.names = [f"hocket{os.getpid()}{end}" for end in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    @staticmethod
    def possible():
        if os.geteuid() or shutil.which("ip") is None:
            return False
        name = f"hocket{os.getpid()}x"
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        return made.returncode == 0

    def __enter__(self):
        a, b = self.names
        for name in self.names:
            _ip("netns add", name)
        _ip(f"-n {a} link add eth0 type veth peer name eth0 netns {b}")
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip(f"-n {name} address add {address}/24 dev eth0")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set eth0 up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            _ip("netns del", name)


def _ip(words, *more):
    subprocess.run(["ip", *words.split(), *more], check=True, capture_output=True)


def killed_under_torchrun(seed, folder):
    """`hocket run` under torchrun on two hosts; one of the ranks is killed at a random moment."""
    rng = random.Random(f"torchrun {seed}")
    run = rng.choice([run for run in RUNS if "-p 4" in run])
    with Hosts() as hosts, contextlib.ExitStack() as stack:
        agents = []
        for number, (name, address) in enumerate(zip(hosts.names, hosts.addresses, strict=True)):
            words = (
                f"ip netns exec {name} {sys.executable} -m torch.distributed.run --nnodes 2 "
                f"--nproc-per-node 2 --node-rank {number} --master-addr {hosts.addresses[0]} "
                f"--master-port 29511 --local-addr {address} -m hocket run {run} {SLEEPING}"
            )
            env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            agent = Command(words.split(), folder, f"agent{number}", env)
            agents.append(stack.enter_context(agent))

        def ranks():
            pids = dict(_ranked(pid) for agent in agents for pid in below(agent.process.pid))
            pids.pop(None, None)
            return pids if len(pids) == 4 else None

        texts = lambda: "\n".join(agent.text() for agent in agents)  # noqa: E731
        assert until(WAIT, ranks), texts()
        assert until(WAIT, lambda: "step" in texts()), texts()
        victim = rng.randrange(4)
        took = kill(rng, agents, ranks, victim)
        named(agents, victim)
    return f"killed under torchrun, all ended within {_seconds(took)} s"


def _ranked(pid):
    """The rank of a process that torchrun has started, by its environment, and its number."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None, pid
    rank = [x.partition(b"=")[2] for x in variables if x.startswith(b"RANK=")]
    return (int(rank[0]) if rank else None), pid


# --- memory --------------------------------------------------------------------------------------

GROWTH = 8 * 2**20  # bytes by which a process may grow after the first third of its steps


def steps_of(tell, steps, seed):
    """Steps whose shapes change, evaluations in between; the resident bytes, every tenth step."""
    import torch
    from torch import nn

    import hocket
    from hocket.runtime import Pipeline

    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()
    pipe = Pipeline(
        hocket.build("zb-h1", p=2, m=4), {rank: nn.Sequential(nn.Linear(64, 64), nn.Tanh())},
        lambda out, target: ((out - target) ** 2).mean(),
    )  # fmt: skip
    rng, sizes = random.Random(seed), []
    for step in range(steps):
        shape = rng.randint(4, 32), rng.choice((1, 3, 17, 64)), 64
        batch = torch.randn(shape), torch.randn(shape)
        pipe.step(*batch)
        if step % 7 == 0:
            pipe.eval(*batch)
        if step % 10 == 9:
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    tell(rank)
    return sizes


def memory_is_flat(seed, folder, steps=1000):
    """Two ranks: after the first third of the steps neither process grows."""
    from hocket.train.launch import launch

    sizes = launch(steps_of, 2, (steps, seed), 600.0, listen=lambda _: None)
    for rank, own in enumerate(sizes):
        early, late = max(own[: len(own) // 3]), max(own[len(own) // 3 :])
        assert late - early <= GROWTH, f"seed {seed}: rank {rank} grew from {early} to {late} bytes"
    return f"{steps} steps in constant memory"


def soak(seed, folder):
    """One of these by seed: mostly kills."""
    if seed % 10 == 9:
        return memory_is_flat(seed, folder)
    if seed % 10 in (3, 6) and Hosts.possible():
        return killed_under_torchrun(seed, folder)
    return killed(seed, folder)
