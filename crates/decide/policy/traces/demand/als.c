/* In-memory analytics, for record.sh: als RATINGS USERS ITEMS ITERATIONS. Alternating least squares,
 * as the CloudSuite program of that name does: generated ratings are loaded, by user and again by item; then in
 * each half iteration one side's normal equations are gathered from all ratings, solved, and dropped. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define RANK 40
#define TRIANGLE (RANK * (RANK + 1) / 2)

struct rating {
	unsigned user, item;
	float stars;
	unsigned time;
};

/* One user's, or one item's: the lower triangle of a matrix, and a vector. */
struct normal {
	float matrix[TRIANGLE], vector[RANK];
};

static unsigned long state = 1;

static double random_unit(void)
{
	state = state * 6364136223846793005ul + 1442695040888963407ul;
	return (double)(state >> 11) / (1ul << 53);
}

static void *allocate(size_t count, size_t size)
{
	void *memory = calloc(count, size);

	if (!memory) {
		perror("als");
		exit(1);
	}
	return memory;
}

/* Few items have most of the ratings. Stars depend on user and item, and a little on chance. */
static struct rating *load(size_t count, unsigned users, unsigned items)
{
	struct rating *ratings = allocate(count, sizeof *ratings);

	for (size_t i = 0; i < count; i++) {
		unsigned user = (unsigned)(i * users / count), item = (unsigned)(items * pow(random_unit(), 3));
		double stars = 3 + sin(user) * cos(item) + sin(2.0 * item) + random_unit();
		ratings[i] = (struct rating){ user, item, (float)stars, (unsigned)i };
	}
	return ratings;
}

static struct rating *by_item(const struct rating *ratings, size_t count, unsigned items)
{
	struct rating *sorted = allocate(count, sizeof *sorted);
	size_t *next = allocate(items + 1, sizeof *next);

	for (size_t i = 0; i < count; i++)
		next[ratings[i].item + 1]++;
	for (unsigned item = 0; item < items; item++)
		next[item + 1] += next[item];
	for (size_t i = 0; i < count; i++)
		sorted[next[ratings[i].item]++] = ratings[i];
	free(next);
	return sorted;
}

static void add(struct normal *to, const float *factors, float stars)
{
	float *matrix = to->matrix;

	for (int row = 0; row < RANK; row++) {
		for (int column = 0; column <= row; column++)
			*matrix++ += factors[row] * factors[column];
		to->vector[row] += stars * factors[row];
	}
}

/* By Cholesky's decomposition, in place. */
static void solve(struct normal *normal, float *factors)
{
	float *rows[RANK];

	for (int row = 0; row < RANK; row++) {
		rows[row] = normal->matrix + row * (row + 1) / 2;
		rows[row][row] += 1;
		float value = normal->vector[row];
		for (int column = 0; column <= row; column++) {
			float sum = rows[row][column];
			for (int k = 0; k < column; k++)
				sum -= rows[row][k] * rows[column][k];
			rows[row][column] = column < row ? sum / rows[column][column] : sqrtf(sum);
		}
		for (int k = 0; k < row; k++)
			value -= rows[row][k] * factors[k];
		factors[row] = value / rows[row][row];
	}
	for (int row = RANK - 1; row >= 0; row--) {
		for (int k = row + 1; k < RANK; k++)
			factors[row] -= rows[k][row] * factors[k];
		factors[row] /= rows[row][row];
	}
}

int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	size_t count = strtoul(argv[1], NULL, 10);
	unsigned sizes[] = { (unsigned)atoi(argv[2]), (unsigned)atoi(argv[3]) };
	struct rating *loaded = load(count, sizes[0], sizes[1]);
	struct rating *sides[] = { loaded, by_item(loaded, count, sizes[1]) };
	float *factors[2];

	for (int side = 0; side < 2; side++) {
		factors[side] = allocate((size_t)sizes[side] * RANK, sizeof(float));
		for (size_t i = 0; i < (size_t)sizes[side] * RANK; i++)
			factors[side][i] = (float)(random_unit() / RANK);
	}
	for (int half = 0; half < 2 * atoi(argv[4]); half++) {
		int side = half % 2;
		struct normal *normals = allocate(sizes[side], sizeof *normals);
		for (size_t i = 0; i < count; i++) {
			const struct rating *rating = &sides[side][i];
			unsigned own = side ? rating->item : rating->user;
			unsigned other = side ? rating->user : rating->item;
			add(&normals[own], factors[!side] + (size_t)other * RANK, rating->stars);
		}
		for (unsigned own = 0; own < sizes[side]; own++)
			solve(&normals[own], factors[side] + (size_t)own * RANK);
		free(normals);
	}
	double error = 0;
	for (size_t i = 0; i < count; i++) {
		double stars = loaded[i].stars;
		for (int k = 0; k < RANK; k++)
			stars -= factors[0][(size_t)loaded[i].user * RANK + k] *
				 factors[1][(size_t)loaded[i].item * RANK + k];
		error += stars * stars;
	}
	printf("root mean square error %.3f\n", sqrt(error / (double)count));
	return 0;
}
