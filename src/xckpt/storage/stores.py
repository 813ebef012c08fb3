"""Stores of obstore for URLs, and their options.

Options may have the names of obstore, or of s3fs, gcsfs, adlfs and fsspec's HTTP file system.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode, urlsplit

from xckpt.addresses import hiding
from xckpt.errors import UnsupportedError
from xckpt.storage.limits import Pool
from xckpt.storage.requests import Limits, split_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from ssl import SSLContext

_KINDS = {
    **dict.fromkeys(("http", "https"), "http"),
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gs"),
    **dict.fromkeys(("az", "abfs", "abfss", "azure"), "az"),
}
# The fields of obstore's ClientConfig.
_CLIENT_OPTIONS = {
    "allow_http", "allow_invalid_certificates", "connect_timeout", "default_content_type",
    "default_headers", "http1_only", "http2_keep_alive_interval", "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle", "http2_only", "pool_idle_timeout", "pool_max_idle_per_host",
    "proxy_ca_certificate", "proxy_excludes", "proxy_url", "randomize_addresses",
    "root_certificate", "user_agent",
}  # fmt: skip
# Options for caches and event loops that do not exist here, or for creating buckets.
_WITHOUT_EFFECT = {
    "asynchronous", "block_size", "cache_regions", "cache_type", "default_block_size",
    "default_cache_type", "default_fill_cache", "max_pool_connections", "project",
    "skip_instance_cache", "trust_env", "use_listings_cache",
}  # fmt: skip
_BRACKETS = re.compile(r"\[[^\]/]*\]?")
# A path that obstore sends as it is.
_PLAIN = re.compile(r"(?:/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.~+=,@:-]+)+")

# Stores by URL and options; each store has its own connections.
_stores: Pool[Any] = Pool(limit=64)
#: Regions of buckets that are not where they were expected.
regions: dict[str, str] = {}


def store_kind(url: str) -> str | None:
    """Return the kind of store that a URL is in; None for other file systems and chained URLs."""
    scheme, separator, address = url.partition("://")
    is_chained = "::" in _BRACKETS.sub("", address)  # "::" in brackets is part of an IPv6 address
    return _KINDS.get(scheme.lower()) if separator and not is_chained else None


def split_nested(storage_options: Mapping[str, Any] | None) -> tuple[dict[str, Any], Limits]:
    """Separate limits from options, and put nested ones of other libraries next to the others."""
    flat = dict(storage_options or {})
    for nest in ("client_kwargs", "config_kwargs", "client_options", "retry_config"):
        for key, value in (flat.pop(nest, None) or {}).items():
            flat[key] = {**value, **flat.get(key, {})} if key == "headers" else value
    retries = flat.pop("max_retries", None) or flat.pop("retries", None)
    if isinstance(retries, dict):  # of botocore
        retries = retries.get("max_attempts")
    flat |= {} if retries is None else {"retries": retries}
    return split_options(flat, allow_top_level=True)


def open_store(
    url: str, options: Mapping[str, Any], limits: Limits, *, retries: int = 0
) -> tuple[Any, str]:
    """Return the store of an object and its path in it; `options` come from `split_nested`."""
    kind = store_kind(url) or "http"
    if kind == "http":
        options = {**_user_in(url), **options}
        root, path = _split_address(address_of(url, options))
    else:
        root, path = _split_key(kind, url)
    store = options.get("store")  # made by the user
    if store is not None and kind == "http":
        return store, url.removeprefix(str(getattr(store, "url", ""))).lstrip("/")
    if store is not None:
        prefix = getattr(store, "prefix", None)
        return store, path.removeprefix(f"{prefix}/") if prefix else path
    key = kind, root, options_key(options), limits, retries, regions.get(root.partition("/")[0])
    return _stores.get(key, partial(_made, kind, root, options, limits, retries)), path


def options_key(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a key for options."""
    # The repr of a store may panic.
    pairs = ((key, id(v) if key == "store" else repr(v)) for key, v in options.items())
    return tuple(sorted(pairs))


