"""The client of a data cache, for record.sh: caching_client.py PORT VALUES REQUESTS_PER_S SECONDS.

Makes a data set in memory, gives all of it to the memcached at PORT, and then asks for values and replaces some, at a
fixed rate, as CloudSuite's client of data-caching does: four reads for each write. Few values are asked for often. A
value that comes back other than it was stored ends it. At the end the server is told to shut down.
"""
import random
import socket
import sys
import time

BATCH = 20
WRITES = 0.2

port, count, per_s, seconds = (int(argument) for argument in sys.argv[1:])
rng = random.Random(1)
values = [rng.randbytes(min(8192, int(200 * rng.paretovariate(1.25)))) for _ in range(count)]


def connect():
    """Waits for a server that is only starting."""
    for _ in range(50):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            time.sleep(0.1)
    sys.exit("no memcached at port %d" % port)


server = connect()
replies = server.makefile("rb")


def store(keys):
    lines = (b"set %d 0 0 %d\r\n%s\r\n" % (key, len(values[key]), values[key]) for key in keys)
    server.sendall(b"".join(lines))
    for key in keys:
        if replies.readline() != b"STORED\r\n":
            sys.exit("value %d was not stored" % key)


def fetch(keys):
    server.sendall(b"get %s\r\n" % b" ".join(b"%d" % key for key in keys))
    while (line := replies.readline()) != b"END\r\n":
        _, key, _, size = line.split()
        if replies.read(int(size) + 2)[:-2] != values[int(key)]:
            sys.exit("value %d is not what was stored" % int(key))


for first in range(0, count, BATCH):
    store(range(first, min(first + BATCH, count)))

began = time.monotonic()
for batch in range(seconds * per_s // BATCH):
    time.sleep(max(0, began + batch * BATCH / per_s - time.monotonic()))
    keys = {int(count * rng.random() ** 3) for _ in range(BATCH)}
    if rng.random() < WRITES:
        for key in keys:
            values[key] = rng.randbytes(len(values[key]))
        store(keys)
    else:
        fetch(keys)
server.sendall(b"shutdown\r\n")
