"""Where the credentials of an S3 store come from, in words: for ``tierfs doctor``. Never the credentials."""

from __future__ import annotations

import boto3.session
import botocore.exceptions

from tierfs.config import Settings
from tierfs.errors import ConfigError
from tierfs.log import add_secret

_SOURCES = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "~/.aws/credentials",
    "config-file": "~/.aws/config",
    "iam-role": "the role of this EC2 instance",
    "container-role": "the role of this container",
    "assume-role": "an assumed role",
    "assume-role-with-web-identity": "a web identity",
    "sso": "AWS single sign-on",
    "custom-process": "the credential process of the profile",
}


def describe_credentials(settings: Settings) -> str | None:
    """The source of the credentials, and the end of the access key's id; None if requests go unsigned.

    May ask the instance's metadata service. Raises ``ConfigError`` for a profile that does not exist.
    """
    try:
        session = boto3.session.Session(profile_name=settings.profile, region_name=settings.region)
        found = session.get_credentials()
        if found is None:
            return None
        key = found.get_frozen_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"credentials: {error}") from None
    add_secret(key.secret_key)
    add_secret(key.token)
    source = _SOURCES.get(found.method, found.method)
    profile = f", profile {session.profile_name}" if settings.profile else ""
    return f"from {source}{profile}, key id ...{(key.access_key or '')[-4:]}"
