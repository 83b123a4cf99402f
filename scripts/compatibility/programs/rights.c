/* Gives up rights, and goes into other namespaces, with memory in the pool. */
#include "check.h"
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static char *memory;

static void begin(void) { memory = map_filled(48 * MIB, 1); }

/* Evicts what `begin` filled, checks it, and has a child check it. */
static void end(void)
{
    size_t bad = 0;
    char *more = map_filled(48 * MIB, 2);
    bad += wrong(memory, 48 * MIB, 1) + wrong(more, 48 * MIB, 2);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        bad += wrong(memory, 48 * MIB, 1);
        fill(memory, 8 * MIB, 3);
        _exit(bad + wrong(memory, 8 * MIB, 3) != 0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    printf("uid %d, status %d, %zu wrong\n", getuid(), status, bad + wrong(memory, 48 * MIB, 1));
}

static void set_user(void)
{
    begin();
    CHECK(!setgroups(0, NULL) && !setgid(65534) && !setuid(65534));
    end();
}

static void namespaces(int flags)
{
    begin();
    CHECK(!unshare(flags));
    end();
}

static void user_namespace(void) { namespaces(CLONE_NEWUSER); }
static void pid_namespace(void) { namespaces(CLONE_NEWPID); }
static void net_namespace(void) { namespaces(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS); }

static void empty_root(void)
{
    char name[32];
    snprintf(name, sizeof name, "./root-%d", getpid());
    begin();
    CHECK(!mkdir(name, 0700) && !chroot(name) && !chdir("/"));
    end();
}

static void undumpable(void)
{
    begin();
    CHECK(!prctl(PR_SET_DUMPABLE, 0) && !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    end();
}

/* Allows what a sandbox of computing code allows: memory, output, end. No fork, no open. */
static void filtered(void)
{
    begin();
    static const int allowed[] = {
        SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_mmap, SYS_munmap, SYS_mremap,
        SYS_brk, SYS_futex, SYS_rt_sigreturn, SYS_newfstatat, SYS_fstat, SYS_restart_syscall,
        SYS_getrandom,
    };
    enum { COUNT = sizeof allowed / sizeof *allowed };
    struct sock_filter code[COUNT + 3];
    code[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0);
    for (int i = 0; i < COUNT; i++)
        code[i + 1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], COUNT - i, 0);
    code[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    code[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {COUNT + 3, code};
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
    char *more = map_filled(48 * MIB, 2);
    printf("%zu wrong\n", wrong(memory, 48 * MIB, 1) + wrong(more, 48 * MIB, 2));
    fflush(stdout);
    _exit(0);
}

static void strict(void)
{
    begin();
    char *more = map(48 * MIB);
    CHECK(!prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
    fill(more, 48 * MIB, 2);
    size_t bad = wrong(memory, 48 * MIB, 1) + wrong(more, 48 * MIB, 2);
    char text[] = "0 wrong\n";
    text[0] += bad != 0;
    syscall(SYS_write, 1, text, 8);
    syscall(SYS_exit, 0);
}

static void few_files(void)
{
    struct rlimit files = {8, 8}, processes = {64, 64};
    CHECK(!setrlimit(RLIMIT_NOFILE, &files) && !setrlimit(RLIMIT_NPROC, &processes));
    begin();
    end();
}

static void close_all(void)
{
    begin();
    for (int fd = 3; fd < 1024; fd++)
        close(fd);
    CHECK(!syscall(SYS_close_range, 3, ~0u, 0) || errno == ENOSYS);
    end();
}

static const struct mode MODES[] = {
    {"set-user", set_user}, {"user-namespace", user_namespace}, {"pid-namespace", pid_namespace},
    {"net-namespace", net_namespace}, {"root", empty_root}, {"undumpable", undumpable},
    {"filtered", filtered}, {"strict", strict}, {"few-files", few_files},
    {"close-all", close_all}, {0},
};

int main(int argc, char **argv) { return run_mode(MODES, argc, argv); }
