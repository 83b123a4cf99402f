//! Forks all the time, from several threads at once.
//!
//! `fork-storm THREADS PAGES FORKS`: each thread has PAGES of its own, writes to some, and forks;
//! the child verifies all of them and writes, and each fourth child has one of its own.

use hecaton_e2e::{Checked, Random, number_argument};
use std::thread;

fn main() {
    let (threads, pages, forks) = (number_argument(1), number_argument(2), number_argument(3));
    let running: Vec<_> =
        (0..threads).map(|number| thread::spawn(move || storm(number, pages, forks))).collect();
    running.into_iter().for_each(|thread| thread.join().expect("a thread has panicked"));
    println!("verified in {} children", threads * forks);
}

fn storm(number: usize, pages: usize, forks: usize) {
    let mut memory = Checked::new(number as u64, pages);
    let mut random = Random(number as u64);
    (0..pages).for_each(|page| memory.write(page));
    for fork in 0..forks {
        for _ in 0..pages / 16 {
            memory.write(random.below(pages));
        }
        let child = fork_and(|| {
            memory.verify_all();
            memory.write(fork % pages);
            if fork % 4 == 0 {
                wait_for(fork_and(|| {
                    memory.verify_all();
                }));
            }
            memory.verify_all();
        });
        memory.write(random.below(pages));
        wait_for(child);
    }
    memory.verify_all();
}

fn fork_and(in_child: impl FnOnce()) -> libc::pid_t {
    // SAFETY: the child does nothing that takes a lock, unless it fails.
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork: {}", std::io::Error::last_os_error()),
        0 => {
            in_child();
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        child => child,
    }
}

fn wait_for(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(waited == child, "cannot wait: {}", std::io::Error::last_os_error());
    assert!(status == 0, "child {child} ended with wait status {status:#x}");
}
