"""Merge the sources of settings, in order of precedence, and fill in defaults."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierfs.config import values
from tierfs.config.options import MIN_MEMORY_BUDGET_BYTES, OPTIONS, name_of, suggestion
from tierfs.config.schema import Settings, mount_id_of
from tierfs.config.tiers import place_tiers
from tierfs.errors import ConfigError
from tierfs.mountpoint import canonical, is_below

ENV_PREFIX = "TIERFS_"


def load(
    command_line: Mapping[str, object],
    *,
    config_file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    kernel_options: Sequence[str] = (),
) -> Settings:
    """The settings of one mount.

    ``command_line`` maps names of ``OPTIONS`` to what was said there (text, or already the right type);
    None and empty lists count as not said. ``config_file`` defaults to ``TIERFS_CONFIG``.
    """
    environ = os.environ if environ is None else environ
    file = config_file or environ.get(ENV_PREFIX + "CONFIG")
    layers: list[tuple[str, Mapping[str, object]]] = [
        ("command line", command_line),
        ("environment", _from_environment(environ)),
    ]
    if file:
        layers.append((str(file), _from_file(Path(file))))
    parsed = _merge(layers)
    for name in ("source", "mountpoint"):
        if name not in parsed:
            raise ConfigError(f"{name}: not given: not on the command line, in a file or in the environment")
    fields = {OPTIONS[name].field: value for name, value in parsed.items() if name != "tier"}
    source = str(parsed["source"])
    mountpoint = canonical(os.path.expanduser(str(parsed["mountpoint"])))
    state_dir = canonical(
        os.path.expanduser(str(parsed.get("state_dir") or default_state_dir(source, mountpoint, environ)))
    )
    is_root = os.geteuid() == 0
    fields |= {"source": source, "mountpoint": mountpoint, "state_dir": state_dir}
    fields.setdefault("allow_other", is_root)
    fields.setdefault("uid", os.geteuid())
    fields.setdefault("gid", os.getegid())
    _add_aws_defaults(fields, environ)
    written = parsed.get("tier")
    fields["tiers"] = place_tiers(written if isinstance(written, list) else [], state_dir)
    fields["kernel_options"] = tuple(kernel_options)
    settings = Settings(**fields)  # type: ignore[arg-type]
    _check(settings)
    return settings


def mountpoint_in(config_file: str | os.PathLike[str]) -> str:
    """The mountpoint that a TOML file names, canonical; the rest of the file may be wrong."""
    given = _from_file(Path(config_file)).get("mountpoint")
    if given is None:
        raise ConfigError(f"mountpoint: not in {config_file}")
    return canonical(os.path.expanduser(str(_parse("mountpoint", values.text, given, str(config_file)))))


def default_base_dir(environ: Mapping[str, str]) -> str:
    """Where state goes if nothing is said: ``/var/cache/tierfs``, or ``~/.cache/tierfs`` for a user."""
    if os.geteuid() == 0:
        return "/var/cache/tierfs"
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "tierfs")


def default_state_dir(source: str, mountpoint: str, environ: Mapping[str, str]) -> str:
    return os.path.join(default_base_dir(environ), mount_id_of(source, mountpoint))


def unknown_environment(environ: Mapping[str, str]) -> list[str]:
    """Variables that look like a misspelt setting: for a warning, never for an error."""
    import difflib

    known = [ENV_PREFIX + name.upper() for name in OPTIONS]
    strange = [name for name in environ if name.startswith(ENV_PREFIX) and name not in known]
    return [name for name in strange if difflib.get_close_matches(name, known, 1, 0.85)]


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, option in OPTIONS.items():
        text = environ.get(ENV_PREFIX + name.upper())
        if text:
            found[name] = [part for part in text.split(",") if part] if option.repeats else text
    return found


def _from_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not TOML: {error}") from error
    found: dict[str, object] = {}
    for given, value in table.items():
        name = name_of(given)
        if name == "write_back":
            name, value = "write_through", not _parse("write_back", values.switch, value, str(path))
        if name not in OPTIONS:
            raise ConfigError(f"{given} (in {path}): unknown setting{suggestion(name, list(OPTIONS))}")
        if OPTIONS[name].repeats and isinstance(value, str):
            value = [value]
        found[name] = value
    return found


def _merge(layers: Sequence[tuple[str, Mapping[str, object]]]) -> dict[str, object]:
    """The first layer that says something about a setting decides; the others are not even parsed."""
    parsed: dict[str, object] = {}
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in OPTIONS:
                raise ConfigError(f"{name} ({origin}): unknown setting{suggestion(name, list(OPTIONS))}")
            if value is None or name in parsed:
                continue
            option = OPTIONS[name]
            if option.repeats:
                if not isinstance(value, list | tuple):
                    raise ConfigError(f"{name} ({origin}): {value!r} is not a list")
                if value:
                    parsed[name] = [_parse(name, option.parse, item, origin) for item in value]
            else:
                parsed[name] = _parse(name, option.parse, value, origin)
    return parsed


def _parse(name: str, parse: values.Parser, value: object, origin: str) -> object:
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"{name} ({origin}): {error}") from None


def _check_replica(settings: Settings) -> None:
    """It has to be somewhere else: what the replica holds must not appear in the mount, nor go with it."""
    replica, source = settings.replica, settings.source
    if replica is None:
        if settings.replica_endpoint_url:
            raise ConfigError("replica_endpoint_url: there is no replica")
        return
    for other, what in (
        (source, "source"),
        (settings.mountpoint, "mountpoint"),
        (settings.state_dir, "state_dir"),
    ):
        if replica.startswith("s3://") != other.startswith("s3://"):
            continue
        overlap = (
            f"{replica}/".startswith(f"{other}/") or f"{other}/".startswith(f"{replica}/")
            if replica.startswith("s3://")
            else is_below(replica, other) or is_below(other, replica)
        )
        same_store = (settings.replica_endpoint_url or settings.endpoint_url) == settings.endpoint_url
        if overlap and (same_store or not replica.startswith("s3://")):
            raise ConfigError(f"replica: {replica} and the {what} {other} overlap")


def _add_aws_defaults(fields: dict[str, object], environ: Mapping[str, str]) -> None:
    """What the AWS tools take from their own variables holds here too, below tierfs's own settings."""
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if endpoint and "endpoint_url" not in fields:
        fields["endpoint_url"] = _parse("endpoint_url", values.url, endpoint, "AWS_ENDPOINT_URL")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    if region and "region" not in fields:
        fields["region"] = region


