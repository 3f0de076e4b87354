"""API keys: a file of hashed keys and of what each key may do.

```toml
[[keys]]
name = "alice"                       # in metrics and logs, never a secret
sha256 = "9f86d081884c7d65…"         # of the key, in hex
requests_per_minute = 600
tokens_per_minute = 100_000
max_concurrency = 8
tenant = "team-a"                    # default: the key's name
tiers = ["standard", "batch"]        # default: all
tenant_from_header = false           # whether the header of --tenant-header takes precedence over `tenant`
```

A key has 256 random bits, so it cannot be guessed, however fast the hash is. One SHA-256 is therefore enough; a slow
hash would only slow down every request.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from common.contract.errors import OperatorError
from common.contract.tiers import Tier
from common.runtime.clock import Clock, monotonic
from gateway.intake.schemas import field_path
from gateway.web.watched_files import WatchedFiles

MAX_KEYS: Final = 4096
"""Most keys in a file."""
MAX_TENANT_CHARS: Final = 256
"""Longest tenant name in characters, as in the wire protocol."""
_MAX_FILE_BYTES: Final = 4 * 2**20
_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
_PREFIX: Final = "baton-"
_KEY_BYTES: Final = 32


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable")
    return text


KeyName = Annotated[str, Field(pattern=_NAME)]
_PerMinute = Annotated[int, Field(ge=1, le=2**40)]


class ApiKey(BaseModel):
    """One API key and what it may do."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: KeyName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None
    max_concurrency: Annotated[int, Field(ge=1, le=65536)] | None = None
    tenant: Annotated[str, Field(min_length=1, max_length=MAX_TENANT_CHARS), AfterValidator(_printable)] | None = None
    tenant_from_header: bool = False
    tiers: Annotated[list[Annotated[Tier, Field(strict=False)]], Field(min_length=1)] | None = None


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    keys: Annotated[list[ApiKey], Field(min_length=1, max_length=MAX_KEYS)]


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file. Raises `OperatorError`, which names the line or the field at fault."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise OperatorError(f"{path}: larger than {_MAX_FILE_BYTES} bytes")
        keys = _File.model_validate(tomllib.loads(raw.decode())).keys
    except OSError as error:
        raise OperatorError(f"cannot read the API keys: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise OperatorError(f"{path}: {field_path(first['loc'])}: {first['msg']}") from error
    except ValueError as error:  # invalid TOML or invalid UTF-8
        raise OperatorError(f"{path}: {error}") from error
    for field in ("name", "sha256"):
        seen: set[str] = set()
        for index, key in enumerate(keys):
            value = getattr(key, field)
            if value in seen:
                raise OperatorError(f"{path}: keys[{index}].{field}: {value} comes twice")
            seen.add(value)
    return tuple(keys)


class Keyring:
    """The keys in force. A changed file is read again at the next request."""

    def __init__(
        self,
        path: Path,
        *,
        clock: Clock = monotonic,
        reloaded: Callable[[bool], None] = lambda good: None,
    ) -> None:
        """The arguments are as in `WatchedFiles`. Raises `OperatorError`."""
        self._file = WatchedFiles(
            "the API keys", [path], lambda: _by_digest(read_keys(path)), clock=clock, reloaded=reloaded
        )

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All entries of the file."""
        return tuple(self._file.current().values())

    def find(self, given: str) -> ApiKey | None:
        """The entry of a given key, or None. The time that a lookup takes can tell something about the hashes in the
        file, but nothing about the keys, which are random."""
        return self._file.current().get(hashlib.sha256(given.encode(errors="surrogateescape")).digest())


def _by_digest(keys: tuple[ApiKey, ...]) -> dict[bytes, ApiKey]:
    return {bytes.fromhex(key.sha256): key for key in keys}


def draw_key() -> tuple[str, str]:
    """A new key and its SHA-256 as written in the file."""
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    return key, hashlib.sha256(key.encode()).hexdigest()


def main() -> None:
    """`baton api-key NAME`: draw a key, and print it with its entry for the gateway's file."""
    arguments = sys.argv[1:]
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: baton api-key NAME", file=sys.stderr)
        sys.exit(0 if arguments in (["-h"], ["--help"]) else 2)
    key, digest = draw_key()
    try:
        entry = ApiKey(name=arguments[0], sha256=digest)
    except ValidationError:
        print(
            "error: a name is 1 to 64 letters, digits and . _ @ -, and begins with a letter or digit", file=sys.stderr
        )
        sys.exit(2)
    print(f"# The key, which is not shown again:\n{key}\n")
    print("# Its entry in the file of --api-keys:")
    print(f'[[keys]]\nname = "{entry.name}"\nsha256 = "{entry.sha256}"')
