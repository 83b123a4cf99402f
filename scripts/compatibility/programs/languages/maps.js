// Fills a Map and an array of objects, and prints what they hold.
const count = 400000;
const map = new Map();
for (let i = 0; i < count; i++) map.set(`key-${(i * 7919) % count}`, { id: i, text: String(i).repeat(3) });
let sum = 0;
for (let i = 0; i < count; i += 3) sum += map.get(`key-${i}`).text.length;
for (let i = 0; i < count; i += 2) map.delete(`key-${i}`);
const objects = [];
for (let i = 0; i < count; i++) objects.push({ a: i, b: [i, i * 2], c: `object ${i % 1000}` });
objects.sort((x, y) => (x.c < y.c ? -1 : x.c > y.c ? 1 : x.a - y.a));
const buffer = Buffer.alloc(32 << 20, "hecaton");
console.log(sum, map.size, objects[1000].a, JSON.stringify(objects).length, buffer.lastIndexOf("h"));
