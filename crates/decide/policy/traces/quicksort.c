/* The quicksort of integers of the MemX paper, for traces/record.sh: quicksort COUNT. */
#include <stdio.h>
#include <stdlib.h>

static void quicksort(long *from, long *to)
{
	while (to - from > 16) {
		long pivot = from[(to - from) / 2], *low = from, *high = to - 1;
		while (low <= high) {
			while (*low < pivot)
				low++;
			while (*high > pivot)
				high--;
			if (low <= high) {
				long swapped = *low;
				*low++ = *high;
				*high-- = swapped;
			}
		}
		quicksort(from, high + 1);
		from = low;
	}
	for (long *next = from + 1; next < to; next++) {
		long value = *next, *at = next;
		for (; at > from && at[-1] > value; at--)
			*at = at[-1];
		*at = value;
	}
}

int main(int argc, char **argv)
{
	size_t count = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000000;
	long *numbers = malloc(count * sizeof *numbers);
	unsigned seed = 1;

	if (!numbers)
		return 1;
	for (size_t i = 0; i < count; i++)
		numbers[i] = (long)((seed = seed * 1664525u + 1013904223u) >> 1);
	quicksort(numbers, numbers + count);
	for (size_t i = 1; i < count; i++)
		if (numbers[i - 1] > numbers[i])
			return 1;
	return 0;
}
