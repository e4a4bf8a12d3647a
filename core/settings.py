"""Every setting of the server: its name, default, unit, and one sentence of help."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from forebay.core.addresses import is_loopback


class Settings(BaseSettings):
    """Flags come first, then ``FOREBAY_*`` environment variables, then the file of ``--config``, then the defaults."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_", extra="forbid", validate_default=False)

    host: str = Field("127.0.0.1", description="Address to listen on; another than loopback needs a token.")
    port: int = Field(8889, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    public_url: str = Field(
        "", description="URL under which run processes reach this server, if it is not the one it listens on."
    )
    gateway_host: str = Field("", description="Address that the gateway listens on, if it is not the server's.")
    gateway_port: int = Field(0, ge=0, le=65535, description="Port of the gateway; 0 takes a free one.")
    gateway_url: str = Field(
        "", description="URL under which agents reach the gateway, if it is not the one it listens on."
    )
    data_dir: Path = Field(Path("forebay-data"), description="Directory of the journal, its index and the runs' files.")
    store: Literal["journal", "memory"] = Field("journal", description="Where samples live; `memory` forgets at exit.")
    segment_bytes: int = Field(
        256 << 20, ge=1 << 16, description="Bytes after which the journal begins another segment."
    )
    max_journal_bytes: int = Field(
        0, ge=0, description="Bytes of the journal from which delivered samples go, oldest first; 0 sets no limit."
    )
    generators: Annotated[list[Path], NoDecode] = Field(
        default_factory=list, description="Folders, or single files, with generators, besides `./generators`."
    )
    token: str = Field("", description="Bearer token that every route but the health checks asks for.")
    insecure: bool = Field(False, description="Allow listening on other than loopback addresses without a token.")
    input_roots: Annotated[list[Path], NoDecode] = Field(
        default_factory=list,
        description="Folders under which an `input_file` or `template_path` must lie; anywhere if there are none.",
    )
    max_body_bytes: int = Field(1 << 30, ge=1, description="Bytes of the largest request body.")
    max_bodies_bytes: int = Field(
        1 << 30, ge=1, description="Bytes of all request bodies held at once; more must wait."
    )
    write_wait_s: float = Field(60.0, ge=0, description="Seconds that `/buffer/write` waits for room before its 429.")
    max_wait_s: float = Field(90.0, ge=0, description="Seconds that a long poll waits at most.")
    start_wait_s: float = Field(4.0, ge=0, description="Seconds that a start waits for its generator's inspection.")
    inspect_timeout_s: float = Field(120.0, gt=0, description="Seconds that the inspection of one generator may take.")
    max_restarts: int = Field(3, ge=0, description="Times that a crashed run process is started again.")
    stop_grace_s: float = Field(10.0, ge=0, description="Seconds between asking a run process to stop and killing it.")
    refuse_hold_s: float = Field(
        1.0, ge=0, description="Seconds for which a repeated bad start is held before its reply."
    )
    run_defaults: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Fields of runs by task type, where a start leaves them out: `[run_defaults.math]` in the file.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")

    @field_validator("generators", "input_roots", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """An environment variable holds several paths as the shell's PATH does."""
        return [part for part in value.split(":") if part] if isinstance(value, str) else value

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)


def load_settings(config: Path | None = None, **flags: object) -> Settings:
    """Read settings from flags (those that are not None), the environment and a TOML file.

    Raises ``pydantic.ValidationError`` for a wrong value and ``FileNotFoundError`` for a missing file.
    """
    if config is not None and not config.is_file():
        raise FileNotFoundError(f"there is no configuration file {config}")

    # A class for each call: pydantic-settings takes the path of a file only from the class.
    class Configured(Settings):
        model_config = SettingsConfigDict(toml_file=config)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic's signature
            file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic's signature
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            # The first that has a value wins. ``.env`` and files of secrets are no sources.
            return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    given = {name: value for name, value in flags.items() if value is not None}
    # Checked already; a ``Settings`` of its own would read the environment a second time.
    return Settings.model_construct(**Configured(**given).model_dump())  # type: ignore[arg-type]
