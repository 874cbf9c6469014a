"""What the network computes: one decoder for the dense families, and how checkpoints become one."""
