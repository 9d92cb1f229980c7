"""What keeps an embedded server from running. Each message says what is in the way, and the way out."""

from pathlib import Path

from contracts.errors import WaypostError


class EmbeddedError(WaypostError):
    """The embedded server cannot run."""

    code = "embedded-database"
    http_status = 503


class BinariesMissing(EmbeddedError):
    """There is no PostgreSQL to start."""


class DataFolderUnusable(EmbeddedError):
    """The data folder belongs to another major version or another process, or cannot be reached."""

    def __init__(self, folder: Path, problem: str, way_out: str) -> None:
        super().__init__(f"data folder {folder}: {problem}. {way_out}")
        self.folder = folder
        self.problem = problem
        self.way_out = way_out


class ServerFailed(EmbeddedError):
    """PostgreSQL, or a program of its, ended with an error; its last words are in the message."""

    def __init__(self, what: str, last_words: str) -> None:
        super().__init__(f"{what} failed: {last_words.strip() or 'it said nothing'}")
        self.what = what
        self.last_words = last_words