def _check(settings: Settings) -> None:
    """What no single value shows to be wrong."""
    if settings.memory_budget_bytes < MIN_MEMORY_BUDGET_BYTES:
        raise ConfigError(f"memory_budget: {settings.memory_budget_bytes} bytes are too few; 32M at least")
    if settings.open_mode == "none" and not settings.read_only:
        raise ConfigError("open_mode: none is for mounts that are read-only; add --read-only")
    if settings.mountpoint == "/":
        raise ConfigError("mountpoint: / cannot be covered")
    ours = [("state_dir", settings.state_dir)]
    ours += [("tier", tier.path) for tier in settings.tiers if tier.path is not None]
    for name, path in ours:
        if is_below(path, settings.mountpoint):
            raise ConfigError(f"{name}: {path} lies below the mountpoint {settings.mountpoint}")
    if settings.source.startswith("/"):
        source = settings.source
        if is_below(source, settings.mountpoint) or is_below(settings.mountpoint, source):
            raise ConfigError(f"mountpoint: {settings.mountpoint} and the source {source} overlap")
        for name, path in ours:
            if is_below(path, source):
                raise ConfigError(f"{name}: {path} lies inside the source {source}")
    _check_replica(settings)
    paths = [tier.path for tier in settings.tiers if tier.path is not None]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"tier: {path} is given twice")
