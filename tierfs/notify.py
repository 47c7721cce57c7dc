"""Tell systemd how far this service is: READY=1, STOPPING=1, STATUS=... (sd_notify(3)).

One datagram to the socket that systemd names in ``NOTIFY_SOCKET``; nothing happens outside of it. Never
raises: a service must not fail because its supervisor does not listen.
"""

from __future__ import annotations

import os
import socket


def sd_notify(text: str) -> bool:
    """Send ``text`` (lines of ``NAME=value``); True if there was somebody to send it to."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):  # abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.connect(address)
            channel.sendall(text.encode("utf-8", "surrogateescape"))
    except OSError:
        return False
    return True
