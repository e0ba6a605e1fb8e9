"""`agent-rl dashboard`: the report's views in a browser, while runs go on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agent_rl.commands.console import one_sentence_errors, say

if TYPE_CHECKING:
    import socket

_LOOPBACK = ("127.0.0.1", "localhost")


def dashboard(
    runs: Annotated[Path, typer.Argument(help="Directory that holds runs")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one")] = 8900,
    host: Annotated[
        str, typer.Option(help="Address to listen on; another than loopback lets others read")
    ] = "127.0.0.1",
) -> None:
    """Serve the list of runs, the report's charts and the episode viewer, all live; compare runs."""
    with one_sentence_errors():
        import uvicorn

        from agent_rl.analysis.dashboard import create_app

        app = create_app(runs, _LOOPBACK if host in _LOOPBACK else ("*",))
        listening = _listen(host, port)
        if host not in _LOOPBACK:
            say(f"whoever reaches {host} can read every run in {runs}: there is no password")
        say(f"dashboard: http://{host}:{listening.getsockname()[1]} (Ctrl-C ends it)")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


def _listen(host: str, port: int) -> "socket.socket":
    import socket

    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from None
