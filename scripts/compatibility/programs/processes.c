/* Exercises processes and threads that share paged memory, or have copies of it. */
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static char *memory;

static int ended_well(pid_t child)
{
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return status == 0;
}

/* Each process forks two, which check what all have, and change a part of their own. */
static size_t tree(int depth)
{
    size_t bad = 0;
    for (int i = 0; i < 2 && depth; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            char *part = memory + (16 + 2 * depth + i) * MIB;
            size_t mine = wrong(memory, 16 * MIB, 1);
            fill(part, MIB, depth);
            mine += tree(depth - 1);
            _exit(mine + wrong(part, MIB, depth) != 0);
        }
        bad += !ended_well(child);
    }
    return bad;
}

static void fork_tree(void)
{
    memory = map_filled(64 * MIB, 1);
    printf("%zu wrong\n", tree(5) + wrong(memory, 64 * MIB, 1));
}

static void copy_on_write(void)
{
    size_t bad = 0;
    memory = map_filled(64 * MIB, 1);
    int to_child[2], to_parent[2];
    char mark = 0;
    CHECK(!pipe(to_child) && !pipe(to_parent));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        CHECK(read(to_child[0], &mark, 1) == 1);
        bad = wrong(memory, 64 * MIB, 1);
        fill(memory, 32 * MIB, 3);
        CHECK(write(to_parent[1], &mark, 1) == 1);
        CHECK(read(to_child[0], &mark, 1) == 1);
        _exit(bad + wrong(memory, 32 * MIB, 3) != 0);
    }
    fill(memory, 64 * MIB, 2);
    CHECK(write(to_child[1], &mark, 1) == 1 && read(to_parent[0], &mark, 1) == 1);
    bad += wrong(memory, 64 * MIB, 2);
    CHECK(write(to_child[1], &mark, 1) == 1);
    bad += !ended_well(child);
    printf("%zu wrong\n", bad);
}

static void spawn(void)
{
    extern char **environ;
    volatile size_t bad = 0;
    memory = map_filled(64 * MIB, 1);
    for (int i = 0; i < 50; i++) {
        pid_t child;
        char *command[] = {"true", NULL};
        CHECK(!posix_spawnp(&child, "true", NULL, NULL, command, environ));
        bad += !ended_well(child);
        child = vfork();
        if (!child) {
            execvp("true", command);
            _exit(127);
        }
        bad += !ended_well(child);
    }
    printf("%zu wrong\n", bad + wrong(memory, 64 * MIB, 1));
}

static void thousand_processes(void)
{
    enum { COUNT = 1000 };
    static pid_t child[COUNT];
    size_t bad = 0;
    int hold[2];
    char mark;
    memory = map_filled(8 * MIB, 1);
    CHECK(!pipe(hold));
    for (size_t i = 0; i < COUNT; i++) {
        child[i] = fork();
        CHECK(child[i] >= 0);
        if (!child[i]) {
            close(hold[1]);
            CHECK(read(hold[0], &mark, 1) == 0);
            uint64_t place = (4 * MIB + i * PAGE) / 8;
            int kept = ((uint64_t *)memory)[place] == number(place, 1);
            fill(memory, PAGE, i);
            _exit(!kept || wrong(memory, PAGE, i));
        }
    }
    close(hold[1]);
    for (size_t i = 0; i < COUNT; i++)
        bad += !ended_well(child[i]);
    printf("%zu wrong\n", bad + wrong(memory, 8 * MIB, 1));
}

static void *of_thread(void *argument)
{
    size_t index = (size_t)argument;
    char stack[16 * PAGE], *heap = malloc(16 * PAGE);
    fill(stack, sizeof stack, index);
    fill(heap, 16 * PAGE, index);
    fill(memory + index * 16 * PAGE, 16 * PAGE, index);
    sched_yield();
    size_t bad = wrong(stack, sizeof stack, index) + wrong(heap, 16 * PAGE, index) +
                 wrong(memory + index * 16 * PAGE, 16 * PAGE, index);
    free(heap);
    return (void *)bad;
}

static void thousand_threads(void)
{
    enum { COUNT = 1000 };
    static pthread_t thread[COUNT];
    size_t bad = 0;
    memory = map(COUNT * 16 * PAGE);
    pthread_attr_t attributes;
    CHECK(!pthread_attr_init(&attributes) && !pthread_attr_setstacksize(&attributes, 256 << 10));
    for (size_t i = 0; i < COUNT; i++)
        CHECK(!pthread_create(&thread[i], &attributes, of_thread, (void *)i));
    for (size_t i = 0; i < COUNT; i++) {
        void *mine;
        CHECK(!pthread_join(thread[i], &mine));
        bad += (size_t)mine;
    }
    for (size_t i = 0; i < COUNT; i++)
        bad += wrong(memory + i * 16 * PAGE, 16 * PAGE, i);
    printf("%zu wrong\n", bad);
}

