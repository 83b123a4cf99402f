/* Uses memory in the ways of a program without glibc's shared library, and checks each page of it.
 *
 * Built by the test in each way in which no dynamic linker of glibc's loads anything into it. Says
 * the same in each run.
 *
 *   memory threads     threads that map, move, empty and unmap memory in each other's holes
 *   memory forks       children that see what was there at the fork, and change it
 *   memory unseen      children by a system call whose number is computed: they see that, or end
 *   memory children    programs that are started by posix_spawn, vfork, popen and system
 *   memory steady      fills memory, and checks it again and again until its input ends
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, WRONG = 77 };

extern char **environ;

static uint64_t mix(uint64_t word)
{
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
    return word ^ (word >> 31);
}

static uint64_t next(uint64_t *random)
{
    return mix(*random += 0x9e3779b97f4a7c15u);
}

static void fail(const char *what)
{
    /* Nothing of stdio's: it may be what is broken. */
    (void)!write(2, what, strlen(what));
    (void)!write(2, "\n", 1);
    _exit(WRONG);
}

static void put(uint64_t *page, uint64_t tag)
{
    for (int i = 0; i < WORDS; i += 8)
        page[i] = mix(tag + i);
}

static void check(const uint64_t *page, uint64_t tag)
{
    for (int i = 0; i < WORDS; i += 8)
        if (page[i] != (tag ? mix(tag + i) : 0))
            fail("a page is not what it was");
}

static uint64_t *at(char *memory, size_t page)
{
    return (uint64_t *)(memory + page * PAGE);
}

static char *map(size_t pages)
{
    char *memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap");
    return memory;
}

enum { THREADS = 4, PIECES = 48, PIECE = 96, STEPS = 5000 };

enum { LEFT = 2048 };

/* Pages of each thread's pieces that had left when it looked last. */
static _Atomic size_t left[THREADS];

/* On Hecaton, waits until so many pages have left that the threads had written: their memory is
 * found from outside, in a moment. */
static void wait_until_threads_are_paged(int self, char **piece, const size_t *len,
                                         uint64_t (*tag)[2 * PIECE])
{
    unsigned char is_there[2 * PIECE];
    if (!getenv("HECATON_PAGER"))
        return;
    for (int look = 0; look < 12000; look++) {
        size_t own = 0, all = 0;
        for (int i = 0; i < PIECES; i++) {
            if (mincore(piece[i], len[i] * PAGE, is_there))
                fail("mincore");
            for (size_t p = 0; p < len[i]; p++)
                own += tag[i][p] && !(is_there[p] & 1);
        }
        left[self] = own;
        for (int i = 0; i < THREADS; i++)
            all += left[i];
        if (all >= LEFT)
            return;
        usleep(5000);
    }
    fail("the memory stays where it is");
}

/* Each has pieces of its own, and gets them where the others have just left some. */
static void *churn(void *number)
{
    uint64_t random = (uintptr_t)number, sum = 0;
    char *piece[PIECES];
    size_t len[PIECES];
    uint64_t tag[PIECES][2 * PIECE];
    for (int i = 0; i < PIECES; i++) {
        piece[i] = map(len[i] = PIECE);
        memset(tag[i], 0, sizeof tag[i]);
    }
    for (int step = 0; step < STEPS; step++) {
        if (step == STEPS / 2)
            wait_until_threads_are_paged((int)(uintptr_t)number - 1, piece, len, tag);
        int i = next(&random) % PIECES;
        size_t page = next(&random) % len[i];
        switch (next(&random) % 16) {
        case 0:
            if (munmap(piece[i], len[i] * PAGE))
                fail("munmap");
            piece[i] = map(len[i] = PIECE);
            memset(tag[i], 0, sizeof tag[i]);
            break;
        case 1:
            if (madvise(at(piece[i], page), PAGE * (len[i] - page), MADV_DONTNEED))
                fail("madvise");
            memset(tag[i] + page, 0, (len[i] - page) * sizeof tag[i][0]);
            break;
        default:
            for (size_t p = page; p < len[i] && p < page + 16; p++) {
                check(at(piece[i], p), tag[i][p]);
                put(at(piece[i], p), tag[i][p] = next(&random) | 1);
            }
        }
    }
    for (int i = 0; i < PIECES; i++)
        for (size_t p = 0; p < len[i]; p++) {
            check(at(piece[i], p), tag[i][p]);
            sum = mix(sum ^ tag[i][p]);
        }
    return (void *)(uintptr_t)sum;
}

/* One thread that moves memory, and lets the allocator do it. */
static void *grow(void *number)
{
    uint64_t tag = (uintptr_t)number << 32, sum = 0;
    char *own = malloc(PAGE);
    size_t pages = 1;
    put((uint64_t *)own, tag);
    for (int round = 0; round < 200; round++) {
        size_t more = pages + 61;
        if (!(own = realloc(own, more * PAGE)))
            fail("realloc");
        for (; pages < more; pages++)
            put(at(own, pages), tag + pages);
        check(at(own, round * 31 % pages), tag + round * 31 % pages);
    }
    for (size_t p = 0; p < pages; p++) {
        check(at(own, p), tag + p);
        sum = mix(sum ^ *at(own, p));
    }
    free(own);
    return (void *)(uintptr_t)sum;
}

