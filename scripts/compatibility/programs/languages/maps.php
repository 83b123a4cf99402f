<?php
// Fills an array and objects, and prints what they hold.
ini_set('memory_limit', '1G');
$count = 150000;
$map = [];
for ($i = 0; $i < $count; $i++) $map["key-" . ($i * 7919 % $count)] = [$i, str_repeat("$i", 3)];
$sum = 0;
for ($i = 0; $i < $count; $i += 3) $sum += strlen($map["key-$i"][1]);
for ($i = 0; $i < $count; $i += 2) unset($map["key-$i"]);
ksort($map);
echo $sum, " ", count($map), " ", array_key_last($map), " ", md5(serialize($map)), "\n";
