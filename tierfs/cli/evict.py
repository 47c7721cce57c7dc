"""``tierfs evict``"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from tierfs.cli import paths as many
from tierfs.cli.target import JsonOption


def command(
    paths: many.PathsArgument,
    tier: Annotated[str | None, typer.Option(help="Only from the tier of this name (ram, nvme...).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Drop local copies. What is not in the store yet stays, and is named."""
    from tierfs.control.protocol import EvictRequest

    request = partial(EvictRequest, tier=tier)
    many.run("evict", "freed", paths, lambda batch: request(paths=batch), as_json=as_json)
