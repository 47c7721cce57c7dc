"""``tierfs mount``"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tierfs.cli import exit_codes

_SIZES = "Storage and memory"
_STORE = "Object store"
_ACCESS = "Access"
_TRUTH = "Consistency and durability"
_PROCESS = "Process"


def _option(panel: str, help: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar=metavar, show_default=False)


_Source = Annotated[
    str | None, typer.Argument(metavar="SOURCE", help="s3://bucket, s3://bucket/prefix or a directory.")
]
_Mountpoint = Annotated[str | None, typer.Argument(metavar="MOUNTPOINT", help="An existing directory.")]


def command(
    source: _Source = None,
    mountpoint: _Mountpoint = None,
    tier: Annotated[
        list[str] | None,
        _option(
            _SIZES,
            "ram:4G, DIR:200G or DIR, fast to slow; may be repeated; 'none': no tier.",
            "--tier",
            metavar="TIER",
        ),
    ] = None,
    state_dir: Annotated[
        str | None,
        _option(
            _SIZES,
            "Names, journal, log; below /var/cache/tierfs (root) or ~/.cache/tierfs.",
            "--state-dir",
            metavar="DIR",
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        _option(_SIZES, "File data in the engine's memory; 512M.", "--memory-budget", metavar="SIZE"),
    ] = None,
    dirty_limit: Annotated[
        str | None,
        _option(
            _SIZES,
            "Writers are slowed when this much waits; 80 % of the write tier.",
            "--dirty-limit",
            metavar="SIZE",
        ),
    ] = None,
    read_ahead: Annotated[
        str | None,
        _option(_SIZES, "Largest read-ahead of a stream; 64M.", "--read-ahead", metavar="SIZE"),
    ] = None,
    endpoint_url: Annotated[
        str | None,
        _option(_STORE, "For stores other than AWS.", "--endpoint-url", metavar="URL"),
    ] = None,
    region: Annotated[
        str | None,
        _option(_STORE, "AWS region.", "--region", metavar="NAME"),
    ] = None,
    profile: Annotated[
        str | None,
        _option(_STORE, "AWS profile with the credentials.", "--profile", metavar="NAME"),
    ] = None,
    fetch_concurrency: Annotated[
        str | None,
        _option(_STORE, "GET requests at a time; 32.", "--fetch-concurrency", metavar="N"),
    ] = None,
    upload_concurrency: Annotated[
        str | None,
        _option(_STORE, "Uploads at a time; 8.", "--upload-concurrency", metavar="N"),
    ] = None,
    part_size: Annotated[
        str | None,
        _option(_STORE, "Part of a multipart upload; 16M.", "--part-size", metavar="SIZE"),
    ] = None,
    replica: Annotated[
        str | None,
        _option(
            _STORE,
            "Second place for what is not in the store yet: a directory or s3://.",
            "--replica",
            metavar="PLACE",
        ),
    ] = None,
    replica_endpoint_url: Annotated[
        str | None,
        _option(_STORE, "Of a replica in a bucket elsewhere.", "--replica-endpoint-url", metavar="URL"),
    ] = None,
    store_timeout: Annotated[
        str | None,
        _option(_STORE, "How long a failing request is retried; 60.", "--store-timeout", metavar="TIME"),
    ] = None,
    read_only: Annotated[
        bool | None,
        _option(_ACCESS, "Refuse all changes.", "--read-only/--read-write"),
    ] = None,
    open_mode: Annotated[
        str | None,
        _option(
            _ACCESS,
            "Read-only: whether opens are asked for; auto.",
            "--open-mode",
            metavar="auto|ask|none",
        ),
    ] = None,
    allow_other: Annotated[
        bool | None,
        _option(
            _ACCESS,
            "Other users too, under permission checks; root's default.",
            "--allow-other/--no-allow-other",
        ),
    ] = None,
    uid: Annotated[
        str | None,
        _option(_ACCESS, "Owner of objects that carry none; the mounting user.", "--uid", metavar="USER"),
    ] = None,
    gid: Annotated[
        str | None,
        _option(_ACCESS, "Their group.", "--gid", metavar="GROUP"),
    ] = None,
    umask: Annotated[
        str | None,
        _option(_ACCESS, "Taken off the mode of objects that carry none; 022.", "--umask", metavar="OCTAL"),
    ] = None,
    ttl: Annotated[
        str | None,
        _option(_TRUTH, "How long what the bucket said is believed; 60.", "--ttl", metavar="TIME"),
    ] = None,
    negative_ttl: Annotated[
        str | None,
        _option(_TRUTH, "How long 'no such file' is believed; 1.", "--negative-ttl", metavar="TIME"),
    ] = None,
    write_through: Annotated[
        bool | None,
        _option(
            _TRUTH, "close() waits for the store and reports its errors.", "--write-through/--write-back"
        ),
    ] = None,
    fsync: Annotated[
        str | None,
        _option(_TRUTH, "What fsync() waits for; local.", "--fsync", metavar="local|remote"),
    ] = None,
    upload_delay: Annotated[
        str | None,
        _option(_TRUTH, "How long after close() the upload starts; 1.", "--upload-delay", metavar="TIME"),
    ] = None,
    front: Annotated[
        str | None,
        _option(_PROCESS, "What answers the kernel; auto.", "--front", metavar="auto|native|python"),
    ] = None,
    fuse_uring: Annotated[
        str | None,
        _option(_PROCESS, "Requests through io_uring; auto.", "--fuse-uring", metavar="auto|on|off"),
    ] = None,
    foreground: Annotated[
        bool,
        _option(_PROCESS, "Stay; log to standard error; tell systemd.", "--foreground", "-f"),
    ] = False,
    config: Annotated[
        str | None,
        _option(_PROCESS, "TOML file; names as here, with underscores.", "--config", metavar="FILE"),
    ] = None,
    log_level: Annotated[
        str | None,
        _option(_PROCESS, "debug, info, warning or error; info.", "--log-level", metavar="LEVEL"),
    ] = None,
    metrics: Annotated[
        str | None,
        _option(_PROCESS, "Serve Prometheus metrics on PORT or HOST:PORT.", "--metrics", metavar="ADDR"),
    ] = None,
    options: Annotated[
        str | None,
        _option(_PROCESS, "Options as in /etc/fstab: ttl=60,ro,noexec...", "-o", metavar="OPTIONS"),
    ] = None,
    as_json: Annotated[
        bool,
        _option(_PROCESS, "Print what was decided as JSON.", "--json"),
    ] = False,
) -> None:
    """Mount SOURCE at MOUNTPOINT; returns when it can be listed.

    Every option is also a setting of the TOML file (read_only = true) and
    of the environment (TIERFS_READ_ONLY=1); the command line wins, then the
    environment, then the file.
    """
    given: dict[str, object] = {
        "source": source, "mountpoint": mountpoint, "tier": tier, "state_dir": state_dir,
        "memory_budget": memory_budget, "dirty_limit": dirty_limit, "read_ahead": read_ahead,
        "endpoint_url": endpoint_url, "region": region, "profile": profile,
        "fetch_concurrency": fetch_concurrency, "upload_concurrency": upload_concurrency,
        "part_size": part_size, "replica": replica, "replica_endpoint_url": replica_endpoint_url,
        "store_timeout": store_timeout, "read_only": read_only,
        "open_mode": open_mode, "fuse_uring": fuse_uring,
        "allow_other": allow_other, "uid": uid, "gid": gid, "umask": umask, "ttl": ttl,
        "negative_ttl": negative_ttl, "write_through": write_through, "fsync": fsync,
        "upload_delay": upload_delay, "front": front, "log_level": log_level, "metrics": metrics,
    }  # fmt: skip
    code = mount(given, config_file=config, options=options, foreground=foreground, as_json=as_json)
    if code != exit_codes.OK:
        raise typer.Exit(code)


def mount(
    given: dict[str, object],
    *,
    config_file: str | None = None,
    options: str | None = None,
    foreground: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Load the settings, start the engine, say what it decided. Returns the exit status."""
    import os

    from tierfs.cli import launch, output
    from tierfs.config import load
    from tierfs.config.fstab import MountOptions, parse
    from tierfs.config.load import unknown_environment

    parsed = parse(options) if options else MountOptions()
    said = {name: value for name, value in given.items() if value is not None and value != []}
    settings = load(
        parsed.settings | said,
        config_file=config_file or parsed.config_file,
        kernel_options=parsed.kernel,
    )
    for name in unknown_environment(os.environ):
        output.say(f"{name} in the environment is not a setting")

    launch.warn_of_large_tiers(settings)

    announcement: launch.Announcement = "json" if as_json else "none" if quiet else "text"
    serve = launch.serve_here if foreground else launch.serve_detached
    return serve(settings, announcement)
