"""Makes the image of the docker backend without a registry: `python -m sandbox.image`.

The image is this host's own Python: its interpreter and standard library, the configured packages, and the
shared libraries that these need, imported as a tar. There is no shell and nothing else in it. With a
registry at hand, `docker build -f sandbox/Dockerfile` makes one that is used alike.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sandbox.base import SandboxError, Unsupported
from sandbox.contained import SOURCES
from sandbox.docker import DockerConfig, connect
from sandbox.launch import package_binds

HOME, OWN, PACKAGES = "/python", "/own", "/packages"
_LIBRARIES = f"{HOME}/libraries"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "idlelib", "tkinter", "turtledemo", "ensurepip"}
_ENVIRONMENT = {
    "PATH": f"{HOME}/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": _LIBRARIES,
    "PYTHONHOME": HOME,
    "PYTHONPATH": f"{OWN}:{PACKAGES}",
}
_START = "from sandbox.contained import main; main()"
_ENTRYPOINT = f'ENTRYPOINT ["{HOME}/bin/python3", "-s", "-S", "-B", "-c", "{_START}"]'


def build(config: DockerConfig) -> None:
    """Make `config.image` with `config.packages`. Raises `Unsupported` if there is no daemon or it refuses."""
    client = connect()
    from docker.errors import DockerException

    replaced = client.images.list(config.image)
    changes = [*(f"ENV {name}={value}" for name, value in _ENVIRONMENT.items()), "WORKDIR /tmp", _ENTRYPOINT]
    repository, _, tag = config.image.partition(":")
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        write_tar(file, config.packages)
        file.seek(0)
        said = client.api.import_image(src=file.name, repository=repository, tag=tag or "latest", changes=changes)
    if '"error"' in said:
        raise Unsupported(f"the docker daemon refused the image: {said.strip().splitlines()[-1]}")
    for old in replaced:
        with contextlib.suppress(DockerException):  # a server that still runs may use it
            client.images.remove(old.id)
    client.close()


def write_tar(file: "IO[bytes]", packages: tuple[str, ...]) -> None:
    """The root file system: directories, Python, packages, libraries. Everything is owned by root."""
    python = Path(sys.executable).resolve()
    trees = {f"{HOME}/{_standard_library().relative_to(sys.base_prefix)}": _standard_library()}
    trees |= {inside: Path(outside) for inside, outside in package_binds(packages).items()}
    files = {inside: path for root, tree in trees.items() for inside, path in _walk(root, tree)}
    files[f"{HOME}/bin/python3"] = python
    files |= {f"{OWN}/sandbox/{name}.py": Path(__file__).with_name(f"{name}.py") for name in SOURCES}
    files |= _libraries([python, *(path for path in files.values() if ".so" in path.name)], list(trees.values()))
    with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
        _add_directories(tar, files)
        for inside, path in sorted(files.items()):
            tar.add(path, inside.lstrip("/"), filter=_as_root)


def _standard_library() -> Path:
    return Path(os.__file__).resolve().parent


def _walk(root: str, tree: Path) -> Iterator[tuple[str, Path]]:
    """The files of a tree, with where they go."""
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        for name in names:
            if not name.endswith((".opt-1.pyc", ".opt-2.pyc", ".a")):
                path = Path(folder, name)
                yield f"{root}/{path.relative_to(tree)}", path


def _libraries(binaries: list[Path], trees: list[Path]) -> dict[str, Path]:
    """The libraries that the dynamic loader finds for `binaries` outside of `trees`, and the loader itself."""
    listed = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True, check=False).stdout
    found: dict[str, Path] = {}
    for name, path in re.findall(r"^\s+(?:(\S+) => )?(/\S+) \(0x", listed, re.MULTILINE):
        real = Path(path).resolve()
        if not any(real.is_relative_to(tree.resolve()) for tree in trees):
            found[f"{_LIBRARIES}/{name}" if name and not name.startswith("/") else path] = real
    if not found:
        raise Unsupported("`ldd` lists no libraries for this Python; build the image from sandbox/Dockerfile instead")
    return found


def _add_directories(tar: tarfile.TarFile, files: dict[str, Path]) -> None:
    needed = {str(parent) for inside in files for parent in Path(inside).parents}
    for name in sorted(needed | {"/dev", "/proc", "/sys", "/tmp"} - {"/"}):
        entry = tarfile.TarInfo(name.lstrip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "/tmp" else 0o755
        tar.addfile(entry)


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    entry.mode |= 0o444
    return entry


def main(arguments: list[str] | None = None) -> None:
    """Exit code 1 and one sentence on stderr if the image cannot be made."""
    from sandbox.backends import read_config

    parser = argparse.ArgumentParser(prog="python -m sandbox.image", description="Make the docker backend's image.")
    parser.add_argument("--config", type=Path, help="YAML of the server; its `image` and `packages` are used")
    options = parser.parse_args(arguments)
    try:
        config = read_config(options.config) if options.config else DockerConfig()
        if not isinstance(config, DockerConfig):
            raise ValueError(f"{options.config} describes the backend {config.type}; set `type: docker`")
        build(config)
    except (SandboxError, ValueError) as error:
        sys.exit(f"sandbox: {error}")
    print(f"sandbox: the image {config.image} is made")


if __name__ == "__main__":
    main()
