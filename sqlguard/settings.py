"""
Configuration: flags over `SQLGUARD_*` variables over `sqlguard.toml` in the working directory, read once.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from sqlguard.errors import NotConfigured


class Settings(BaseSettings):
    """Everything that can be set; names are those of the flags with `_` for `-`."""

    model_config = SettingsConfigDict(
        env_prefix="SQLGUARD_", toml_file="sqlguard.toml", extra="forbid", frozen=True
    )

    dsn: str | None = Field(None, description="the operator's connection to the guarded database")
    listen: str = Field("127.0.0.1:6543", description="where the proxy listens")
    public_host: str | None = Field(None, description="host and port that agents reach the proxy at")
    policies: Path = Field(Path("policies"), description="folder of policy files")
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_required: bool = False
    backend_tls: str = Field("prefer", pattern="^(disable|prefer|require|verify-full)$")
    backend_tls_ca: Path | None = None
    observe: bool = False
    observe_policy: str | None = Field(None, description="what logins that are no task's are judged by")
    observe_roles: tuple[str, ...] = Field((), description="only these logins are observed; none: all")
    max_clients: int = Field(2000, gt=0)
    max_clients_per_address: int = Field(0, ge=0, description="clients from one address; 0: no bound")
    proxy_protocol: str = Field(
        "off", pattern="^(off|required)$", description="whether a load balancer says who the client is"
    )
    proxy_protocol_from: tuple[str, ...] = Field((), description="networks of the load balancers")
    startup_timeout: float = Field(15.0, gt=0, description="seconds a client may take to log in")
    max_message_bytes: int = Field(64 * 1024 * 1024, gt=0)
    catalog_check_seconds: float = Field(
        1.0, gt=0, description="how old a catalog snapshot may get unchecked"
    )
    unix_socket: Path | None = Field(None, description="folder of a Unix socket to listen on too")
    idle_release: float = Field(
        30.0,
        ge=0,
        description="seconds after which an idle client gives its server connection back; 0: never",
    )
    max_backends: int = Field(0, ge=0, description="connections to PostgreSQL for clients; 0: no bound")
    replica: str | None = Field(
        None,
        description="the operator's connection to a streaming standby, for reads of policies that allow it",
    )
    replica_max_lag: float = Field(
        5.0, gt=0, description="seconds that the replica may be behind to be read at"
    )
    workers: int = Field(1, gt=0, le=64, description="processes that share the address")
    metrics_listen: str | None = Field(None, description="where /metrics, /healthz and /readyz are served")
    shutdown_grace: float = Field(10.0, ge=0, description="seconds that open transactions get at the end")
    log_level: str = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 (the signature is pydantic's)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Precedence as a visible tuple: first wins."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


class _WithoutFile(Settings):
    model_config = SettingsConfigDict(toml_file=None)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 (the signature is pydantic's)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


def load(*, file: bool = True, **flags: Any) -> Settings:
    """
    Return the settings; flags that are None count as not given. Without *file* for what the working directory, where
    an agent may write, must not say.

    Raises NotConfigured when a value can't be used, naming each.
    """
    try:
        return (Settings if file else _WithoutFile)(
            **{name: value for name, value in flags.items() if value is not None}
        )
    except ValidationError as fault:
        lines = [f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}" for e in fault.errors()]
        raise NotConfigured(
            f"the configuration can't be used: {lines[0]}",
            detail="\n".join(lines),
            hint="look at sqlguard.toml, the SQLGUARD_* variables and the flags",
        ) from None
    except (OSError, ValueError) as fault:
        raise NotConfigured(f"sqlguard.toml can't be read: {fault}", hint="mend or remove the file") from None


def host_and_port(listen: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`. Raises NotConfigured."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:  # noqa: PLR2004 (the largest TCP port)
        raise NotConfigured(f"`{listen}` is not an address to listen on", hint="write `127.0.0.1:6543`")
    return host.strip("[]") or "127.0.0.1", int(port)
