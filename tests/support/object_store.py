"""A store of S3 on the loopback, with a bucket and with faults, and what ranks need to use it."""

from __future__ import annotations

import os
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

BUCKET = "checkpoints"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
_STATUS = {"throttled": "503 Slow Down", "refused": "403 Forbidden", "failed": "500 Internal Server Error"}
_CODES = {"throttled": "SlowDown", "refused": "AccessDenied", "failed": "InternalError"}


class Faults:
    """What the store does to requests.

    Attributes:
        choose: method and path of a request -> ``throttled``, ``refused``, ``failed``, ``slow``, ``lost`` (the answer
            is that of a success, but nothing is stored), or an empty text.
        count: requests with a fault since the last call of :meth:`randomly`.
    """

    def __init__(self) -> None:
        self.choose: Callable[[str, str], str] = lambda method, path: ""
        self.count = 0

    def randomly(self, fault: str, seed: int, share: float) -> None:
        """Choose a fault for a share of the requests. Only writes are ``lost``."""
        draw, lock = random.Random(seed), threading.Lock()

        def choose(method: str, path: str) -> str:
            with lock:
                if draw.random() >= share or (fault == "lost" and method != "PUT"):
                    return ""
                self.count += 1
                return fault

        self.choose, self.count = choose, 0


def _with_faults(application: Any, faults: Faults) -> Any:
    def run(environ: Any, start: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        fault = faults.choose(method, path)
        if fault in _STATUS:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(_STATUS[fault], [("Content-Type", "application/xml")])
            return [f"<Error><Code>{_CODES[fault]}</Code><Message>{fault}</Message></Error>".encode()]
        if fault == "lost" and method == "PUT":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start("200 OK", [("ETag", '"0"')])
            return [b""]
        if fault == "slow":
            time.sleep(0.3)
        found: Iterable[bytes] = application(environ, start)
        return found

    return run


@contextmanager
def object_store(faults: Faults | None = None) -> Iterator[dict[str, str]]:
    """Run the store. Yields the variables with which a process uses it."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = _with_faults(DomainDispatcherApplication(create_backend_app), faults or Faults())
    server = make_server("127.0.0.1", 0, application, threaded=True)
    server.RequestHandlerClass.log_request = lambda *_, **__: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, name="object-store", daemon=True)
    thread.start()
    variables = {**_CREDENTIALS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}
    try:
        reset = urllib.request.Request(f"{variables['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset).close()  # all stores of this process have one content
        file_system(variables).mkdir(BUCKET)
        yield variables
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def file_system(variables: Mapping[str, str] | None = None) -> Any:
    """Return the store as a file system, by the variables of this process or by others."""
    import s3fs

    with patch.dict(os.environ, variables or {}):
        system = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        system.connect()
        return system


def objects(variables: Mapping[str, str], prefix: str) -> list[str]:
    """Return the names of all objects below a prefix."""
    root = f"{BUCKET}/{prefix}"
    return sorted(path.removeprefix(f"{root}/") for path in file_system(variables).find(root))
