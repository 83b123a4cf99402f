//! A child is stopped (SIGSTOP) with its memory in the way of its parent's: the parent must go on,
//! and the child's memory must leave.
//!
//! `stopped-child PAGES`: each of the two has as many pages. The child verifies its own when it is
//! continued. Prints the share of the child's resident memory that has left meanwhile, in percent.

use hecaton_e2e::{Checked, fork_and, number_argument, wait_for};
use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
};

fn filled(owner: u64, pages: usize) -> Checked {
    let mut memory = Checked::new(owner, pages);
    (0..pages).for_each(|page| memory.write(page));
    memory
}

fn resident_pages(child: libc::pid_t) -> usize {
    let statm = std::fs::read_to_string(format!("/proc/{child}/statm")).expect("it is there");
    statm.split(' ').nth(1).expect("two numbers").parse().expect("a number")
}

fn stop(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: a child that was not waited for; `status` is a valid place for the result.
    let waited = unsafe {
        assert_eq!(libc::kill(child, libc::SIGSTOP), 0);
        libc::waitpid(child, &raw mut status, libc::WUNTRACED)
    };
    assert!(waited == child && libc::WIFSTOPPED(status), "{status:#x}");
}

fn main() {
    let pages = number_argument(1);
    let (mut ours, mut theirs) = UnixStream::pair().expect("a socket pair");
    let mut byte = [0];
    let child = fork_and(|| {
        let memory = filled(2, pages);
        theirs.write_all(&byte).expect("the parent is there");
        theirs.read_exact(&mut byte).expect("the parent is there");
        memory.verify_all();
    });
    ours.read_exact(&mut byte).expect("the child is there");
    stop(child);

    let before = resident_pages(child);
    let memory = filled(1, pages);
    memory.verify_all();
    let left = before.saturating_sub(resident_pages(child)) * 100 / before;
    // SAFETY: a child that was not waited for.
    assert_eq!(unsafe { libc::kill(child, libc::SIGCONT) }, 0);
    ours.write_all(&byte).expect("the child is there");
    wait_for(child);
    memory.verify_all();
    println!("verified, {left} percent left");
}
