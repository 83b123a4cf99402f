# Fills a hash and an array of arrays, and prints what they hold.
use strict;
my ($count, $sum, %map) = (150000, 0);
$map{"key-" . $_ * 7919 % $count} = "$_" x 3 for 0 .. $count - 1;
$sum += length $map{"key-" . $_ * 3} for 0 .. $count / 3 - 1;
delete $map{"key-" . $_ * 2} for 0 .. $count / 2 - 1;
my @rows = map { [$_, $_ % 1000, "row $_"] } 0 .. 80000;
@rows = sort { $a->[1] <=> $b->[1] || $b->[0] <=> $a->[0] } @rows;
print "$sum ", scalar(keys %map), " $rows[1000][2]\n";
