"""The control channel of a mount: how the command line finds a running engine and talks to it.

Owns: the registry of running mounts (``registry``: one small file per mount), the messages
(``protocol``), the engine's side of the socket (``server``, trio) and the caller's (``client``, plain
sockets, no trio: it is imported by every command).

On the wire: a unix stream socket; each message is a length (4 bytes, big endian) and that much JSON. A
client sends requests one after the other; each is answered by any number of progress messages and then
one reply or one error. Only the owner of the mount and root may connect (``SO_PEERCRED``).

Who may call: ``server`` runs in the engine's trio thread. ``registry`` and ``client`` block: never in the
trio thread, except ``registry.write`` and ``remove`` (one small file, at start and stop).

Raises: ``ControlError``; ``MountError`` where the state directory is taken.
"""
