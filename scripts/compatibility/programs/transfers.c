/* Has the kernel read and write paged memory: files, pipes, rings, other processes. */
#include "check.h"
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define SIZE (64 * MIB)

static int scratch(int flags)
{
    char name[32];
    snprintf(name, sizeof name, "./transfer-%d", getpid());
    int fd = open(name, O_CREAT | O_EXCL | O_RDWR | flags, 0600);
    CHECK(fd >= 0 && !unlink(name));
    return fd;
}

static size_t round_trip(int fd, char *from, char *to)
{
    for (size_t i = 0; i < SIZE; i += MIB)
        CHECK(pwrite(fd, from + i, MIB, i) == (ssize_t)MIB);
    for (size_t i = 0; i < SIZE; i += MIB)
        CHECK(pread(fd, to + i, MIB, i) == (ssize_t)MIB);
    return wrong(from, SIZE, 1) + wrong(to, SIZE, 1);
}

static void file(void)
{
    printf("%zu wrong\n", round_trip(scratch(0), map_filled(SIZE, 1), map(SIZE)));
}

static void direct(void)
{
    printf("%zu wrong\n", round_trip(scratch(O_DIRECT), map_filled(SIZE, 1), map(SIZE)));
}

static void own_memory(void)
{
    int fd = open("/proc/self/mem", O_RDWR);
    CHECK(fd >= 0);
    char *from = map_filled(SIZE, 1), *to = map(SIZE);
    size_t bad = 0;
    for (size_t i = 0; i < SIZE; i += MIB) {
        static char buffer[MIB];
        CHECK(pread(fd, buffer, MIB, (off_t)(from + i)) == (ssize_t)MIB);
        CHECK(pwrite(fd, buffer, MIB, (off_t)(to + i)) == (ssize_t)MIB);
    }
    bad = wrong(from, SIZE, 1) + wrong(to, SIZE, 1);
    printf("%zu wrong\n", bad);
}

static void other_memory(void)
{
    char *from = map_filled(SIZE, 1), *to = map(SIZE);
    int hold[2];
    char mark = 0;
    CHECK(!pipe(hold));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        close(hold[1]);
        _exit(read(hold[0], &mark, 1) != 0 || wrong(from, SIZE, 1));
    }
    size_t got = 0;
    int status;
    for (size_t i = 0; i < SIZE; i += MIB) {
        struct iovec local = {to + i, MIB}, remote = {from + i, MIB};
        ssize_t bytes = process_vm_readv(child, &local, 1, &remote, 1, 0);
        CHECK(bytes >= 0);
        got += bytes;
    }
    close(hold[1]);
    waitpid(child, &status, 0);
    printf("%zu bytes, %zu wrong, child %d\n", got, wrong(from, SIZE, 1) + wrong(to, SIZE, 1), status);
}

static void through_pipe(int gift)
{
    char *from = map_filled(SIZE, 1), *to = map(SIZE);
    int ends[2];
    CHECK(!pipe(ends));
    for (size_t done = 0; done < SIZE;) {
        struct iovec piece = {from + done, 16 * PAGE};
        ssize_t bytes = gift ? vmsplice(ends[1], &piece, 1, 0) : writev(ends[1], &piece, 1);
        CHECK(bytes > 0);
        for (ssize_t got = 0; got < bytes;) {
            ssize_t part = read(ends[0], to + done + got, bytes - got);
            CHECK(part > 0);
            got += part;
        }
        done += bytes;
    }
    printf("%zu wrong\n", wrong(from, SIZE, 1) + wrong(to, SIZE, 1));
}

static void through_pipes(void) { through_pipe(0); }
static void splice_memory(void) { through_pipe(1); }

static void *receive(void *argument)
{
    int fd = *(int *)argument;
    char *to = map(SIZE);
    for (size_t done = 0; done < SIZE;) {
        ssize_t part = recv(fd, to + done, SIZE - done, 0);
        CHECK(part > 0);
        done += part;
    }
    return to;
}

static void sockets(void)
{
    int ends[2];
    char *from = map_filled(SIZE, 1);
    void *to;
    pthread_t thread;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    CHECK(!pthread_create(&thread, NULL, receive, &ends[1]));
    for (size_t done = 0; done < SIZE;) {
        ssize_t part = send(ends[0], from + done, SIZE - done < MIB ? SIZE - done : MIB, 0);
        CHECK(part > 0);
        done += part;
    }
    CHECK(!pthread_join(thread, &to));
    printf("%zu wrong\n", wrong(to, SIZE, 1));
}

