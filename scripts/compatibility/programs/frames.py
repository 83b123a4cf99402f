"""Fills memory with tables of a package from PyPI: `frames.py PACKAGE`."""

import hashlib
import sys


def of_numpy():
    import numpy as np

    pick = np.random.default_rng(1)
    values = pick.integers(0, 1 << 40, 6_000_000)
    ordered = np.sort(values)
    matrix = pick.integers(0, 100, (1200, 1200)).astype(np.float64)
    product = matrix @ matrix
    wave = np.fft.irfft(np.fft.rfft(ordered[: 1 << 21].astype(np.float64)))
    return int(ordered[::1000].sum()), int(product.sum()), round(float(wave.max()) / 1e6)


def of_pandas():
    import numpy as np
    import pandas as pd

    pick = np.random.default_rng(1)
    count = 1_000_000
    frame = pd.DataFrame({"key": pick.integers(0, 50000, count), "x": pick.integers(0, 1000, count)})
    frame["name"] = "n" + (frame["key"] % 1000).astype(str)
    grouped = frame.groupby("key")["x"].agg(["sum", "max"]).reset_index()
    joined = frame.merge(grouped, on="key").sort_values(["sum", "key", "x"])
    return joined.head(5).to_string(), int(joined["max"].sum()), frame["name"].nunique()


def of_polars():
    import polars as pl

    count = 2_000_000
    frame = pl.DataFrame({"i": range(count)}).with_columns(
        key=pl.col("i") * 7919 % 60000, x=pl.col("i") * 104729 % 1000
    )
    grouped = frame.group_by("key").agg(pl.col("x").sum().alias("sum"), pl.len().alias("n"))
    joined = frame.join(grouped, on="key").sort(["sum", "key", "i"])
    return joined.head(3).rows(), joined["sum"].sum(), joined.tail(3).rows()


def of_duckdb():
    import duckdb

    database = duckdb.connect(":memory:", config={"threads": 2})
    database.sql(
        "create table t as select i, i * 7919 % 60000 as k, 'text ' || (i * 31 % 900000) as s "
        "from range(1500000) r(i)"
    )
    query = (
        "select a.k, count(*) n, min(a.s) lo, max(b.s) hi from t a join t b on a.i = b.i + 1 "
        "group by a.k order by n desc, a.k limit 20"
    )
    return database.sql(query).fetchall(), database.sql("select count(distinct s) from t").fetchall()


def of_chdb():
    import chdb

    query = (
        "select k, count() n, uniqExact(s) u, max(s) from (select number * 7919 % 60000 k, "
        "concat('text ', toString(number * 31 % 900000)) s from numbers(1500000)) "
        "group by k order by n desc, u, k limit 20"
    )
    return str(chdb.query(query, "CSV"))


def of_arrow():
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    count = 2_000_000
    table = pa.table({"i": list(range(count))})
    key = pc.subtract(table["i"], pc.multiply(pc.divide(table["i"], 5000), 5000))
    table = table.append_column("k", key).append_column("s", pc.cast(key, pa.string()))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    again = pq.read_table(pa.BufferReader(sink.getvalue()))
    grouped = again.group_by("k").aggregate([("i", "sum")]).sort_by("k")
    return again.equals(table), grouped.slice(0, 3).to_pylist(), pc.sum(grouped["i_sum"]).as_py()


if __name__ == "__main__":
    result = str(globals()[f"of_{sys.argv[1]}"]())
    print(result[:400], hashlib.sha256(result.encode()).hexdigest())
