"""What a prompt takes of a machine, before anything runs: memory, transfers, time."""
