"""The backends by their `type`, for the server's YAML and for configs that embed it."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Discriminator, Tag, TypeAdapter, ValidationError

from sandbox.docker import DockerConfig, DockerSandbox
from sandbox.pool import SessionPool
from sandbox.zygote import ZygoteConfig, ZygoteSandbox


def _type_of(value: Any) -> Any:
    return value.get("type", "zygote") if isinstance(value, dict) else getattr(value, "type", None)


BackendConfig = Annotated[
    Annotated[ZygoteConfig, Tag("zygote")] | Annotated[DockerConfig, Tag("docker")],
    Discriminator(
        _type_of,
        custom_error_type="unknown_backend",
        custom_error_message="must be a mapping whose `type` is zygote (the default) or docker",
    ),
]
"""A pydantic field of this type takes a mapping; without a `type` it is the zygote's."""
_PARSER: TypeAdapter[ZygoteConfig | DockerConfig] = TypeAdapter(BackendConfig)


def make_sandbox(config: ZygoteConfig | DockerConfig) -> SessionPool[Any]:
    """The sandbox that `config` describes, not started."""
    return DockerSandbox(config) if isinstance(config, DockerConfig) else ZygoteSandbox(config)


def read_config(path: Path) -> ZygoteConfig | DockerConfig:
    """Read a server's YAML file. Raises `ValueError`, one sentence that names the file and the key."""
    if not path.is_file():
        raise ValueError(f"there is no config file {path}; give --config an existing YAML file or leave it out")
    try:
        return _PARSER.validate_python(yaml.safe_load(path.read_text()) or {})
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        backend, *keys = first["loc"] or ("",)
        key = ".".join(str(part) for part in keys)
        hint = f"see the keys of {str(backend).title()}Config" if backend else "see sandbox/README.md"
        raise ValueError(f"{path}: {f'`{key}`: ' if key else ''}{first['msg']}; {hint}") from error