struct held {
    pthread_mutex_t mutex;
    char beside[PAGE - sizeof(pthread_mutex_t)];
};

static void *hold_and_end(void *argument)
{
    struct held *held = argument;
    for (size_t i = 0; i < 8 * MIB / PAGE; i += 64)
        CHECK(!pthread_mutex_lock(&held[i].mutex));
    return NULL;
}

static void robust_mutexes(void)
{
    struct held *held = map(8 * MIB);
    pthread_mutexattr_t attributes;
    CHECK(!pthread_mutexattr_init(&attributes));
    CHECK(!pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST));
    size_t bad = 0, dead = 0, count = 8 * MIB / PAGE;
    for (size_t i = 0; i < count; i += 64)
        CHECK(!pthread_mutex_init(&held[i].mutex, &attributes));
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, hold_and_end, held) && !pthread_join(thread, NULL));
    memory = map_filled(96 * MIB, 1);
    for (size_t i = 0; i < count; i += 64)
        dead += pthread_mutex_lock(&held[i].mutex) == EOWNERDEAD;
    printf("%zu owners dead, %zu wrong\n", dead, bad + wrong(memory, 96 * MIB, 1));
}

static sigjmp_buf back;
static char *guarded;

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    char *page = (char *)((uintptr_t)info->si_addr & ~(PAGE - 1));
    if (!info->si_addr)
        siglongjmp(back, 1);
    CHECK(!mprotect(page, PAGE, PROT_READ | PROT_WRITE));
}

static void signals(void)
{
    volatile size_t bad = 0;
    stack_t stack = {.ss_sp = map(64 * PAGE), .ss_size = 64 * PAGE};
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    CHECK(!sigaltstack(&stack, NULL) && !sigaction(SIGSEGV, &action, NULL));
    guarded = map_filled(64 * MIB, 1);
    for (size_t i = 0; i < 64 * MIB; i += 8 * PAGE)
        CHECK(!mprotect(guarded + i, PAGE, PROT_NONE));
    bad += wrong(guarded, 64 * MIB, 1);
    int jumped = sigsetjmp(back, 1);
    if (!jumped)
        *(volatile char *)NULL = 1;
    printf("jumped %d, %zu wrong\n", jumped, bad);
}

static int in_clone(void *argument)
{
    size_t *bad = argument;
    *bad = wrong(memory, 64 * MIB, 1);
    fill(memory, 32 * MIB, 2);
    return 0;
}

static void clone_shared(void)
{
    static size_t bad = 1;
    memory = map_filled(64 * MIB, 1);
    char *stack = map(MIB);
    pid_t child = clone(in_clone, stack + MIB, CLONE_VM | CLONE_VFORK | SIGCHLD, &bad);
    CHECK(child >= 0);
    bad += !ended_well(child);
    printf("%zu wrong\n", bad + wrong(memory, 32 * MIB, 2));
}

static void clone_copy(void)
{
    memory = map_filled(64 * MIB, 1);
    static size_t bad;
    pid_t child = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    CHECK(child >= 0);
    if (!child)
        _exit(wrong(memory, 64 * MIB, 1) != 0);
    bad += !ended_well(child);
    printf("%zu wrong\n", bad + wrong(memory, 64 * MIB, 1));
}

static int in_copy(void *argument)
{
    (void)argument;
    return wrong(memory, 64 * MIB, 1) ? 1 : 7;
}

/* The C library ends such a child's only thread, and not its process, when the function returns. */
static void clone_function(void)
{
    memory = map_filled(64 * MIB, 1);
    char *stack = map(MIB);
    int status;
    pid_t child = clone(in_copy, stack + MIB, SIGCHLD, NULL);
    CHECK(child >= 0 && waitpid(child, &status, 0) == child);
    printf("status %x, %zu wrong\n", status, wrong(memory, 64 * MIB, 1));
}

static const struct mode MODES[] = {
    {"fork-tree", fork_tree}, {"copy-on-write", copy_on_write}, {"spawn", spawn},
    {"processes", thousand_processes}, {"threads", thousand_threads},
    {"robust", robust_mutexes}, {"signals", signals}, {"clone-shared", clone_shared},
    {"clone-copy", clone_copy}, {"clone-function", clone_function}, {0},
};

int main(int argc, char **argv) { return run_mode(MODES, argc, argv); }
