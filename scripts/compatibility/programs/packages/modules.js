// Fills memory with a module from npm: `modules.js MODULE`.
const count = 300000;
const modes = {
  "better-sqlite3": () => {
    const database = new (require("better-sqlite3"))(":memory:");
    database.exec("create table t (id integer primary key, k integer, s text)");
    const insert = database.prepare("insert into t values (?, ?, ?)");
    database.transaction(() => {
      for (let i = 0; i < count; i++) insert.run(i, (i * 7919) % 5000, `text ${i} `.repeat(10));
    })();
    return database.prepare("select k, count(*) n, max(s) m from t group by k order by n desc, k limit 5").all();
  },
  lokijs: () => {
    const rows = new (require("lokijs"))("a.db").addCollection("rows", { indices: ["k"] });
    for (let i = 0; i < count / 3; i++) rows.insert({ k: (i * 7919) % 5000, s: `text ${i}` });
    return [rows.count(), rows.find({ k: { $lt: 20 } }).length];
  },
  graphology: () => {
    const graph = new (require("graphology"))();
    for (let i = 0; i < count / 4; i++) graph.addNode(i, { size: i });
    for (let i = 0; i < count / 2; i++) graph.mergeEdge((i * 31) % (count / 4), (i * 7919) % (count / 4));
    let sum = 0;
    graph.forEachNode((node) => (sum += graph.degree(node) ** 2));
    return [graph.order, graph.size, sum];
  },
  immutable: () => {
    let map = require("immutable").Map();
    for (let i = 0; i < count; i++) map = map.set(`key-${(i * 7919) % count}`, { i });
    return [map.size, map.get("key-77").i, map.filter((value) => value.i % 2).size];
  },
};
const asynchronous = {
  "@duckdb/node-api": async () => {
    const { DuckDBInstance } = require("@duckdb/node-api");
    const connection = await (await DuckDBInstance.create(":memory:")).connect();
    await connection.run("create table t as select i, i * 7919 % 60000 k, 'text ' || i s from range(1500000) r(i)");
    const query = "select k, count(*)::int n, max(s) m from t group by k order by n desc, k limit 5";
    return (await connection.runAndReadAll(query)).getRowObjectsJson();
  },
};
const name = process.argv[2];
if (modes[name]) console.log(JSON.stringify(modes[name]()));
else asynchronous[name]().then((rows) => console.log(JSON.stringify(rows)));