/* Reads and writes a file with one request in flight, by buffers that are registered. */
static void ring(void)
{
    struct io_uring_params params = {0};
    int fd = scratch(0), ring_fd = syscall(SYS_io_uring_setup, 8, &params);
    CHECK(ring_fd >= 0);
    char *sq = mmap(NULL, params.sq_off.array + params.sq_entries * 4, PROT_READ | PROT_WRITE,
                    MAP_SHARED, ring_fd, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe),
                    PROT_READ | PROT_WRITE, MAP_SHARED, ring_fd, IORING_OFF_CQ_RING);
    struct io_uring_sqe *entries = mmap(NULL, params.sq_entries * sizeof *entries,
                                        PROT_READ | PROT_WRITE, MAP_SHARED, ring_fd,
                                        IORING_OFF_SQES);
    CHECK(sq != MAP_FAILED && cq != MAP_FAILED && entries != MAP_FAILED);
    char *pinned = map_filled(4 * MIB, 1), *beside = map_filled(SIZE, 2);
    struct iovec buffer = {pinned, 4 * MIB};
    CHECK(!syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_BUFFERS, &buffer, 1));
    for (int step = 0; step < 2; step++) {
        for (size_t i = 0; i < 4 * MIB; i += MIB) {
            unsigned tail = *(unsigned *)(sq + params.sq_off.tail), at = tail & (params.sq_entries - 1);
            entries[at] = (struct io_uring_sqe){
                .opcode = step ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED,
                .fd = fd, .off = i, .addr = (uintptr_t)(pinned + i), .len = MIB};
            ((unsigned *)(sq + params.sq_off.array))[at] = at;
            __atomic_store_n((unsigned *)(sq + params.sq_off.tail), tail + 1, __ATOMIC_RELEASE);
            CHECK(syscall(SYS_io_uring_enter, ring_fd, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1);
            unsigned head = *(unsigned *)(cq + params.cq_off.head);
            struct io_uring_cqe *done = (void *)(cq + params.cq_off.cqes);
            CHECK(done[head & (params.cq_entries - 1)].res == (int)MIB);
            __atomic_store_n((unsigned *)(cq + params.cq_off.head), head + 1, __ATOMIC_RELEASE);
        }
        if (!step)
            memset(pinned, 0, 4 * MIB);
        fill(beside, SIZE, 2);
    }
    printf("%zu wrong\n", wrong(pinned, 4 * MIB, 1) + wrong(beside, SIZE, 2));
}

static int faults_fd;
static char *served;

static void *serve_faults(void *argument)
{
    size_t pages = (size_t)argument;
    char *page = aligned_alloc(PAGE, PAGE);
    for (size_t i = 0; i < pages; i++) {
        struct uffd_msg message;
        CHECK(read(faults_fd, &message, sizeof message) == sizeof message);
        char *at = (char *)(message.arg.pagefault.address & ~(PAGE - 1));
        fill(page, PAGE, (at - served) / PAGE);
        struct uffdio_copy copy = {.dst = (uintptr_t)at, .src = (uintptr_t)page, .len = PAGE};
        CHECK(!ioctl(faults_fd, UFFDIO_COPY, &copy));
    }
    return NULL;
}

static void own_userfaultfd(void)
{
    faults_fd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    CHECK(faults_fd >= 0 && !ioctl(faults_fd, UFFDIO_API, &api));
    char *beside = map_filled(SIZE, 1);
    served = map(4 * MIB);
    struct uffdio_register range = {.range = {(uintptr_t)served, 4 * MIB},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    CHECK(!ioctl(faults_fd, UFFDIO_REGISTER, &range));
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, serve_faults, (void *)(4 * MIB / PAGE)));
    size_t bad = 0;
    for (size_t i = 0; i < 4 * MIB / PAGE; i++)
        bad += wrong(served + i * PAGE, PAGE, i);
    CHECK(!pthread_join(thread, NULL));
    printf("%zu wrong\n", bad + wrong(beside, SIZE, 1));
}

static void residency(void)
{
    char *at = map_filled(SIZE, 1);
    static unsigned char in[SIZE / PAGE];
    CHECK(!mincore(at, SIZE, in));
    int fd = open("/proc/self/pagemap", O_RDONLY);
    uint64_t entry;
    CHECK(fd >= 0 && pread(fd, &entry, 8, (uintptr_t)at / PAGE * 8) == 8);
    printf("%zu wrong\n", wrong(at, SIZE, 1));
}

static const struct mode MODES[] = {
    {"file", file}, {"direct", direct}, {"own-memory", own_memory}, {"other-memory", other_memory},
    {"pipes", through_pipes}, {"vmsplice", splice_memory}, {"sockets", sockets}, {"ring", ring},
    {"userfaultfd", own_userfaultfd}, {"residency", residency}, {0},
};

int main(int argc, char **argv) { return run_mode(MODES, argc, argv); }
