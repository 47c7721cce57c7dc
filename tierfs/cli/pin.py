"""``tierfs pin``"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from tierfs.cli import paths as many
from tierfs.cli.target import JsonOption


def command(
    paths: many.PathsArgument,
    tier: Annotated[str | None, typer.Option(help="Into the tier of this name (ram, nvme...).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch files, and everything below directories, and keep them in a tier until 'unpin'."""
    from tierfs.control.protocol import PinRequest

    request = partial(PinRequest, tier=tier)
    many.run("pin", "pinned", paths, lambda batch: request(paths=batch), as_json=as_json)
