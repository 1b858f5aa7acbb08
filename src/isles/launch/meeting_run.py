"""Which state directory `isles rendezvous` uses, and what it gives to the clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isles.config.clusters import shared_text
from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigError
from isles.launch.hub import listen_address, open_rendezvous, rendezvous_process, split_address
from isles.run.find import numbered_runs
from isles.run.join_line import JoinLine

_SUFFIX = "rendezvous"


@dataclass(frozen=True, slots=True)
class Meeting:
    """A rendezvous that runs.

    Args:
        state: its state directory.
        line: the join line.
        is_new: it was started just now.
        has_past: its state directory was there before.
    """

    state: Path
    line: JoinLine
    is_new: bool
    has_past: bool

    @property
    def join_file(self) -> Path:
        """The file that holds the join line."""
        return self.state / "join"


def start_meeting(
    run_file: Path, overrides: Sequence[str], *, public: str, listen: str, is_anew: bool
) -> Meeting:
    """Start the rendezvous of a run file, or go on with the one that was begun.

    Args:
        run_file: the run file.
        overrides: as `key.path=value`.
        public: HOST:PORT that clusters dial; empty: as `outer.public` says, or none.
        listen: HOST:PORT; empty: it follows from `public`.
        is_anew: begin with an empty memory, whatever was.

    Raises:
        UserError: the run file is not of several clusters, or it cannot be started.
    """
    loaded = load_run_file(run_file, overrides)
    outer = loaded.config.diloco
    _refuse(loaded)
    assert outer is not None
    public = public or outer.public or ""
    if public and split_address(public, "--public")[1] == 0:
        raise ConfigError(
            f"{public} has no port that clusters could dial",
            where="--public",
            fix="choose one, such as 29400",
            id="rendezvous.address",
        )
    place = listen_address(public, listen)
    state = state_directory(loaded, is_anew=is_anew)
    has_past = (state / "join").exists()
    text = shared_text(loaded.config)
    if rendezvous_process(state) is not None and (state / "run.yaml").read_text() != text:
        raise ConfigError(
            "the rendezvous runs already, and gives clusters another run file",
            where=str(state / "run.yaml"),
            fix="stop it first; or type it with the values that it was started with",
        )
    line, is_new = open_rendezvous(
        state,
        run=loaded.config.name,
        settings=outer.rendezvous_settings,
        listen=place,
        announce=public,
        run_file=text,
    )
    return Meeting(state, line, is_new, has_past)


def state_directory(loaded: Loaded, *, is_anew: bool) -> Path:
    """OUTPUT_DIR/NAME-rendezvous-N: the last that there is, or the next one."""
    folder = Path(loaded.config.output_dir).expanduser()
    name = f"{loaded.config.name}-{_SUFFIX}"
    taken = numbered_runs(folder, name)
    ours = [run.path for _, run in taken if (run.path / "settings.json").exists()]
    if ours and not is_anew:
        return ours[-1]
    return folder / f"{name}-{taken[-1][0] + 1 if taken else 1}"


def _refuse(loaded: Loaded) -> None:
    outer = loaded.config.diloco
    if outer is None or loaded.config.training.script is not None:
        raise ConfigError(
            "this run averages with no other cluster: nobody would come",
            where=loaded.where("outer.kind"),
            fix="set outer: {kind: diloco}",
        )
    if outer.engine == "hivemind":
        raise ConfigError(
            "with engine hivemind clusters find one another without a rendezvous",
            where=loaded.where("outer.engine"),
            fix="use engine hub; docs/hivemind.md says how hivemind is started",
        )
    if outer.rendezvous is not None:
        raise ConfigError(
            f"the run file says that there is a rendezvous already, at {outer.rendezvous}",
            where=loaded.where("outer.rendezvous"),
            fix="delete it; --public says how this one is reached",
        )
