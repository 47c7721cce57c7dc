"""Settings: one schema for the command line, the environment, the TOML file and fstab.

Owns: the names of all settings, their syntax, their defaults. ``load`` is the only way in; the rest of
tierfs takes the frozen ``Settings`` that it returns. Precedence, first wins: command line (or fstab's
``-o``), environment (``TIERFS_*``), TOML file, default.

Who may call: any thread. Nothing here creates, opens or mounts anything, or touches the mountpoint;
``load`` reads the TOML file and asks the file systems of the tiers how much is free.

Raises: ``ConfigError`` whose message names the setting and where its value came from.
"""

from tierfs.config.load import load
from tierfs.config.schema import Settings, TierSetting, mount_id_of

__all__ = ["Settings", "TierSetting", "load", "mount_id_of"]
