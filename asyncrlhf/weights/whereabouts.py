"""Which machine a process is on, and the address at which others reach it there.

A runtime with processes on several machines tells each of them; what they start inherits it. Torch-free.
"""

from __future__ import annotations

import os
from pathlib import Path

from asyncrlhf.errors import ConfigError

__all__ = ("address", "machine", "settle")

NODE, ADDRESS = "ASYNCRLHF_NODE", "ASYNCRLHF_ADDRESS"
BOOT, NUMBERS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def settle(node: str, address: str) -> None:
    """This process, and all that it starts, is on the node of this name, which others reach at `address`."""
    os.environ[NODE], os.environ[ADDRESS] = node, address


def machine() -> str:
    """Equal in processes that can read each other's shared memory: of one boot of one kernel, one namespace of process
    numbers (a container has its own) and one node of the runtime. Raises ConfigError where Linux does not say so."""
    try:
        boot, numbers = BOOT.read_text().strip(), os.readlink(NUMBERS)
    except OSError as error:
        raise ConfigError(
            f"{BOOT} and {NUMBERS} say which processes share memory, and cannot be read ({error}); mount /proc, or "
            'choose publish.transport = "objects" with runtime = "ray"'
        ) from error
    return f"{boot} {numbers} {os.environ.get(NODE, '')}"


def address() -> str:
    """Of this machine; where no runtime has said so there is one machine only."""
    return os.environ.get(ADDRESS, "127.0.0.1")
