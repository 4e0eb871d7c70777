"""``opweave serve-devices``."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Annotated, Any

import typer

from opweave.errors import Unavailable
from opweave_remote.security import make_token, read_token
from opweave_remote.wires import Address

__all__ = ["serve_devices"]


def serve_devices(
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where clients come.")
    ] = "127.0.0.1:7000",
    devices: Annotated[
        str, typer.Option("--devices", metavar="NAMES", help="Comma-separated; default: all of this machine but host.")
    ] = "",
    token_file: Annotated[
        str | None, typer.Option("--token-file", metavar="FILE", help="What clients have to know; mode 0600.")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option("--tls-cert", metavar="FILE", help="This server's certificate (PEM).")
    ] = None,
    tls_key: Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Its private key (PEM).")] = None,
    client_ca: Annotated[
        str | None,
        typer.Option("--client-ca", metavar="FILE", help="Clients need a certificate of this authority (mutual TLS)."),
    ] = None,
    peer_ca: Annotated[
        str | None,
        typer.Option(
            "--peer-ca", metavar="FILE", help="Copy directly from servers with certificates of this authority."
        ),
    ] = None,
    max_memory: Annotated[
        float | None,
        typer.Option("--max-memory", metavar="GIB", min=0, help="Memory of one client; default: no limit."),
    ] = None,
    max_clients: Annotated[int, typer.Option("--max-clients", min=1, help="Clients at a time.")] = 64,
    max_connections: Annotated[int, typer.Option("--max-connections", min=4, help="Connections of one client.")] = 64,
    lease: Annotated[
        float, typer.Option("--lease", metavar="SECONDS", min=1, help="A client that is silent for longer is dropped.")
    ] = 60.0,
    cache: Annotated[
        str | None, typer.Option("--cache", metavar="FOLDER", help="Keep weights there, by the hash of their contents.")
    ] = None,
    cache_size: Annotated[
        float, typer.Option("--cache-size", metavar="GIB", min=0, help="Size of that folder.")
    ] = 100.0,
    weights: Annotated[
        list[str] | None,
        typer.Option("--weights", metavar="FILE", help="Weights that clients need not send; repeatable; with --cache."),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Answer GET /metrics there, for Prometheus.")
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            help="What clients get to leave, after SIGTERM or Ctrl-C; the second one ends at once.",
        ),
    ] = 10.0,
    new_token: Annotated[
        str | None, typer.Option("--make-token", metavar="FILE", help="Write a new random token there, and end.")
    ] = None,
) -> None:
    """Let other processes and machines use this machine's devices."""
    if new_token is not None:
        try:
            make_token(new_token)
        except OSError as error:
            raise Unavailable(f"no token is written to {new_token}: {error.strerror}") from error
        return
    where = Address.parse(listen)
    check_way_in(where, token_file, tls_cert, tls_key, client_ca)
    limits: dict[str, Any] = {"clients": max_clients, "connections": max_connections, "lease": lease}
    if weights and cache is None:
        raise Unavailable("weights of files are found by the hashes that a cache knows", remedy="give --cache too")
    if max_memory is not None:
        limits["memory"] = int(max_memory * (1 << 30))
    settings: dict[str, Any] = {
        "devices": [name.strip() for name in devices.split(",") if name.strip()],
        "token_file": token_file,
        "tls": None if tls_cert is None else [tls_cert, tls_key, client_ca],
        "limits": limits,
        "cache": None if cache is None else [cache, int(cache_size * (1 << 30)), weights or []],
        "peer_ca": peer_ca,
    }
    from opweave_remote.server.front import Front  # the command's help needs no sockets
    from opweave_remote.server.front import listen as listen_on

    front = Front(listen_on(where), settings, lambda line: print(line, file=sys.stderr, flush=True))
    if metrics is not None:
        print(f"metrics on http://{front.show_metrics(Address.parse(metrics))}/metrics", flush=True)
    print(f"listening on {front.address}: {', '.join(front.devices)}", flush=True)
    asked = threading.Event()

    def end(*_: object) -> None:
        if asked.is_set():
            front.end_now()
        asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while not asked.is_set() and not front.ended.is_set():
        asked.wait(0.5)
    failed = front.ended.is_set()
    front.stop(grace)
    if failed:
        raise typer.Exit(1)


def check_way_in(
    where: Address, token_file: str | None, cert: str | None, key: str | None, client_ca: str | None
) -> None:
    """Raise `Unavailable` unless only those get in who should: by a token over TLS, by certificates, or by a token on
    this machine."""
    if (cert is None) != (key is None):
        raise Unavailable("a certificate and its key belong together", remedy="give --tls-cert and --tls-key")
    if client_ca is not None and cert is None:
        raise Unavailable("certificates of clients are checked by TLS", remedy="give --tls-cert and --tls-key too")
    if cert is None and not where.is_loopback:
        raise Unavailable(f"{where} can be reached by others, and then TLS is needed",
                          remedy="give --tls-cert and --tls-key, or listen on 127.0.0.1")  # fmt: skip
    if token_file is None and client_ca is None:
        raise Unavailable("clients would need neither a token nor a certificate",
                          remedy="give --token-file (--make-token FILE writes one), or --client-ca")  # fmt: skip
    if token_file is not None:
        read_token(token_file)
