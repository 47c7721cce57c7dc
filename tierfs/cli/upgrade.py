"""``tierfs upgrade``"""

from __future__ import annotations

import time

import typer

from tierfs.cli import exit_codes, target
from tierfs.cli.target import JsonOption, MountArgument

LIMIT_S = 60.0
POLL_S = 0.05


def command(path: MountArgument = None, as_json: JsonOption = False) -> None:
    """Restart the engine of a running mount, with the code that is installed now. Needs the native front.

    Applications notice nothing but a short pause of what the front cannot answer by itself.
    """
    from tierfs.cli import output
    from tierfs.control.protocol import StatusRequest, UpgradeRequest
    from tierfs.errors import ControlError

    found = target.find(path)
    with target.engine_of(found, timeout_s=target.ANSWER_TIMEOUT_S) as engine:
        before = engine.call("upgrade", UpgradeRequest())
    started = time.monotonic()
    while time.monotonic() - started < LIMIT_S:
        time.sleep(POLL_S)
        try:
            found = target.find(path)
            if found.record is None or found.record.pid == before.pid:
                continue
            with target.engine_of(found, timeout_s=target.ANSWER_TIMEOUT_S) as engine:
                after = engine.call("status", StatusRequest())
        except (ControlError, exit_codes.NoMount):
            continue
        took_s = time.monotonic() - started
        if as_json:
            output.show_json(
                {"from": before.version, "to": after.version, "pid": found.record.pid, "seconds": took_s}
            )
        else:
            print(f"{found.mountpoint}: from {before.version} to {after.version} in {took_s:.1f} s")
        return
    output.say(f"{found.mountpoint}: no new engine after {LIMIT_S:.0f} s; the log says why")
    raise typer.Exit(exit_codes.FAILED)
