"""``tierfs version``"""

from __future__ import annotations

from tierfs import __version__
from tierfs.cli.target import JsonOption


def command(as_json: JsonOption = False) -> None:
    """Versions of tierfs and of what it runs on."""
    import platform
    from importlib import metadata

    import tierfs_native

    parts = {"tierfs": __version__, "python": platform.python_version(), "kernel": platform.release()}
    for name in ("pyfuse3", "trio", "lmdb", "boto3", "obstore"):
        try:
            parts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            parts[name] = "not installed"
    missing = tierfs_native.why_missing()
    parts["front"] = f"python; native is not built: {missing}" if missing else "native; python on request"
    missing = tierfs_native.why_missing("batch")
    parts["batch"] = f"not built: {missing}" if missing else "built"
    if as_json:
        from tierfs.cli.output import show_json

        show_json(parts)
        return
    for name, version in parts.items():
        print(f"{name:8} {version}")
