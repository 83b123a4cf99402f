/* Exercises how memory is mapped, changed, advised and given back. */
#include "check.h"
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>

static void sparse(void)
{
    size_t size = 40ul << 30, step = size / 200;
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(at != MAP_FAILED);
    for (size_t i = 0; i < 200; i++)
        fill(at + i * step / PAGE * PAGE, PAGE, i);
    size_t bad = 0;
    for (size_t i = 0; i < 200; i++)
        bad += wrong(at + i * step / PAGE * PAGE, PAGE, i) + nonzero(at + i * step / PAGE * PAGE + PAGE, PAGE);
    printf("%zu wrong\n", bad);
}

static void grow(void)
{
    enum { BLOCKS = 4000 };
    static void *blocks[BLOCKS];
    static size_t sizes[BLOCKS];
    size_t bad = 0;
    for (size_t round = 0; round < 3; round++)
        for (size_t i = 0; i < BLOCKS; i++) {
            size_t size = 8 * (1 + number(i, round) % 4000);
            if (blocks[i])
                bad += wrong(blocks[i], sizes[i], i);
            if (i % 3 == 0) {
                free(blocks[i]);
                blocks[i] = calloc(1, size);
                bad += nonzero(blocks[i], size);
            } else
                blocks[i] = realloc(blocks[i], size);
            fill(blocks[i], sizes[i] = size, i);
        }
    char *whole = NULL;
    for (size_t size = MIB; size <= 96 * MIB; size += 5 * MIB) {
        whole = realloc(whole, size);
        fill(whole + size - MIB, MIB, size);
    }
    for (size_t size = MIB; size <= 96 * MIB; size += 5 * MIB)
        bad += wrong(whole + size - MIB, MIB, size);
    printf("%zu wrong\n", bad);
}

/* Lives long enough for the pager to find memory that no library has told it of. */
static void sweeps(void)
{
    char *at = map_filled(64 * MIB, 0);
    size_t bad = 0;
    for (size_t round = 0; round < 12; round++) {
        bad += wrong(at, 64 * MIB, round);
        fill(at, 64 * MIB, round + 1);
    }
    printf("%zu wrong\n", bad);
}

static void break_heap(void)
{
    char *start = sbrk(0);
    CHECK(sbrk(96 * MIB) == start);
    fill(start, 96 * MIB, 1);
    CHECK(sbrk(-(long)(32 * MIB)) != (void *)-1);
    size_t bad = wrong(start, 64 * MIB, 1);
    CHECK(sbrk(32 * MIB) == start + 64 * MIB);
    printf("%zu wrong, %zu not zero\n", bad, nonzero(start + 64 * MIB, 32 * MIB));
}

static void advice_free(void)
{
    char *at = map_filled(64 * MIB, 1);
    CHECK(!madvise(at, 32 * MIB, MADV_FREE));
    size_t bad = 0;
    for (size_t i = 0; i < 32 * MIB; i += PAGE)
        bad += wrong(at + i, PAGE, 0) && ((uint64_t *)(at + i))[0] &&
               ((uint64_t *)(at + i))[0] != number(i / 8, 1);
    fill(at, 32 * MIB, 1);
    printf("%zu neither old nor zero, %zu wrong\n", bad, wrong(at, 64 * MIB, 1));
}

static void advice_dontneed(void)
{
    size_t bad = 0, left = 0;
    char *at = map_filled(64 * MIB, 1);
    for (size_t round = 0; round < 4; round++) {
        for (size_t i = 0; i < 64 * MIB; i += 2 * MIB)
            CHECK(!madvise(at + i, MIB, MADV_DONTNEED));
        for (size_t i = 0; i < 64 * MIB; i += 2 * MIB)
            left += nonzero(at + i, MIB);
        fill(at, 64 * MIB, 1);
        bad += wrong(at, 64 * MIB, 1);
    }
    printf("%zu wrong, %zu not zero\n", bad, left);
}

