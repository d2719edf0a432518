"""Checkpoints that any other pipeline of the same model can go on from.

torch.distributed.checkpoint writes and reads the tensors. Here are their names in the whole model,
what makes a checkpoint complete, and which one is read.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from hocket.errors import RunError, UsageError

if TYPE_CHECKING:
    from hocket.runtime.pipeline import Pipeline

MANIFEST = "hocket.json"  # the digest of every file: written last, and read first
PHASE = "the checkpoint"


class Checkpoints:
    """The checkpoints in a folder, such as `step-20`: the newest ones, `keep` of them.

    One is written beside the others and gets its name when it is complete, so that a run that is
    killed at any moment leaves the one before. Each is of the whole model: it may be read under
    another schedule, with other numbers of ranks, stages and replicas. All ranks of the default
    process group save and load together, and see the same folder.

    report: called on the first rank with a sentence on each checkpoint that is damaged, and on what
    another number of ranks cannot take over.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 2, report: Callable[[str], Any] = warnings.warn
    ) -> None:
        if keep < 1:
            raise UsageError(f"keep is {keep}; it must be 1 or more")
        self.folder, self.keep, self.report = Path(folder), keep, report

    def found(self) -> list[Path]:
        """The checkpoints in the folder, the newest first, damaged ones too."""
        steps = {int(f.name[5:]): f for f in self.folder.glob("step-*") if f.name[5:].isdecimal()}
        return [steps[step] for step in sorted(steps, reverse=True)]

    def save(self, pipe: Pipeline, optimizer: Any = None, **more: Any) -> Path:
        """The folder of a new checkpoint, `step-N` after N steps; collective.

        optimizer: of the parameters of this rank's stages. more: anything else with a `state_dict`
        that is the same on all ranks, such as a scheduler, a GradScaler or the place in the data.

        Raises: RunError where a rank cannot save, or its state differs from that of the others.
        """
        rank, _ = _place()
        path = self.folder / f"step-{pipe.steps_done}"
        part = path.with_name(f".{path.name}.part")

        def begin() -> dict[str, Any]:
            if not rank:
                for old in self.folder.glob(".step-*"):
                    shutil.rmtree(old)
                part.mkdir(parents=True)
            states = {f"more/{name}": one.state_dict() for name, one in more.items()}
            return _entries(pipe, optimizer) | states

        def write() -> dict[str, list[Any]]:
            planner, writer = DefaultSavePlanner(False), dcp.FileSystemWriter(part)
            _quietly(lambda: dcp.save(entries, storage_writer=writer, planner=planner))
            own = [*part.glob(f"__{rank}_*"), *([] if rank else [part / ".metadata"])]
            return {file.name: _digest(file) for file in own}

        entries = pipe.guard(begin, PHASE)
        _refuse_unlike(_gathered(pipe, {name: repr(entries[f"more/{name}"]) for name in more}))
        digests = _gathered(pipe, pipe.guard(write, PHASE))
        if not rank:
            files = {name: value for own in digests for name, value in own.items()}
            pipe.guard(lambda: self._publish(part, path, files), PHASE)
        _gathered(pipe, None)
        return path

    def _publish(self, part: Path, path: Path, files: Mapping[str, Any]) -> None:
        """Gives a complete checkpoint its name, and removes what is too old."""
        with (part / MANIFEST).open("w") as file:
            json.dump({"ranks": _place()[1], "files": files}, file)
            file.flush()
            os.fsync(file.fileno())
        for old in [path] if path.exists() else []:
            old.rename(_hidden(old))
        part.rename(path)
        every = self.found()
        at = every.index(path)  # what is newer was damaged, or this run did not go on from it
        for old in every[:at] + every[at + self.keep :]:
            old.rename(_hidden(old))
        for old in self.folder.glob(".step-*"):
            shutil.rmtree(old)

    def load(self, pipe: Pipeline, optimizer: Any = None, **more: Any) -> Path | None:
        """The newest checkpoint that is not damaged, now loaded; None where there is none.

        `pipe.steps_done` is then its number of steps; optimizer and more as in `save`. Collective.

        Raises: RunError where all are damaged, or the newest good one is of another model.
        """
        path = self._newest(pipe)
        if path is None:
            return None
        kept = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        states = pipe.guard(pipe.state_dict, PHASE)
        problems = _unlike(states, kept, _gathered(pipe, [*states]))
        problems += [f"has nothing called {name!r}" for name in more if f"more/{name}" not in kept]
        problems = [text for own in _gathered(pipe, problems) for text in own]
        if problems:
            raise RunError(f"{path} {problems[0]}")
        rank, world = _place()
        same_ranks = json.loads((path / MANIFEST).read_text())["ranks"] == world
        wanted = {f"model/{name}": value for name, value in states.items()}
        wanted |= dict.fromkeys(["steps", *(f"more/{name}" for name in more)])
        wanted |= {f"random/{rank}": None} if same_ranks else {}

        def read() -> None:
            wanted.update(_template(pipe, optimizer, kept))
            planner, reader = DefaultLoadPlanner(False, False), dcp.FileSystemReader(path)
            _quietly(lambda: dcp.load(wanted, storage_reader=reader, planner=planner))
            pipe.load_state_dict({name: wanted[f"model/{name}"] for name in states})
            _fill(pipe, optimizer, wanted)

        pipe.guard(read, PHASE)
        pipe.steps_done = wanted["steps"]
        for name, one in more.items():
            one.load_state_dict(wanted[f"more/{name}"])
        if same_ranks:
            random = wanted[f"random/{rank}"]
            torch.set_rng_state(random["cpu"])
            if "cuda" in random and pipe.device.type == "cuda":
                torch.cuda.set_rng_state(random["cuda"], pipe.device)
        elif not rank and pipe.seed is None:
            self.report(f"{path} is of another number of ranks, so that random numbers start anew")
        return path

    def _newest(self, pipe: Pipeline) -> Path | None:
        """The newest checkpoint that is not damaged.

        Raises: RunError where all are.
        """
        rank, world = _place()
        every = _gathered(pipe, self.found())[0]
        for path in every:
            problems = [text for text in _gathered(pipe, _damage(path, rank, world)) if text]
            if not problems:
                return path
            if not rank:
                self.report(f"{path} is damaged and was skipped: {problems[0]}")
        if every:
            raise RunError(f"every checkpoint in {self.folder} is damaged")
        return None


