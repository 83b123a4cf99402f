//! Forks all the time, from several threads at once.
//!
//! `fork-storm THREADS PAGES FORKS`: each thread has PAGES of its own, writes to some, and forks;
//! the child verifies all of them and writes, and each fourth child has one of its own.

use hecaton_e2e::{Checked, Random, fork_and, number_argument, wait_for};
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
