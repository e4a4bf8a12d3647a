"""All settings of the server: name, default, unit and description."""

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from forebay.core.addresses import host_patterns, is_loopback


class Settings(BaseSettings):
    """Flags override ``FOREBAY_*`` environment variables, which override the ``--config`` file and the defaults."""

    model_config = SettingsConfigDict(env_prefix="FOREBAY_", extra="forbid", validate_default=False)

    host: str = Field("127.0.0.1", description="Address to listen on; any address except loopback needs a token.")
    port: int = Field(8889, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    public_url: str = Field(
        "", description="URL under which run processes reach this server, if it differs from the listening address."
    )
    gateway_host: str = Field("", description="Address that the gateway listens on, if it is not the server's.")
    gateway_port: int = Field(0, ge=0, le=65535, description="Port of the gateway; 0 takes a free one.")
    gateway_url: str = Field(
        "", description="URL under which agents reach the gateway, if it differs from the listening address."
    )
    data_dir: Path = Field(Path("forebay-data"), description="Directory of the journal, its index and the runs' files.")
    store: Literal["journal", "memory"] = Field(
        "journal", description="Where samples are stored; `memory` loses them at exit."
    )
    segment_bytes: int = Field(256 << 20, ge=1 << 16, description="Bytes after which the journal starts a new segment.")
    reserve_bytes: int = Field(
        16 << 20, ge=0, description="Bytes reserved for acknowledgements on a full disk; 0 reserves none."
    )
    max_journal_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of the journal above which delivered samples are removed, oldest first; 0 means no limit.",
    )
    replay_bytes: int = Field(
        8 << 30,
        ge=0,
        description="Bytes of samples kept only for replays, above which the oldest are removed; 0 keeps none.",
    )
    remembered_samples: int = Field(
        65_536,
        ge=0,
        description="Samples of a run's acknowledged groups and batches kept in memory; others are looked up.",
    )
    generators: Annotated[list[Path], NoDecode] = Field(
        default_factory=list, description="Folders or files with generators, in addition to `./generators`."
    )
    token: str = Field("", description="Bearer token that every route except the health checks requires.")
    viewer_token: str = Field(
        "", description="Second bearer token, for reading only: it opens every GET route and no other. Needs `token`."
    )
    insecure: bool = Field(
        False,
        description="Allow any listening address without a token, and requests for any `Host`.",
    )
    allowed_hosts: Annotated[list[str], NoDecode] = Field(
        default_factory=list,
        description="Host names accepted without a token, in addition to the machine's own; `.name` accepts every name "
        "that ends so.",
    )
    input_roots: Annotated[list[Path], NoDecode] = Field(
        default_factory=list,
        description="Folders that must contain every `input_file` and `template_path`; if empty, any path is allowed.",
    )
    input_wait_s: float = Field(
        10.0, gt=0, description="Maximum seconds for each step of accessing an `input_file` or `template_path`."
    )
    max_input_line_bytes: int = Field(64 << 20, ge=1, description="Maximum bytes of a line in an input file.")
    max_body_bytes: int = Field(1 << 30, ge=1, description="Maximum bytes of a request body.")
    max_bodies_bytes: int = Field(
        1 << 30, ge=1, description="Maximum bytes of all request bodies in memory; further requests wait."
    )
    max_start_bytes: int = Field(
        64 << 20,
        ge=1,
        description="Maximum bytes of the body of a start, or of any other request without samples.",
    )
    max_batch_samples: int = Field(
        10_000, ge=1, description="Maximum samples in one write; a larger write is rejected as a whole."
    )
    max_engine_reply_bytes: int = Field(
        64 << 20,
        ge=1,
        description="Maximum bytes of one engine reply, compressed or not, or of a whole stream; a larger one fails as "
        "an `engine_failure`.",
    )
    max_hook_answer_bytes: int = Field(
        1 << 30,
        ge=1 << 16,
        description="Maximum bytes of an answer of a run's hooks; with a larger one the hook fails.",
    )
    max_log_bytes: int = Field(
        32 << 20,
        ge=1 << 12,
        description="Bytes kept of a run process's output, and of its hooks' output.",
    )
    max_trace_bytes: int = Field(
        256 << 20,
        ge=0,
        description="Bytes of one run's trace, above which the oldest spans are removed; 0 keeps only summaries.",
    )
    body_room_wait_s: float = Field(
        60.0, ge=0, description="Seconds that a request body waits for memory before the server replies 429."
    )
    body_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds without a byte after which reading a request body times out.",
    )
    max_head_bytes: int = Field(
        64 << 10,
        ge=1_024,
        description="Maximum bytes of the first line and the headers of a request.",
    )
    head_timeout_s: float = Field(
        10.0,
        gt=0,
        description="Maximum seconds from the first byte of a request to the end of its headers.",
    )
    idle_timeout_s: float = Field(
        75.0,
        gt=0,
        description="Seconds after which a connection is closed that has no request in progress, or whose client reads "
        "nothing of a reply.",
    )
    write_wait_s: float = Field(60.0, ge=0, description="Seconds that `/buffer/write` waits for room before a 429.")
    max_wait_s: float = Field(90.0, ge=0, description="Maximum seconds of a long poll.")
    start_wait_s: float = Field(4.0, ge=0, description="Seconds that a start waits for its generator's inspection.")
    inspect_timeout_s: float = Field(120.0, gt=0, description="Maximum seconds for the inspection of one generator.")
    max_restarts: int = Field(3, ge=0, description="Maximum restarts of a crashed run process.")
    max_workers: int = Field(64, ge=1, description="Maximum workers of one run.")
    worker_silence_s: float = Field(
        10.0, gt=0, description="Seconds without a report after which a run's worker counts as dead."
    )
    environment_python: str = Field(
        "",
        description="Python of the generators `verifiers` and `harbor`, which has the library and `msgspec`.",
    )
    ray_address: str = Field(
        "",
        description="Ray cluster for runs with `backend` `ray`: `HOST:PORT` of its head, or `auto` for this machine's.",
    )
    ray_namespace: str = Field("forebay", description="Ray namespace of these runs.")
    stop_grace_s: float = Field(4.0, ge=0, description="Seconds between asking a run process to stop and killing it.")
    stop_limit_s: float = Field(
        10.0, gt=0, description="Seconds after SIGTERM within which the server ends, even if something hangs."
    )
    refuse_hold_s: float = Field(
        1.0, ge=0, description="Seconds by which the reply to a repeated invalid start is delayed."
    )
    run_defaults: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Defaults for fields of runs, by task type, for example `[run_defaults.math]` in the file.",
    )
    replay: str = Field(
        "", description="Run or recording that starts over slime's routes replay unless they name one; empty for none."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of the server's log: text, or one JSON object per line."
    )

    @field_validator("generators", "input_roots", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Split an environment variable at colons, as the shell does with PATH."""
        return [part for part in value.split(":") if part] if isinstance(value, str) else value

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _name_hosts(cls, value: object) -> object:
        """Split a flag or an environment variable at commas."""
        is_text = isinstance(value, str) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
        return host_patterns(cast("str | list[str]", value)) if is_text else value

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)


def load_settings(config: Path | None = None, **flags: object) -> Settings:
    """Read settings from flags (those that are not None), the environment and a TOML file.

    Raises ``pydantic.ValidationError`` for an invalid value and ``FileNotFoundError`` for a missing file.
    """
    if config is not None and not config.is_file():
        raise FileNotFoundError(f"there is no configuration file {config}")

    # A new class for each call, because pydantic-settings takes the path of a file only from the class.
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
            # The first source with a value wins. ``.env`` and files of secrets are not used.
            return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    given = {name: value for name, value in flags.items() if value is not None}
    # Validated already; constructing a ``Settings`` normally would read the environment again.
    return Settings.model_construct(**Configured(**given).model_dump())  # type: ignore[arg-type]
