/* Heat spreading over a square grid, for traces/record.sh: heat SIDE STEPS. Two grids are swept
 * in turn: the loop bigger than memory that numerical programs are made of. */
#include <stdlib.h>

struct cell {
	double heat, conductivity, capacity, source, flow[4];
};

int main(int argc, char **argv)
{
	size_t side = argc > 1 ? strtoul(argv[1], NULL, 10) : 256;
	int steps = argc > 2 ? atoi(argv[2]) : 10;
	struct cell *now = calloc(side * side, sizeof *now), *next = calloc(side * side, sizeof *next);

	if (!now || !next || side < 3)
		return 1;
	for (size_t x = 0; x < side; x++)
		now[x].heat = next[x].heat = 100;
	for (int step = 0; step < steps; step++) {
		for (size_t y = 1; y + 1 < side; y++)
			for (size_t x = 1; x + 1 < side; x++) {
				struct cell *at = &now[y * side + x];
				next[y * side + x].heat =
					(at[-1].heat + at[1].heat + (at - side)->heat + at[side].heat) / 4;
			}
		struct cell *swapped = now;
		now = next;
		next = swapped;
	}
	return now[side + 1].heat > 0 ? 0 : 1;
}
