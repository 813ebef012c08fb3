"""URLs whose text hides passwords, tokens and signatures."""

from __future__ import annotations

import re
from typing import Any, Self, TypeVar

T = TypeVar("T")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://[^\s'\"<>]+")
_USER = re.compile(r"(?<=://)(?P<user>[^/?#]*)@")
_PARAMETER = re.compile(r"(?<=[?&;#])(?P<key>[^=&;#]+)=(?P<value>[^&;#]*?)(?=[&;#]|[:,.)\]]*$)")
# Parts of the names of parameters, such as X-Amz-Signature, sig, AccessKeyId, access_token.
_SECRET = re.compile(
    r".*(?:signature|token|secret|passw|credential|auth|api[-_]?key|access[-_]?(?:key|id)|hmac|jwt"
    r"|session|key[-_]pair).*|(?:.*[-_.])?(?:sig|key|pwd|pass|pw|code|policy|hdnea|hdnts)",
    re.IGNORECASE,
)
# No special character of a glob or a URL.
_MASK = "REDACTED"


class Address(str):
    """A URL as text without its secrets, for messages; `real` is the URL for requests."""

    __slots__ = ("real",)

    real: str

    def __new__(cls, url: str) -> Self:
        """Hide the secrets of a URL."""
        address = super().__new__(cls, _without_secrets(url))
        address.real = url
        return address

    def __reduce__(self) -> tuple[Any, ...]:
        return Address, (self.real,)


def hiding(obj: T) -> T:
    """Return a URL with secrets as an `Address`, and anything else unchanged."""
    if not isinstance(obj, str) or isinstance(obj, Address) or "://" not in obj:
        return obj
    return obj if _without_secrets(obj) == obj else Address(obj)  # type: ignore[return-value]


def real(url: str) -> str:
    """Return the URL for requests."""
    return url.real if isinstance(url, Address) else url


def hidden(text: str) -> str:
    """Mask the passwords, tokens and signatures of all URLs in a text."""
    return _URL.sub(lambda match: _without_secrets(match[0]), text) if "://" in text else text


def _without_secrets(url: str) -> str:
    # Each link of a chain, such as zip://m.zt::https://host/a.zip, is a URL.
    links = re.split(r"::(?=[A-Za-z][A-Za-z0-9+.\-]*://)", url)
    return "::".join([_PARAMETER.sub(_parameter, _USER.sub(_user, link)) for link in links])


def _user(match: re.Match[str]) -> str:
    name, colon, _ = match["user"].partition(":")
    scheme = match.string[: match.start()].lower()
    if colon:
        return f"{name}:{_MASK}@"
    # A container of Azure stands there too.
    return f"{_MASK}@" if scheme in {"http://", "https://"} else match[0]


def _parameter(match: re.Match[str]) -> str:
    is_secret = match["value"] and _SECRET.fullmatch(match["key"].removeprefix("amp;"))
    return f"{match['key']}={_MASK}" if is_secret else match[0]
