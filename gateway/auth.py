"""API keys, and the tenant behind one: its name for fair scheduling, its salt for a prefix cache of its own."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from aiohttp import hdrs, web

from wire.api_keys import split_api_keys
from wire.errors import Unauthorized


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    """Stable short digest of the key, or "default"; safe to log and to export."""
    salt: str
    """Secret; part of the root hash of everything the tenant caches."""

    def cache_salt(self, caller_salt: str) -> str:
        """The tenant's salt with the caller's added. Lengths are fixed, so no two pairs collide."""
        return self.salt + caller_salt


_EVERYBODY = Tenant("default", "")


class ApiKeys:
    """The keys that are let in; without any, everybody is."""

    def __init__(self, comma_separated: str | None) -> None:
        keys = [key.encode() for key in split_api_keys(comma_separated)]
        self._tenants = [(key, _tenant_of(key)) for key in keys]

    def tenant_of(self, request: web.Request) -> Tenant:
        """Who is asking. Raises Unauthorized without one of our keys as Bearer token."""
        if not self._tenants:
            return _EVERYBODY
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        given = token.strip().encode(errors="surrogateescape") if scheme.lower() == "bearer" else b""
        found = None
        for key, tenant in self._tenants:  # every key is compared, so time tells nothing
            if hmac.compare_digest(key, given):
                found = tenant
        if found is None:
            raise Unauthorized("a valid API key is needed: `Authorization: Bearer KEY`")
        return found


def _tenant_of(key: bytes) -> Tenant:
    name = hashlib.sha256(b"phasemesh tenant\0" + key).hexdigest()[:12]
    return Tenant(name, hmac.digest(key, b"phasemesh cache salt", "sha256").hex())