def address_of(url: str, options: Mapping[str, Any] = {}) -> str:
    """Return the address of a request: a URL with parameters, and without a user."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError("it names no host")
    query = "&".join(filter(None, (parts.query, urlencode(options.get("params") or {}))))
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"{address}?{query}" if query else address


def _split_address(url: str) -> tuple[str, str]:
    """Return the origin and the path of a plain URL; else the whole URL and an empty path."""
    scheme, _, address = url.partition("://")
    host, slash, path = address.partition("/")
    return (f"{scheme}://{host}", path) if _PLAIN.fullmatch(slash + path) else (url, "")


def _split_key(kind: str, url: str) -> tuple[str, str]:
    """Return the bucket and the key of an object."""
    root, _, path = url.partition("://")[2].partition("/")
    if "" in path.split("/"):
        # Paths of obstore have no empty parts; for S3 they can be part of the endpoint.
        folder, _, path = f"/{path}".rpartition("//")
        if kind != "s3" or not path or path.endswith("/"):
            raise UnsupportedError("names of objects with empty parts are unsupported", path=url)
        root += folder + "/"
    return root, path


@dataclass
class _Settings:
    """Options of the user, grouped by the parameter of obstore that accepts them."""

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    profile: str | None = None
    provider: Callable[[], Any] | None = None  # makes a provider of credentials

    @classmethod
    def of(cls, kind: str, options: Mapping[str, Any]) -> _Settings:
        """Group options by the parameter of obstore that accepts them."""
        settings = cls()
        names = {**_EVERYWHERE, **_NAMES[kind]}
        for key, value in options.items():
            name = names.get(key, key)
            if value is None or key in _WITHOUT_EFFECT:
                continue
            if not isinstance(name, str):
                name(settings, value)
            elif name in _CLIENT_OPTIONS:
                settings.client[name] = value
            elif kind == "http":
                raise _unknown(kind, key)
            elif value is not False:
                settings.config[name] = value if isinstance(value, bool | str) else str(value)
        return settings

    def take_headers(self, headers: Mapping[str, str]) -> None:
        self.headers |= headers

    def take_auth(self, auth: Any) -> None:
        user, password, *_ = auth
        token = b64encode(f"{user}:{password}".encode()).decode()
        self.headers["Authorization"] = f"Basic {token}"

    def take_parameters(self, parameters: Any) -> None:
        """Ignore parameters of the URL, which `address_of` adds to it."""

    def take_verify(self, verify: bool | str) -> None:  # noqa: FBT001  as in requests
        if isinstance(verify, bool):
            self.client["allow_invalid_certificates"] = not verify
        else:
            self.client["root_certificate"] = Path(verify).read_bytes()

    def take_profile(self, profile: str) -> None:
        self.profile = profile

    def take_google_token(self, token: Any) -> None:
        if token == "anon":  # noqa: S105  a name
            self.config["skip_signature"] = True
        elif isinstance(token, dict):
            self.config["service_account_key"] = json.dumps(token)
            if "gcs_base_url" in token:  # of an emulator
                self.config["base_url"] = token["gcs_base_url"]
        elif not isinstance(token, str):
            from obstore.auth.google import GoogleCredentialProvider

            self.provider = partial(GoogleCredentialProvider, token)
        elif Path(token).is_file():
            self.config["application_credentials"] = token
        elif token not in {"google_default", "cloud", "cache"}:
            self.config["bearer_token"] = token

    def take_connection_string(self, text: str) -> None:
        names = {
            "AccountName": "account_name",
            "AccountKey": "account_key",
            "BlobEndpoint": "endpoint",
            "SharedAccessSignature": "sas_key",
        }
        fields = [pair.split("=", 1) for pair in text.split(";") if "=" in pair]
        self.config |= {names[name]: value for name, value in fields if name in names}

    def take_azure_credential(self, credential: Any) -> None:
        if isinstance(credential, str):
            self.config["sas_key" if "sig=" in credential else "account_key"] = credential
        else:
            from obstore.auth.azure import AzureCredentialProvider

            self.provider = partial(AzureCredentialProvider, credential)


# Options of other libraries, with their names in obstore or the method that takes them.
_EVERYWHERE: dict[str, Any] = {
    "anon": "skip_signature",
    "default_headers": _Settings.take_headers,
    "headers": _Settings.take_headers,
    "proxy": "proxy_url",
    "verify": _Settings.take_verify,
}
_NAMES: dict[str, dict[str, Any]] = {
    "http": {
        "auth": _Settings.take_auth,
        "params": _Settings.take_parameters,
        "ssl": _Settings.take_verify,
    },
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "endpoint_url": "endpoint",
        "region_name": "region",
        "requester_pays": "request_payer",
        "profile": _Settings.take_profile,
    },
    "gs": {"endpoint_url": "base_url", "token": _Settings.take_google_token},
    "az": {
        "sas_token": "sas_key",
        "endpoint_url": "endpoint",
        "connection_string": _Settings.take_connection_string,
        "credential": _Settings.take_azure_credential,
    },
}


def _made(kind: str, root: str, options: Mapping[str, Any], limits: Limits, retries: int) -> Any:
    from obstore import exceptions, store

    settings = _Settings.of(kind, options)
    config, bucket = settings.config, root.partition("/")[0]
    endpoint = config.get("endpoint") or config.get("base_url")
    if kind == "s3":
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3")
        endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
        config |= {"region": regions[bucket]} if bucket in regions else {}
    elif kind == "gs" and not endpoint and os.environ.get("STORAGE_EMULATOR_HOST"):
        emulator = os.environ["STORAGE_EMULATOR_HOST"]
        endpoint = config["base_url"] = emulator if "://" in emulator else f"http://{emulator}"
    is_secure = not (root if kind == "http" else endpoint or "").lower().startswith("http:")
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=limits.timeout),
        "read_timeout": timedelta(seconds=limits.read_timeout),
        "connect_timeout": timedelta(seconds=min(limits.read_timeout, limits.timeout)),
        "user_agent": "xckpt",
        **({} if is_secure else {"allow_http": True}),
        **({"default_headers": settings.headers} if settings.headers else {}),
        **settings.client,
    }
    keywords: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": retries}}
    if kind == "http":
        return store.HTTPStore.from_url(root, **keywords)
    if settings.provider is not None:
        keywords["credential_provider"] = settings.provider()
    elif kind == "s3" and not {"access_key_id", "skip_signature"} & config.keys():
        keywords["credential_provider"] = _profile(settings.profile)
    if "/" in root:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        region = config.get("region") or region or "us-east-1"
        base = (endpoint or f"https://s3.{region}.amazonaws.com").rstrip("/")
        config |= {"endpoint": f"{base}/{quote(root)}", "virtual_hosted_style_request": True}
    if kind == "az" and "@" in bucket:
        bucket, _, host = bucket.partition("@")
        config.setdefault("account_name", host.partition(".")[0])
    classes = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}
    try:
        return classes[kind](bucket, config=config, **keywords)
    except exceptions.UnknownConfigurationKeyError as error:
        unknown = re.search(r"key: '(.*?)'", str(error))
        raise _unknown(kind, unknown[1] if unknown else str(error)) from error


def _unknown(kind: str, key: str) -> ValueError:
    keys = {*_EVERYWHERE, *_NAMES[kind], *Limits._fields, *_CLIENT_OPTIONS, "store"}
    more = {"s3": "S3Config", "gs": "GCSConfig", "az": "AzureConfig"}.get(kind)
    text = f"unknown key {key!r} in storage_options for {kind}://; supported are "
    text += ", ".join(sorted(keys))
    return ValueError(text if more is None else f"{text}, and the keys of obstore.store.{more}")


def _profile(name: str | None) -> Any:
    """Return a provider of an AWS profile's credentials; None if obstore finds credentials."""
    files = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
    paths = [os.environ.get(name) or f"~/.aws/{file}" for name, file in files.items()]
    is_requested = name is not None or "AWS_PROFILE" in os.environ
    has_files = any(Path(path).expanduser().is_file() for path in paths)
    if name is None and ("AWS_ACCESS_KEY_ID" in os.environ or not (has_files or is_requested)):
        return None
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        if not is_requested:
            return None
        raise ImportError("profiles of AWS need boto3: pip install boto3") from error
    try:
        session = boto3.Session(profile_name=name)
        # Without credentials in the files, obstore asks containers and instances.
        return session.get_credentials() and Boto3CredentialProvider(session)
    except Exception as error:
        raise ValueError(f"the profile of AWS cannot be used: {error}") from error


