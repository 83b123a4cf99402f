/* Fills memory with numbers that depend on place and seed, and checks them. */
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)

/* Ends the program if `condition` is false, and says where. */
#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition,             \
                    strerror(errno));                                                      \
            _exit(1);                                                                      \
        }                                                                                  \
    } while (0)

static inline uint64_t number(uint64_t place, uint64_t seed)
{
    uint64_t x = (place + 1) * 0x9e3779b97f4a7c15ul ^ seed * 0xbf58476d1ce4e5b9ul;
    x ^= x >> 31;
    return x * 0x94d049bb133111ebul;
}

static inline void fill(void *memory, size_t bytes, uint64_t seed)
{
    uint64_t *words = memory;
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = number(i, seed);
}

/* The number of words that are not what `fill` wrote. */
static inline size_t wrong(const void *memory, size_t bytes, uint64_t seed)
{
    const uint64_t *words = memory;
    size_t count = 0;
    for (size_t i = 0; i < bytes / 8; i++)
        count += words[i] != number(i, seed);
    return count;
}

static inline size_t nonzero(const void *memory, size_t bytes)
{
    const uint64_t *words = memory;
    size_t count = 0;
    for (size_t i = 0; i < bytes / 8; i++)
        count += words[i] != 0;
    return count;
}

static inline void *map(size_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return at;
}

static inline void *map_filled(size_t bytes, uint64_t seed)
{
    void *at = map(bytes);
    fill(at, bytes, seed);
    return at;
}

struct mode {
    const char *name;
    void (*run)(void);
};

static inline int run_mode(const struct mode *modes, int argc, char **argv)
{
    for (; argc > 1 && modes->name; modes++)
        if (!strcmp(modes->name, argv[1])) {
            modes->run();
            return 0;
        }
    fprintf(stderr, "usage: %s MODE\n", argv[0]);
    return 2;
}

#endif
