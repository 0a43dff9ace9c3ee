"""Pictures of the built site, as a reader sees it: `python docs/screenshots.py [PAGE ...]`, after `make docs`.

Each page wide and on a phone, light and dark, into build/screenshots, by a headless Chromium (Debian: `apt-get install
chromium`). Without one it says so and takes none.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"wide": (1280, 2400), "phone": (500, 2400)}  # headless Chromium makes no window narrower than 500
SCHEMES = {"dark": 0, "light": 1}  # what the reader prefers, as Blink counts
SECONDS = 60  # for a picture


class Quiet(SimpleHTTPRequestHandler):
    """Serves the site and logs nothing."""

    def log_message(self, *args: object) -> None:
        pass


def browser() -> str | None:
    """The first of `BROWSERS` that is installed."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def pages(site: Path = SITE) -> list[str]:
    """Of the built site, by their addresses: "", "choosing/" and so on."""
    found = [path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")]
    return sorted("" if name == "." else f"{name}/" for name in found)


def take(page: str, width: str, scheme: str, port: int) -> Path:
    """One picture."""
    picture = PICTURES / f"{page.strip('/').replace('/', '-') or 'index'}-{width}-{scheme}.png"
    across, down = WIDTHS[width]
    with TemporaryDirectory() as profile:
        command = [browser() or "", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--window-size={across},{down}", f"--screenshot={picture}"]
        command += ["--virtual-time-budget=3000", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
        command += [f"http://127.0.0.1:{port}/{page}"]
        subprocess.run(command, capture_output=True, timeout=SECONDS, check=True)
    return picture


def main(wanted: list[str]) -> None:
    if browser() is None:
        print(f"no pictures: none of {', '.join(BROWSERS)} is installed")
        return
    if not SITE.exists():
        sys.exit(f"{SITE} is not there: `make docs` builds it")
    PICTURES.mkdir(parents=True, exist_ok=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for page in wanted or pages():
        for width in WIDTHS:
            for scheme in SCHEMES:
                print(take(page, width, scheme, server.server_port).relative_to(ROOT), flush=True)
    server.shutdown()


if __name__ == "__main__":
    main([f"{page.strip('/')}/" if page.strip("/") else "" for page in sys.argv[1:]])
