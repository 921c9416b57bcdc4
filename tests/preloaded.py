"""Programs in copies of one process that has imported everything: imports take longer than most commands of the tests.

`program("vitlab")` is the path of a program that behaves like the installed one: the same words, folder, environment,
input, output, signals and exit code. Its work is done by a fork of a server, which is started once per test process
and ends with it. What is tested about starting itself, or by the number of a process, needs the installed program.
"""

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

# What sends the words and the three streams to the server, passes signals on, and ends as the fork ended.
CLIENT = r"""#!{python} -IS
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
about = json.dumps(dict(words=[{name!r}, *sys.argv[1:]], folder=os.getcwd(), environment=dict(os.environ))).encode()
socket.send_fds(link, [len(about).to_bytes(8, "big")], [0, 1, 2])
link.sendall(about)
pid = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "big")
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(pid, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # one that came before this is passed on now
code = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
NAMES = ("vitlab", "torchrun", "python")
MODULES = (
    *("torch._dynamo", "torch.export", "torch.distributed.run", "torch.distributed.fsdp", "sklearn.datasets"),
    *("matplotlib.pyplot", "vitlab.cli", "vitlab.training.loop", "vitlab.report", "vitlab.finetuning"),
)


# ---- for the tests


@functools.cache
def folder() -> Path:
    """The folder of the programs, those installed where this is not Linux; the server runs until this process ends."""
    if sys.platform != "linux":
        return Path(sys.executable).parent
    place = tempfile.TemporaryDirectory(prefix="vitlab-")
    path, address = Path(place.name), f"{place.name}/server"
    for name in NAMES:
        client = CLIENT.format(python=Path(sys.executable).resolve(), address=address, name=name)
        (path / name).write_text(client)
        (path / name).chmod(0o755)
    # its input is a pipe that only this process holds: the server ends when it is closed, however that comes about
    server = subprocess.Popen(
        [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(place.cleanup)
    return path


def program(name: str) -> Path:
    return folder() / name


# ---- the server


def serve(address: str) -> None:
    for name in MODULES:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers end by themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored under nohup
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([server.fileno(), 0], [], [])
            if 0 in ready:
                return
            link, _ = server.accept()
            if os.fork() == 0:
                server.close()
                keep(link)
            link.close()


def keep(link: socket.socket) -> None:
    """Fork the program, tell its number, and wait for its end; if the client is gone before, so is the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(link, 8, 3)
    about = json.loads(link.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until the program is called: one is lost during a fork
    pid = os.fork()
    if pid == 0:
        link.close()
        work(streams, **about)
    for stream in (*streams, 0, 1, 2):
        os.close(stream)
    end = os.pidfd_open(pid)
    with contextlib.suppress(OSError):  # the client may be gone already, which is seen below
        link.sendall(pid.to_bytes(8, "big"))
    ready, _, _ = select.select([link.fileno(), end], [], [])
    if end not in ready:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        link.sendall(code.to_bytes(8, "big", signed=True))
    os._exit(0)


def work(streams: list[int], words: list[str], folder: str, environment: dict[str, str]) -> None:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    code = run(words)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for output in (sys.stdout, sys.stderr):
        try:
            output.flush()
        except (OSError, ValueError):
            code = code or 1
    os._exit(code)


def run(words: list[str]) -> int:
    """Call the program; the exit code, as Python would give it."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        call(words)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def call(words: list[str]) -> None:
    name, *rest = words
    if name == "vitlab":
        from vitlab.cli import main

        main()
    elif name == "torchrun":
        from torch.distributed.run import main as torchrun

        torchrun(rest)
    elif rest[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[2:]], ""
        exec(compile(rest[1], "<string>", "exec"), {"__name__": "__main__"})
    else:  # a file
        sys.argv, sys.path[0] = rest, str(Path(rest[0]).parent)
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
