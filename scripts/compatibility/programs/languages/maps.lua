-- Fills a table, and prints what it holds.
local count, sum, map = 200000, 0, {}
for i = 0, count - 1 do map["key-" .. i * 7919 % count] = { i, tostring(i):rep(3) } end
for i = 0, count - 1, 3 do sum = sum + #map["key-" .. i][2] end
for i = 0, count - 1, 2 do map["key-" .. i] = nil end
collectgarbage()
local left = 0
for _ in pairs(map) do left = left + 1 end
print(sum, left)
