"""CPU attention of host blocks: the CPU attends to a share of them in host memory, and the others are loaded."""
