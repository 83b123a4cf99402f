"""Starts a cluster for the rows, and starts another if it does not answer."""

import json
import signal
import subprocess
import tempfile
from pathlib import Path

import process

DONORS = 3
LEND = "5G"
END_SECONDS = 20


class Cluster:
    """`hecaton dev` in a temporary directory. Use it as a context."""

    def __init__(self, hecaton):
        self.hecaton = hecaton
        self.process = None
        self.directory = None

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *_):
        self._stop()

    def _start(self):
        # Sockets are in it, whose paths must be short.
        self.directory = tempfile.TemporaryDirectory(prefix="hecaton-")
        self.log = Path(self.directory.name, "log").open("wb")
        command = [self.hecaton, "dev", "--json", "--donors", str(DONORS), "--lend", LEND]
        command += ["--dir", f"{self.directory.name}/dev"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log,
            start_new_session=True,
        )  # fmt: skip
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(Path(self.log.name).read_text())
        self.manager = json.loads(line)["manager"]

    def _stop(self):
        process.reap_and_kill(self.keep())
        # A second signal ends the programs that the cluster still waits for.
        for _ in range(2):
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()
        self.directory.cleanup()

    def keep(self):
        """Processes that are no part of a row."""
        return {self.process.pid}

    def check(self):
        """Starts another cluster if this one does not answer. True if it had to."""
        command = [self.hecaton, "status", "--json", "--manager", self.manager]
        try:
            quiet = subprocess.DEVNULL
            answer = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=15)
            if self.process.poll() is None and answer.returncode == 0:
                return False
        except subprocess.TimeoutExpired:
            pass
        self._stop()
        self._start()
        return True
