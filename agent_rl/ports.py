"""A free TCP port, for a server or a rendezvous that this machine starts."""

import socket


def free_port() -> int:
    """A port on which nothing listens now, at any address of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
