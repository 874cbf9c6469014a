"""Tensor parallelism on torch.distributed: several ranks, each a process with a device, compute every layer together.

The engine has no rank in its own process. So it never waits in a collective, any rank can be killed at any time, and
torch.distributed's state is that of the rank's process: several engines do not disturb each other.
"""
