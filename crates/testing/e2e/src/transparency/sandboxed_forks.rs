//! Forks where the child hardly reaches the pager:
//! `sandboxed-forks seccomp|killed|user|chroot|files`.
//!
//! The first forbids system calls by a filter, the second is killed when it makes them, the third
//! gives up the user, the fourth leaves all files behind, the fifth shares descriptors with its
//! child. All memory of the parent must be in the child, and in its child.

use hecaton_e2e::{Checked, fork_and, wait_for};
use std::io::Error;

/// 47 MiB.
const PAGES: usize = 12_000;

const NOBODY: libc::c_long = 65534;

fn main() {
    let kind = std::env::args().nth(1).expect("a kind");
    let mut memory = Checked::new(1, PAGES);
    (0..PAGES).for_each(|page| memory.write(page));
    match kind.as_str() {
        "seccomp" => forbid(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        "killed" => forbid(libc::SECCOMP_RET_KILL_PROCESS),
        // SAFETY: numbers only. The system call itself, which changes one thread.
        "user" => assert_eq!(unsafe { libc::syscall(libc::SYS_setuid, NOBODY) }, 0),
        // SAFETY: a C string.
        "chroot" => assert_eq!(unsafe { libc::chroot(c"/usr/share".as_ptr()) }, 0),
        "files" => {}
        other => panic!("no kind is called {other}"),
    }
    for round in 0..3 {
        let child = match kind.as_str() {
            "files" => with_shared_descriptors(|| in_child(&mut memory, round)),
            _ => fork_and(|| in_child(&mut memory, round)),
        };
        // The parent writes meanwhile: its writes must not reach the child.
        (0..PAGES).step_by(3).for_each(|page| memory.write(page));
        wait_for(child);
        memory.verify_all();
    }
    println!("verified");
}

fn in_child(memory: &mut Checked, round: usize) {
    memory.verify_all();
    (0..PAGES).step_by(round + 1).for_each(|page| memory.write(page));
    let mut more = Checked::new(2, PAGES / 4);
    (0..PAGES / 4).for_each(|page| more.write(page));
    wait_for(fork_and(|| {
        memory.verify_all();
        more.verify_all();
    }));
    memory.verify_all();
}

fn with_shared_descriptors(child: impl FnOnce()) -> libc::pid_t {
    let flags = libc::c_long::from(libc::CLONE_FILES | libc::SIGCHLD);
    // SAFETY: without a stack of its own the child is a copy, as after fork; this program has one
    // thread.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) };
    assert!(pid >= 0, "{}", Error::last_os_error());
    if pid == 0 {
        child();
        std::process::exit(0);
    }
    pid as libc::pid_t
}

/// Has the kernel answer system calls that this program does not make so from now on, children's
/// too.
fn forbid(refusal: u32) {
    let calls = [
        libc::SYS_socket,
        libc::SYS_connect,
        libc::SYS_userfaultfd,
        libc::SYS_ioctl,
        libc::SYS_sendmsg,
    ];
    let statement =
        |code: u32, jt: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf: 0, k };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (i, call) in calls.iter().enumerate() {
        let to_refusal = (calls.len() - i) as u8;
        filter.push(statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            to_refusal,
            *call as u32,
        ));
    }
    let result = libc::BPF_RET | libc::BPF_K;
    filter.push(statement(result, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(result, 0, refusal));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: numbers, and a filter that lives across the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let set = libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program);
        assert_eq!(set, 0, "{}", Error::last_os_error());
    }
}
