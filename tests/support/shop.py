"""A server of files on this machine, with faults: what downloads are tried against."""

from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import sleep


class Shop:
    """Of a folder.

    Attributes:
        asked: paths, and from which byte. breaks_off: of each answer to come, behind how many bytes; else it is whole.
        ranges: it sends files from a byte on. pause: seconds between two bytes.
    """

    def __init__(self, folder):
        self.folder, self.asked, self.breaks_off, self.ranges, self.pause = folder, [], [], True, 0.0

    @contextmanager
    def open(self):
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    def _handler(shop):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
                shop.asked.append((self.path, start))
                path = shop.folder / self.path.lstrip("/")
                if not path.is_file():
                    return self.send_error(404)
                content = path.read_bytes()
                if start >= len(content):
                    return self.send_error(416)
                partial = bool(start) and shop.ranges
                content = content[start:] if partial else content
                self.send_response(206 if partial else 200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if shop.breaks_off:
                    content = content[: shop.breaks_off.pop(0)]
                for i in range(len(content)) if shop.pause else ():
                    self.wfile.write(content[i : i + 1])
                    sleep(shop.pause)
                if not shop.pause:
                    self.wfile.write(content)
                return None

            def log_message(self, *args): ...

        return Handler