static void advice_fork(void)
{
    char *wiped = map_filled(32 * MIB, 1), *kept = map_filled(32 * MIB, 2);
    char *away = map_filled(8 * MIB, 3);
    CHECK(!madvise(wiped, 32 * MIB, MADV_WIPEONFORK));
    CHECK(!madvise(away, 8 * MIB, MADV_DONTFORK));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        unsigned char in;
        int there = mincore(away, PAGE, &in) == 0;
        printf("child: %zu not zero, %zu wrong, away %d\n", nonzero(wiped, 32 * MIB),
               wrong(kept, 32 * MIB, 2), there);
        fflush(stdout);
        _exit(0);
    }
    CHECK(waitpid(child, NULL, 0) == child);
    printf("parent: %zu wrong\n",
           wrong(wiped, 32 * MIB, 1) + wrong(kept, 32 * MIB, 2) + wrong(away, 8 * MIB, 3));
}

static void moves(void)
{
    size_t bad = 0, size = 2 * MIB;
    char *at = map_filled(size, 1);
    for (size_t i = 0; i < 20; i++) {
        char *hint = map(2 * size + 4 * MIB);
        CHECK(!munmap(hint, 2 * size + 4 * MIB));
        char *moved = mremap(at, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, hint);
        CHECK(moved != MAP_FAILED);
        moved = mremap(moved, size, size + 2 * MIB, MREMAP_MAYMOVE);
        CHECK(moved != MAP_FAILED);
        bad += nonzero(moved + size, 2 * MIB);
        size += 2 * MIB;
        at = moved;
        fill(at, size, i);
        bad += wrong(at, size, i);
    }
    for (size_t i = 0; i < 3000; i++) {
        char *small = map_filled(8 * PAGE, i);
        small = mremap(small, 8 * PAGE, 32 * PAGE, MREMAP_MAYMOVE);
        CHECK(small != MAP_FAILED);
        bad += wrong(small, 8 * PAGE, i) + nonzero(small + 8 * PAGE, 24 * PAGE);
        CHECK(!munmap(small, 32 * PAGE));
    }
    char *kept = mremap(at, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
    if (kept != MAP_FAILED)
        bad += nonzero(at, 2 * MIB) + wrong(kept, 2 * MIB, 19);
    printf("%zu wrong\n", bad);
}

static void protections(void)
{
    size_t bad = 0;
    char *at = map_filled(64 * MIB, 1);
    for (size_t round = 0; round < 3; round++) {
        for (size_t i = 0; i < 64 * MIB; i += 16 * PAGE)
            CHECK(!mprotect(at + i, 8 * PAGE, i / PAGE % 32 ? PROT_NONE : PROT_READ));
        for (size_t i = 0; i < 64 * MIB; i += 16 * PAGE)
            CHECK(!mprotect(at + i, 8 * PAGE, PROT_READ | PROT_WRITE));
        bad += wrong(at, 64 * MIB, 1);
    }
    printf("%zu wrong\n", bad);
}

static void huge_pages(void)
{
    char *at = map(100 * MIB);
    CHECK(!madvise(at, 100 * MIB, MADV_HUGEPAGE));
    fill(at, 96 * MIB, 1);
    size_t bad = wrong(at, 96 * MIB, 1) + nonzero(at + 96 * MIB, 4 * MIB);
    CHECK(!madvise(at, 100 * MIB, MADV_NOHUGEPAGE));
    printf("%zu wrong\n", bad + wrong(at, 96 * MIB, 1));
}

static void many_mappings(void)
{
    enum { COUNT = 30000 };
    static char *at[COUNT];
    size_t bad = 0;
    for (size_t i = 0; i < COUNT; i++) {
        int protection = i % 2 ? PROT_READ | PROT_WRITE : PROT_READ | PROT_WRITE | PROT_EXEC;
        at[i] = mmap(NULL, PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(at[i] != MAP_FAILED);
        fill(at[i], PAGE, i);
    }
    for (int fork_number = 0; fork_number < 3; fork_number++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            for (size_t i = 0; i < COUNT; i++)
                bad += wrong(at[i], PAGE, i);
            _exit(bad != 0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        bad += status != 0;
    }
    for (size_t i = 0; i < COUNT; i++)
        bad += wrong(at[i], PAGE, i);
    printf("%zu wrong\n", bad);
}

static void locked(void)
{
    char *at = map_filled(64 * MIB, 1);
    CHECK(!mlock(at, 8 * MIB));
    size_t bad = wrong(at, 64 * MIB, 1);
    CHECK(!munlock(at, 8 * MIB));
    printf("%zu wrong\n", bad + wrong(at, 64 * MIB, 1));
}

static void lock_future(void)
{
    CHECK(!mlockall(MCL_FUTURE));
    char *at = map_filled(32 * MIB, 1);
    size_t bad = wrong(at, 32 * MIB, 1);
    CHECK(!munlockall());
    char *more = map_filled(32 * MIB, 2);
    printf("%zu wrong\n", bad + wrong(more, 32 * MIB, 2) + wrong(at, 32 * MIB, 1));
}

static void lock_current(void)
{
    char *at = map_filled(64 * MIB, 1);
    CHECK(!mlockall(MCL_CURRENT));
    printf("%zu wrong\n", wrong(at, 64 * MIB, 1));
}

static void of_file(int fd, int flags)
{
    CHECK(fd >= 0 && !ftruncate(fd, 64 * MIB));
    char *shared = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
    CHECK(shared != MAP_FAILED);
    fill(shared, 64 * MIB, 1);
    char *copy = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | flags, fd, 0);
    CHECK(copy != MAP_FAILED);
    size_t bad = wrong(copy, 64 * MIB, 1);
    fill(copy, 32 * MIB, 2);
    char *beside = map_filled(64 * MIB, 3);
    bad += wrong(copy, 32 * MIB, 2) + wrong(shared, 64 * MIB, 1) + wrong(beside, 64 * MIB, 3);
    printf("%zu wrong\n", bad);
}

static void memory_file(void) { of_file(memfd_create("compatibility", 0), 0); }

static void tmpfs(void)
{
    int fd = open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
    CHECK(fd >= 0);
    of_file(fd, 0);
}

static void shared_anonymous(void)
{
    char *at = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    char *beside = map_filled(64 * MIB, 3);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        fill(at, 64 * MIB, 1);
        _exit(wrong(beside, 64 * MIB, 3) != 0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("status %d, %zu wrong\n", status, wrong(at, 64 * MIB, 1));
}

static void hugetlb(void)
{
    size_t size = 8 * MIB;
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
    CHECK(at != MAP_FAILED);
    fill(at, size, 1);
    char *beside = map_filled(64 * MIB, 3);
    printf("%zu wrong\n", wrong(at, size, 1) + wrong(beside, 64 * MIB, 3));
}

static void limited(void)
{
    struct rlimit limit = {1024 * MIB, 1024 * MIB};
    CHECK(!setrlimit(RLIMIT_AS, &limit));
    char *at = map_filled(64 * MIB, 1);
    void *tall = mmap(NULL, 2048 * MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    printf("%zu wrong, beyond the limit: %d\n", wrong(at, 64 * MIB, 1), tall != MAP_FAILED);
}

static const struct mode MODES[] = {
    {"sparse", sparse}, {"grow", grow}, {"sweeps", sweeps}, {"break", break_heap},
    {"free", advice_free}, {"dontneed", advice_dontneed}, {"fork", advice_fork}, {"moves", moves},
    {"protections", protections}, {"huge-pages", huge_pages}, {"mappings", many_mappings},
    {"locked", locked}, {"lock-future", lock_future}, {"lock-current", lock_current},
    {"memfd", memory_file}, {"tmpfs", tmpfs}, {"shared", shared_anonymous},
    {"hugetlb", hugetlb}, {"limited", limited}, {0},
};

int main(int argc, char **argv) { return run_mode(MODES, argc, argv); }
