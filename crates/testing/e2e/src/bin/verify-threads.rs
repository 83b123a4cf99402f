//! Threads that write and verify memory of their own at random, and hand pages to each other.
//!
//! `verify-threads THREADS PAGES MILLISECONDS`: pages are per thread; the time is the least that it
//! runs. Without the time it runs until its standard input ends. Threads also grow, shrink and free
//! memory, so mappings come, move and go.

use hecaton_e2e::{Checked, Random, number_argument};
use std::{
    io::Read as _,
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// Pages of a piece that goes from thread to thread.
const PARCEL_PAGES: usize = 64;

/// Steps between two looks at the clock.
const STEPS: usize = 256;

static INPUT_ENDED: AtomicBool = AtomicBool::new(false);

fn main() {
    let threads = number_argument(1);
    let pages = number_argument(2);
    let start = Instant::now();
    let least = std::env::args().nth(3).map(|_| Duration::from_millis(number_argument(3) as u64));
    if least.is_none() {
        thread::spawn(|| {
            let mut rest = [0; 64];
            while std::io::stdin().read(&mut rest).is_ok_and(|count| count > 0) {}
            INPUT_ENDED.store(true, Ordering::Relaxed);
        });
    }
    let is_time = move || match least {
        Some(least) => start.elapsed() >= least,
        None => INPUT_ENDED.load(Ordering::Relaxed),
    };

    // A ring: each thread verifies what its neighbour sends, writes to it, and sends it on.
    let (senders, receivers): (Vec<_>, Vec<_>) = (0..threads).map(|_| mpsc::channel()).unzip();
    for (owner, sender) in senders.iter().enumerate() {
        sender.send(Checked::new(1000 + owner as u64, PARCEL_PAGES)).expect("receivers exist");
    }
    let mut next: Vec<_> = senders.into_iter().map(Some).collect();
    next.rotate_left(1 % threads);

    let workers: Vec<_> = receivers
        .into_iter()
        .zip(next)
        .enumerate()
        .map(|(owner, (receiver, sender))| {
            thread::spawn(move || {
                let sender = sender.expect("each is taken once");
                let mut random = Random(owner as u64);
                let mut memory = Checked::new(owner as u64, pages);
                let mut steps = 0;
                loop {
                    for _ in 0..STEPS {
                        let page = random.below(memory.pages());
                        match random.below(3) {
                            0 => memory.write(page),
                            _ => memory.verify(page),
                        }
                    }
                    steps += STEPS;
                    match random.below(64) {
                        0 => memory.grow(pages / 8 + 1),
                        1 => memory.shrink(pages / 2 + 1),
                        2 if memory.pages() < pages => memory.grow(pages - memory.pages()),
                        _ => {}
                    }
                    if let Ok(mut parcel) = receiver.try_recv() {
                        parcel.verify_all();
                        parcel.write(random.below(PARCEL_PAGES));
                        // The neighbour may have finished: then the parcel ends here.
                        let _ = sender.send(parcel);
                    }
                    if is_time() && steps >= pages {
                        memory.verify_all();
                        return steps;
                    }
                }
            })
        })
        .collect();
    let mut steps = 0;
    for worker in workers {
        // A panic has been told on the standard error already.
        steps += worker.join().unwrap_or_else(|_| std::process::exit(1));
    }
    println!("verified after {steps} steps");
}
