"""Plain data that several packages share, at the bottom: no torch, and no import of a package above."""
