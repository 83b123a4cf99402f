# Fills a hash and an array of arrays, and prints what they hold.
count = 400_000
map = {}
count.times { |i| map["key-#{i * 7919 % count}"] = i.to_s * 3 }
sum = (0...count).step(3).sum { |i| map["key-#{i}"].length }
(0...count).step(2) { |i| map.delete("key-#{i}") }
rows = (0..200_000).map { |i| [i % 1000, -i, "row #{i}"] }.sort
GC.start
puts "#{sum} #{map.size} #{rows[1000][2]}"
