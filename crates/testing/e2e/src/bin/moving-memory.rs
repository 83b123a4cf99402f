//! One thread moves a range of memory to and fro (`mremap`) while others' memory pushes it out.
//!
//! `moving-memory MILLISECONDS`: every page of the range has its own number, and all of them are
//! compared at the end.

use hecaton_e2e::number_argument;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const PAGE: usize = 4096;

/// Pages that move.
const MOVING: usize = 1000;

/// Pages that others touch meanwhile: more than may be local.
const OTHERS: usize = 8000;

fn map(pages: usize) -> *mut u8 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    at.cast()
}

fn main() {
    let least = Duration::from_millis(number_argument(1) as u64);
    let start = Instant::now();
    let mut at = map(MOVING);
    for page in 0..MOVING {
        // SAFETY: within the mapping.
        unsafe { at.add(page * PAGE).cast::<u64>().write(page as u64 + 1) };
    }

    let over = AtomicBool::new(false);
    let moves = thread::scope(|scope| {
        scope.spawn(|| {
            let mut others = vec![0_u8; OTHERS * PAGE];
            let mut round = 0_u8;
            while start.elapsed() < least {
                round = round.wrapping_add(1);
                others.iter_mut().step_by(PAGE).for_each(|byte| *byte = round);
            }
            over.store(true, Ordering::Release);
        });
        let mut moves = 0;
        while !over.load(Ordering::Acquire) {
            let to = map(MOVING);
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            let len = MOVING * PAGE;
            // SAFETY: both are mappings of this program's, and the old address is not used again.
            let moved = unsafe { libc::mremap(at.cast(), len, len, flags, to) };
            assert_eq!(moved, to.cast(), "{}", std::io::Error::last_os_error());
            at = to;
            moves += 1;
            thread::sleep(Duration::from_micros(200));
        }
        moves
    });

    // SAFETY: within the mapping, which nothing moves any more.
    let found = |page: usize| unsafe { at.add(page * PAGE).cast::<u64>().read() };
    let wrong = (0..MOVING).filter(|&page| found(page) != page as u64 + 1).count();
    assert_eq!(wrong, 0, "of {MOVING} pages, after {moves} moves");
    println!("verified after {moves} moves");
}
