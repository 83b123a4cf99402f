-- An SQLite session in memory, for traces/record.sh: bulk load, index, point queries in a skew,
-- rows in the order of an index, whole passes, deletes, updates.
PRAGMA cache_size = -65536;
CREATE TABLE sale(id INTEGER PRIMARY KEY, customer INTEGER, amount INTEGER, scan BLOB);
BEGIN;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)
INSERT INTO sale SELECT i, 1 + i * 7919 % 600, i % 1000, zeroblob(1700) FROM n;
COMMIT;
CREATE INDEX sale_by_customer ON sale(customer);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3000)
SELECT sum((SELECT sum(amount) FROM sale WHERE customer = 1 + (i * i) % (1 + i % 200))) FROM n;
SELECT count(*), sum(amount) FROM sale INDEXED BY sale_by_customer WHERE customer < 400;
SELECT sum(amount) FROM sale;
SELECT sum(amount) FROM sale WHERE amount > 500;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 8000)
SELECT sum((SELECT amount FROM sale WHERE id = 1 + (i * 48271) % 5000)) FROM n;
UPDATE sale SET amount = amount + 1 WHERE id % 3 = 0;
DELETE FROM sale WHERE id % 5 = 0;
SELECT sum(amount) FROM sale INDEXED BY sale_by_customer WHERE customer > 200;
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 8000)
SELECT sum((SELECT amount FROM sale WHERE id = 1 + (i * 48271) % (1 + i % 2000))) FROM n;
