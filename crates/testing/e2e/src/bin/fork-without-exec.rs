//! Forks, and goes on in the child without exec: both must see memory as of the fork, and each only
//! its own writes afterwards.
//!
//! `fork-without-exec PAGES CHILDREN`: children run at the same time, and each forks a grandchild.

use hecaton_e2e::{Checked, Random, fork_and, number_argument, wait_for};

fn main() {
    let (pages, children) = (number_argument(1), number_argument(2));
    let mut memory = Checked::new(1, pages);
    (0..pages).for_each(|page| memory.write(page));

    let running: Vec<_> = (0..children)
        .map(|child| {
            let id = fork_and(|| {
                change(&mut memory, child as u64);
                let grandchild = fork_and(|| change(&mut memory, !child as u64));
                change(&mut memory, child as u64 + 1);
                wait_for(grandchild);
            });
            // The parent writes on while the child still reads what was there at the fork.
            change(&mut memory, child as u64 + 2);
            id
        })
        .collect();
    running.into_iter().for_each(wait_for);
    memory.verify_all();
    println!("verified in {} processes", 1 + 2 * children);
}

/// Writes to half of the pages, in random order, and verifies all of them.
fn change(memory: &mut Checked, seed: u64) {
    let mut random = Random(seed);
    for _ in 0..memory.pages() / 2 {
        memory.write(random.below(memory.pages()));
    }
    memory.verify_all();
}
