"""Which machine a process is on, and the address at which others reach it there.

A runtime with processes on several machines tells each of them; what they start inherits it. Torch-free.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ("address", "machine", "settle")

NODE, ADDRESS = "ASYNCRLHF_NODE", "ASYNCRLHF_ADDRESS"


def settle(node: str, address: str) -> None:
    """This process, and all that it starts, is on the node of this name, which others reach at `address`."""
    os.environ[NODE], os.environ[ADDRESS] = node, address


def machine() -> str:
    """Equal in processes that can read each other's shared memory: of one boot of one kernel, one namespace of process
    numbers (a container has its own) and one node of the runtime."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.environ.get(NODE, '')}"


def address() -> str:
    """Of this machine; where no runtime has said so there is one machine only."""
    return os.environ.get(ADDRESS, "127.0.0.1")
