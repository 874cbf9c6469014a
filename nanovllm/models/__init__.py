"""What networks compute, a file for each architecture, and how checkpoints become one."""
