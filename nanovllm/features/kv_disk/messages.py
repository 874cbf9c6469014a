"""What the two halves of the store say to each other: plain data that can be pickled.

Commands go from the engine's half (`store.DiskStore`) to the part of every rank (`part.StorePart`), the same ones in
the same order, between steps. Reports come from any thread of a part. Work that a part does behind the steps has a
number, and its end is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanovllm.data.batch import BlockMove, StateMove
from nanovllm.device.base import Busy
from nanovllm.features.kv_disk.records import Name

OPENING = 0  # the first work of a part, which nobody has to tell it


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """A unit's tokens from position `begin` on. blocks: physical ids, from that of the first of these tokens on."""

    unit: int
    group: int
    begin: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The slot of a recurrent state."""

    slot: int


# ---- commands


@dataclass(frozen=True, slots=True)
class Begin:
    """Make the part's directory, and look what it holds. identity: of the model, as all ranks compute it."""

    work: int
    identity: bytes


@dataclass(frozen=True, slots=True)
class Look:
    """Look what others have written, or deleted, since."""

    work: int


@dataclass(frozen=True, slots=True)
class Read:
    """Carry out the moves, and begin to read records, by their keys."""

    work: int
    records: Sequence[tuple[bytes, UnitPlace | StatePlace]]
    moves: Sequence[BlockMove] = ()
    state_moves: Sequence[StateMove] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Write nothing more of a `Read` into its blocks."""

    work: int


@dataclass(frozen=True, slots=True)
class CancelAll:
    """Cancel every `Read`, and forget the states that are held."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """held_for: the sequence at whose end the state is written; None: at once."""

    key: bytes
    place: StatePlace
    held_for: int | None


@dataclass(frozen=True, slots=True)
class Keep:
    """Copy what has been computed, and write it behind the steps, as far as there is room."""

    units: Sequence[tuple[bytes, UnitPlace]]
    state: KeptState | None


@dataclass(frozen=True, slots=True)
class WriteHeld:
    """Write the state that is held for a sequence."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Close:
    """End all work. The last command."""


Command = Begin | Look | Read | Cancel | CancelAll | Keep | WriteHeld | Close


# ---- reports


@dataclass(frozen=True, slots=True)
class Described:
    """facts, files: digests of what decides bits; files: None where another rank of the machine describes them.

    unit_bytes: of a unit of each KV group; state_bytes: 0 without recurrent layers.
    """

    facts: bytes
    files: bytes | None
    unit_bytes: Sequence[int]
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """The index has changed: first without `gone`, then with `added`."""

    added: Sequence[Name] = ()
    gone: Sequence[Name] = ()


@dataclass(frozen=True, slots=True)
class Progressed:
    """Work goes on: a part of it has ended. Said now and then."""

    work: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Work has ended. wrong: why it failed. busy: of all reads so far."""

    work: int
    wrong: str | None = None
    busy: Busy = field(default_factory=Busy)


@dataclass(frozen=True, slots=True)
class Warned:
    """What people should know, once. what: the same words each time it happens."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class WritesNoMore:
    """A record could not be written."""

    why: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The last report."""


Report = Described | Found | Progressed | Ended | Warned | WritesNoMore | Closed
