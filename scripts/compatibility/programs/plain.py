"""Fills memory with Python's standard library alone: `plain.py MODE`."""

import asyncio
import hashlib
import json
import mmap
import multiprocessing
import pickle
import random
import sqlite3
import sys
import tempfile
import threading
import zlib
from multiprocessing import shared_memory


def dictionary():
    words = {f"key-{i * 7919 % 250000}": str(i) * 3 for i in range(250000)}
    total = sum(len(words[f"key-{i}"]) for i in range(0, 250000, 3))
    for i in range(0, 250000, 2):
        del words[f"key-{i}"]
    return total, len(words), sum(len(word) for word in words.values())


def serialize():
    pick = random.Random(1)
    tree = [{"id": i, "values": [pick.random() for _ in range(8)]} for i in range(120000)]
    text = json.dumps(tree)
    again = json.loads(text)
    packed = zlib.compress(pickle.dumps(again), 1)
    same = pickle.loads(zlib.decompress(packed)) == tree
    return same, hashlib.sha256(text.encode()).hexdigest()


def _part(number):
    return sum(HELD[number::8]) + len([str(i) for i in range(100000)])


HELD = []


def pool():
    HELD.extend(range(3000000))
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as workers:
        return workers.map(_part, range(8))


def shared():
    block = shared_memory.SharedMemory(create=True, size=64 << 20)
    try:
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_write, args=(block.name, part)) for part in range(4)]
        for worker in workers:
            worker.start()
        own = [i * i for i in range(2000000)]
        for worker in workers:
            worker.join()
        return hashlib.sha256(block.buf).hexdigest(), sum(own)
    finally:
        block.close()
        block.unlink()


def _write(name, part):
    block = shared_memory.SharedMemory(name=name)
    size = (64 << 20) // 4
    block.buf[part * size : (part + 1) * size] = bytes([part + 1]) * size
    block.close()


def threads():
    results = [None] * 8

    def work(number):
        block = bytearray(number + 1 for _ in range(1)) * (12 << 20)
        results[number] = zlib.crc32(block)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    async def tick(number):
        await asyncio.sleep(0.001)
        return [number] * 20000

    async def all_ticks():
        return await asyncio.gather(*(tick(number) for number in range(200)))

    lists = asyncio.run(all_ticks())
    with tempfile.TemporaryFile() as file:
        file.truncate(16 << 20)
        with mmap.mmap(file.fileno(), 0) as view:
            view[:] = b"x" * len(view)
            of_file = zlib.crc32(view)
    return results, sum(map(sum, lists)), of_file


def database():
    pick = random.Random(1)
    connection = sqlite3.connect(":memory:")
    connection.execute("create table t (id integer primary key, a integer, b text)")
    rows = ((i, pick.randrange(5000), f"text {i} " * 8) for i in range(400000))
    connection.executemany("insert into t values (?, ?, ?)", rows)
    connection.execute("create index of_a on t (a, b)")
    query = "select a, count(*), max(b) from t group by a order by 2 desc, 1 limit 20"
    return connection.execute(query).fetchall()


if __name__ == "__main__":
    print({f.__name__: f for f in (dictionary, serialize, pool, shared, threads, database)}[sys.argv[1]]())