static void threads(void)
{
    pthread_t thread[THREADS + 1];
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 1 << 20);
    for (uintptr_t i = 0; i <= THREADS; i++)
        if (pthread_create(&thread[i], &attributes, i < THREADS ? churn : grow, (void *)(i + 1)))
            fail("pthread_create");
    for (int i = 0; i <= THREADS; i++) {
        void *sum;
        pthread_join(thread[i], &sum);
        printf("thread %d: %llx\n", i, (unsigned long long)(uintptr_t)sum);
    }
}

static uint64_t *tags;
static char *shared;
enum { PAGES = 20000 };

/* On Hecaton, waits until a part of the memory has left: it is found from outside, in a moment. */
static void wait_until_paged(void)
{
    static unsigned char is_there[PAGES];
    if (!getenv("HECATON_PAGER"))
        return;
    for (int look = 0; look < 12000; look++) {
        size_t there = 0;
        if (mincore(shared, (size_t)PAGES * PAGE, is_there))
            fail("mincore");
        for (size_t p = 0; p < PAGES; p++)
            there += is_there[p] & 1;
        if (there < PAGES / 2)
            return;
        usleep(5000);
    }
    fail("the memory stays where it is");
}

static void fill(void)
{
    tags = malloc(PAGES * sizeof *tags);
    shared = malloc((size_t)PAGES * PAGE + PAGE);
    shared += -(uintptr_t)shared % PAGE;
    for (size_t p = 0; p < PAGES; p++)
        put(at(shared, p), tags[p] = p + 1);
}

static void check_all(void)
{
    for (size_t p = 0; p < PAGES; p++)
        check(at(shared, p), tags[p]);
}

static void change(uint64_t seed)
{
    for (int i = 0; i < PAGES / 3; i++) {
        size_t p = next(&seed) % PAGES;
        put(at(shared, p), tags[p] = next(&seed) | 1);
    }
    check_all();
}

static pid_t unseen(void)
{
    volatile long number = 56;
    long result = ++number;
    __asm__ volatile("syscall" : "+a"(result) : : "rcx", "r11", "memory");
    return result;
}

static void forks(pid_t (*make)(void), int may_end)
{
    fill();
    wait_until_paged();
    for (int round = 0; round < 2; round++) {
        pid_t child[2];
        for (int i = 0; i < 2; i++) {
            child[i] = make();
            if (child[i] < 0)
                fail("fork");
            if (child[i] == 0) {
                check_all();
                change(round * 2 + i);
                if (!may_end && i == 1) {
                    pid_t grandchild = make();
                    change(100 + round);
                    if (grandchild == 0)
                        _exit(0);
                    int status;
                    if (waitpid(grandchild, &status, 0) != grandchild || status)
                        fail("the grandchild ended badly");
                }
                _exit(0);
            }
            change(1000 + round * 2 + i);
        }
        for (int i = 0; i < 2; i++) {
            int status;
            if (waitpid(child[i], &status, 0) != child[i])
                fail("waitpid");
            int ended = may_end && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
            if (status && !ended)
                fail("a child ended badly");
        }
        check_all();
    }
    printf("all children are right\n");
}

static void children(void)
{
    fill();
    wait_until_paged();
    for (int round = 0; round < 3; round++) {
        char *arguments[] = {"sh", "-c", "echo spawned; exit 3", NULL};
        pid_t child;
        int status;
        fflush(stdout);
        if (posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environ))
            fail("posix_spawn");
        waitpid(child, &status, 0);
        printf("status %x\n", status);
        fflush(stdout);
        child = vfork();
        if (child == 0) {
            execl("/bin/sh", "sh", "-c", "echo after vfork", (char *)NULL);
            _exit(1);
        }
        waitpid(child, &status, 0);
        printf("status %x, %x\n", status, system("echo from system; exit 5"));
        char line[64] = "";
        FILE *pipe = popen("echo through a pipe", "r");
        if (!pipe || !fgets(line, sizeof line, pipe))
            fail("popen");
        printf("status %x: %s", pclose(pipe), line);
        change(round);
    }
}

static volatile int input_ended;

static void *wait_for_input(void *unused)
{
    char byte;
    while (read(0, &byte, 1) > 0)
        ;
    input_ended = 1;
    return unused;
}

static void steady(void)
{
    pthread_t reader;
    fill();
    pthread_create(&reader, NULL, wait_for_input, NULL);
    for (int pass = 0; !input_ended; pass++) {
        change(pass);
        printf("pass\n");
        fflush(stdout);
    }
    printf("verified\n");
}

int main(int count, char **arguments)
{
    const char *what = count == 2 ? arguments[1] : "";
    if (!strcmp(what, "threads"))
        threads();
    else if (!strcmp(what, "forks"))
        forks(fork, 0);
    else if (!strcmp(what, "unseen"))
        forks(unseen, 1);
    else if (!strcmp(what, "children"))
        children();
    else if (!strcmp(what, "steady"))
        steady();
    else
        fail("what?");
    return 0;
}