def _place() -> tuple[int, int]:
    """Rank and number of the processes that save together."""
    if not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _gathered(pipe: Pipeline, own: Any) -> list[Any]:
    """What each rank has; collective."""
    every: list[Any] = [None] * _place()[1]
    if len(every) == 1:
        return [own]
    pipe.guard(lambda: distributed.all_gather_object(every, own), PHASE)
    return every


def _quietly(call: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
        call()


def _hidden(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


# --- complete and alike ---------------------------------------------------------------------


def _digest(file: Path) -> list[Any]:
    with file.open("rb") as opened:
        return [file.stat().st_size, file_digest(opened, "sha256").hexdigest()]


def _damage(path: Path, rank: int, world: int) -> str:
    """What is wrong with a rank's share of the files of a checkpoint; "" where nothing is."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return f"{MANIFEST} is missing or cannot be read"
    for name in sorted(files)[rank::world]:
        size, digest = files[name]
        try:
            found = _digest(path / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != [size, digest]:
            how = "has other bytes than" if found[0] == size else f"has {found[0]:,} bytes, not"
            return f"{name} {how} the {size:,} that were written"
    return ""


def _refuse_unlike(every: list[dict[str, str]]) -> None:
    for rank, shown in enumerate(every):
        for name, text in shown.items():
            if every[0].get(name) != text:
                raise RunError(
                    f"the state of {name!r} on rank {rank} is not that of rank 0, but a checkpoint "
                    "holds one for all ranks, however many read it; save what differs by itself"
                )


def _unlike(
    states: Mapping[str, Any], kept: Mapping[str, Any], every: list[list[str]]
) -> list[str]:
    """What differs between a model and a checkpoint; every: the names that each rank has."""
    problems = []
    for name, value in states.items():
        saved = kept.get(f"model/{name}")
        if saved is None:
            problems.append(f"has no weight {name!r}; is it of another model?")
        elif isinstance(value, Tensor):
            there = f"{[*saved.size]} {str(saved.properties.dtype)[6:]}"
            here = f"{[*value.shape]} {str(value.dtype)[6:]}"
            if there != here:
                problems.append(f"has {name!r} as {there}, but this model has {here}")
    known = {f"model/{name}" for own in every for name in own}
    left = [key[6:] for key in kept if key.startswith("model/") and key not in known]
    return problems + [f"has {name!r}, which this model lacks" for name in left]


# --- what is in it --------------------------------------------------------------------------


def _entries(pipe: Pipeline, optimizer: Any) -> dict[str, Any]:
    """What this rank saves, by the names of the whole model."""
    out = {f"model/{name}": value for name, value in pipe.state_dict().items()}
    random = {"cpu": torch.get_rng_state()}
    if pipe.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(pipe.device)
    out |= {"steps": pipe.steps_done, f"random/{_place()[0]}": random}
    for group, members in _groups(pipe, optimizer):
        settings = {key: value for key, value in group.items() if key != "params"}
        for _, names, state in members:
            for name in names:
                out[f"group/{name}"] = settings
                out |= {f"optimizer/{key}/{name}": value for key, value in state.items()}
    return out


Member = tuple[Tensor, list[str], dict[str, Any]]  # a parameter, its whole names, its state


def _groups(pipe: Pipeline, optimizer: Any) -> Iterator[tuple[dict[str, Any], list[Member]]]:
    """Each group in an optimizer's `state_dict`, and its members."""
    if optimizer is None:
        return
    names: dict[int, list[str]] = {}
    for name, p in pipe.named_parameters():
        names.setdefault(id(p), []).append(name)
    packed = optimizer.state_dict()
    for own, group in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        if any(id(p) not in names for p in own["params"]):
            raise RunError("the optimizer has a parameter that is in no stage of the pipeline")
        states = (packed["state"].get(index, {}) for index in group["params"])
        yield group, [(p, names[id(p)], s) for p, s in zip(own["params"], states, strict=True)]


def _template(pipe: Pipeline, optimizer: Any, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Where to read the state of an optimizer into; one that has made no step has none yet."""
    keys: dict[str, list[str]] = {}
    for key in kept:
        if key.startswith("optimizer/"):
            keys.setdefault(key.split("/", 2)[2], []).append(key)
    out: dict[str, Any] = {}
    for _, members in _groups(pipe, optimizer):
        for p, (name, *_), _ in members:
            if f"group/{name}" not in kept:
                raise RunError(f"the checkpoint has no state of an optimizer for {name!r}")
            out[f"group/{name}"] = None
            out |= {key: _empty(kept[key], p) for key in keys.get(name, ())}
    return out


def _empty(saved: Any, p: Tensor) -> Tensor | None:
    """A tensor for one that was saved, sharded as the parameter is; None for other values."""
    size = getattr(saved, "size", None)
    if size is None:
        return None
    dtype = saved.properties.dtype
    return torch.empty_like(p, dtype=dtype) if size == p.shape else torch.empty(size, dtype=dtype)


def _fill(pipe: Pipeline, optimizer: Any, wanted: Mapping[str, Any]) -> None:
    """Gives an optimizer the state that was read."""
    if optimizer is None:
        return
    states: dict[str, dict[str, Any]] = {}
    for key, value in wanted.items():
        if key.startswith("optimizer/"):
            _, field, name = key.split("/", 2)
            states.setdefault(name, {})[field] = value
    packed = optimizer.state_dict()
    for group, (_, members) in zip(packed["param_groups"], _groups(pipe, optimizer), strict=True):
        names = [name for _, (name, *_), _ in members]
        settings = [wanted[f"group/{name}"] for name in names]
        for name, one in zip(names, settings, strict=True):
            if repr(one) != repr(settings[0]):
                raise RunError(
                    f"{names[0]!r} and {name!r} are in one group of the optimizer, but were in "
                    "groups with other settings when they were saved"
                )
        group |= settings[0] if settings else {}
        packed["state"] |= {
            i: states.get(name, {}) for i, name in zip(group["params"], names, strict=True)
        }
    optimizer.load_state_dict(packed)
