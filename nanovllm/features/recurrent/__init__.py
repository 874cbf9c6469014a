"""Recurrent states between the steps: which sequence goes on from which, and the snapshots at which prefix hits end."""
