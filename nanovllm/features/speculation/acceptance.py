"""How often the drafts of one sequence were right, and whether they pause."""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.8  # weight of what was verified one step earlier
# A new sequence starts with these counts, which make its first drafts short.
FIRST_RIGHT = 1.0
FIRST_TRIED = 2.0
LONGEST_PAUSE = 128  # steps


@dataclass(slots=True)
class Acceptance:
    """How many drafts of a sequence were right, and its pauses in drafting."""

    right: float = FIRST_RIGHT  # right drafts so far; older ones weigh less
    tried: float = FIRST_TRIED  # verified drafts so far, weighted in the same way
    pause: int = 1  # steps of the next pause; each pause doubles it
    waits: int = 0  # steps that are left of the present pause

    @property
    def share(self) -> float:
        """The probability that a draft is right if those before it are."""
        return self.right / self.tried

    def verified(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a step; none after the first wrong one was tried."""
        self.right = FORGET * self.right + accepted
        self.tried = FORGET * self.tried + accepted + (accepted < drafted)
        if accepted == drafted:
            self.pause = 1

    def is_paused(self) -> bool:
        """Whether this step has no drafts. After a pause they are tried as at the start."""
        if self.waits:
            self.waits -= 1
            if not self.waits:
                self.right = FIRST_RIGHT
                self.tried = FIRST_TRIED
            return True
        return False

    def begin_pause(self) -> None:
        self.waits = self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
