"""A receiver that hangs keeps nobody waiting, and an answer has an end in time and in size."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from runwatch.monitor.notify import SendError
from runwatch.monitor.notify.post import post
from runwatch.monitor.notify.sender import Sender

Answer = Callable[[socket.socket, threading.Event], None]


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """A server on loopback whose whole behaviour is `answer`; its URL."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=_answer, args=(connection, over, answer), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/hook"
        over.set()
        server.shutdown(socket.SHUT_RDWR)


def _answer(connection: socket.socket, over: threading.Event, answer: Answer) -> None:
    with connection:
        try:
            connection.recv(65536)
            answer(connection, over)
        except OSError:
            return


def never(_: socket.socket, over: threading.Event) -> None:
    over.wait(60)


def header_drip(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.wait(0.05):
        connection.sendall(b"X-Drip: 1\r\n")


def body_drip(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
    while not over.wait(0.05):
        connection.sendall(b"x")


@pytest.mark.parametrize("answer", [never, header_drip, body_drip])
def test_the_deadline_is_for_the_whole_answer(answer: Answer) -> None:
    with served(answer) as url, pytest.raises(SendError, match="no whole answer within") as failure:
        post(url, b"{}", timeout=0.5)
    assert not failure.value.permanent


def test_an_answer_without_end_is_read_to_its_beginning() -> None:
    def endless(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 500 no\r\nContent-Length: 1000000000\r\n\r\n")
        while not over.is_set():
            connection.sendall(b"x" * 65536)

    with served(endless) as url, pytest.raises(SendError, match="HTTP 500: xxx"):
        post(url, b"{}", timeout=20)


def test_a_sender_delivers_when_woken_goes_on_after_an_error_and_ends_when_closed() -> None:
    calls: list[float] = []
    failures: list[None] = []

    def deliver(_: Callable[[], bool]) -> None:
        calls.append(time.monotonic())
        raise ZeroDivisionError

    sender = Sender("test", deliver, lambda: failures.append(None))
    sender.start()
    while len(calls) < 3:
        sender.wake()
        time.sleep(0.01)
    sender.close()
    sender.join()
    known = len(calls)
    sender.wake()
    assert len(calls) == known == len(failures)


def test_a_sender_that_hangs_does_not_keep_the_daemon_from_ending() -> None:
    over = threading.Event()
    sender = Sender("test", lambda _: over.wait(60), lambda: None)
    sender.start()
    sender.close()
    sender.join()
    over.set()