def lacking(url: str, error: ImportError) -> ImportError:
    """Return the error for a missing package, which names the extra to install."""
    text = f"cannot open {hiding(url)}: {error}. Install it with: pip install 'xckpt[remote]'"
    return ImportError(text)


# --- secrets -------------------------------------------------------------------------------------


def headers_of(url: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's headers for requests to a web server."""
    return _Settings.of("http", {**_user_in(url), **options}).headers


def _user_in(url: str) -> dict[str, Any]:
    """Return the user and the password in a URL as an option."""
    user = urlsplit(url).netloc.rpartition("@")[0]
    return {"auth": tuple(map(unquote, user.partition(":")[::2]))} if user else {}


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a web server without secrets, which no other server may get."""
    secrets = {"auth", "default_headers", "headers", "params"}
    return {key: value for key, value in options.items() if key not in secrets}


def ssl_context(options: Mapping[str, Any]) -> SSLContext:
    """Return an SSL context that checks certificates as the options request."""
    from ssl import CERT_NONE, create_default_context

    client = _Settings.of("http", options).client
    context = create_default_context()
    authority = client.get("root_certificate")
    if authority is not None:
        context.load_verify_locations(cadata=bytes(authority).decode())
    if client.get("allow_invalid_certificates"):
        context.check_hostname, context.verify_mode = False, CERT_NONE
    return context
