//! Memory comes to where other memory has just left, before whoever moved that is told so: one
//! thread moves a block away, and another, which sees the hole, moves a second block into it.
//!
//! `trading-places MILLISECONDS [shared]`: meanwhile a third thread's memory pushes both out. Every
//! page of the blocks has its own number, and all of them are compared again and again. `shared`:
//! with a child that has all of it, too, and does nothing.

use hecaton_e2e::number_argument;
use std::{
    sync::{
        Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

const PAGE: usize = 4096;

/// Pages of a block.
const BLOCK: usize = 64;

/// Blocks that one thread moves, and as many that the other does.
const BLOCKS: usize = 16;

/// Pages that others touch meanwhile: more than may be local.
const OTHERS: usize = 5000;

/// Between two looks at all pages.
const TRADES: usize = 400;

fn map(pages: usize) -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    at as usize
}

fn is_hole(at: usize) -> bool {
    let mut here = 0_u8;
    // SAFETY: one byte for one page.
    unsafe { libc::mincore(at as *mut libc::c_void, PAGE, &raw mut here) != 0 }
}

fn move_to(from: usize, to: usize) {
    let (len, flags) = (BLOCK * PAGE, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    // SAFETY: the block is this program's, and nothing is where it goes.
    let moved = unsafe { libc::mremap(from as *mut _, len, len, flags, to) };
    assert_eq!(moved as usize, to, "{}", std::io::Error::last_os_error());
}

/// A block, and the number of its first page.
struct Block {
    at: usize,
    first: usize,
}

impl Block {
    fn page(&self, page: usize) -> *mut usize {
        (self.at + page * PAGE) as *mut usize
    }

    fn fill(&self) {
        // SAFETY: within the block, which only this thread moves.
        (0..BLOCK).for_each(|page| unsafe { self.page(page).write(self.first + page) });
    }

    fn verify(&self, trades: usize) {
        for page in 0..BLOCK {
            // SAFETY: as above.
            let found = unsafe { self.page(page).read() };
            assert_eq!(found, self.first + page, "page {page} at {:#x}, {trades} trades", self.at);
        }
    }
}

/// A child that waits to be killed.
struct Idle(libc::pid_t);

impl Idle {
    fn fork() -> Idle {
        // SAFETY: the child does nothing but wait.
        match unsafe { libc::fork() } {
            // SAFETY: as above. A program that has failed does not leave it behind.
            0 => unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            },
            child => {
                assert!(child > 0, "{}", std::io::Error::last_os_error());
                Idle(child)
            }
        }
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        // SAFETY: this process's child, which was not waited for yet.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, std::ptr::null_mut(), 0);
        }
    }
}

fn main() {
    // The other threads would wait for ever for one that has ended.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(1);
    }));
    let least = Duration::from_millis(number_argument(1) as u64);
    let is_shared = std::env::args().nth(2).is_some_and(|word| word == "shared");
    let start = Instant::now();
    // Room for all blocks, and for one more.
    let places = map((2 * BLOCKS + 1) * BLOCK);
    let place = |number: usize| places + number * BLOCK * PAGE;
    let block = |number: usize| Block { at: place(number), first: 1 + number * BLOCK };
    let mut ours: Vec<Block> = (0..BLOCKS).map(block).collect();
    let mut theirs: Vec<Block> = (BLOCKS..2 * BLOCKS).map(block).collect();
    ours.iter().chain(&theirs).for_each(Block::fill);

    // The hole must be no other's: threads map memory when they start.
    let started = Barrier::new(3);
    let over = AtomicBool::new(false);
    // Where a hole is about to be, and where the second thread has left one for it; 0: not yet.
    let (leaving, left) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let trades = thread::scope(|scope| {
        scope.spawn(|| {
            let mut others = vec![0_u8; OTHERS * PAGE];
            started.wait();
            let mut round = 0_u8;
            while !over.load(SeqCst) {
                round = round.wrapping_add(1);
                others.iter_mut().step_by(PAGE).for_each(|byte| *byte = round);
            }
        });
        scope.spawn(|| {
            started.wait();
            for turn in 0.. {
                let hole = loop {
                    match leaving.load(SeqCst) {
                        _ if over.load(SeqCst) => return,
                        0 => std::hint::spin_loop(),
                        hole => break hole,
                    }
                };
                while !is_hole(hole) {
                    std::hint::spin_loop();
                }
                let block = &mut theirs[turn % BLOCKS];
                move_to(block.at, hole);
                let before = std::mem::replace(&mut block.at, hole);
                block.verify(turn);
                leaving.store(0, SeqCst);
                left.store(before, SeqCst);
            }
        });
        started.wait();
        let mut free = place(2 * BLOCKS);
        // SAFETY: nothing is there yet.
        unsafe { libc::munmap(free as *mut _, BLOCK * PAGE) };
        let (mut trades, mut child) = (0, None);
        while start.elapsed() < least {
            let block = &mut ours[trades % BLOCKS];
            leaving.store(block.at, SeqCst);
            move_to(block.at, free);
            block.at = free;
            free = loop {
                match left.swap(0, SeqCst) {
                    0 => std::hint::spin_loop(),
                    place => break place,
                }
            };
            trades += 1;
            if trades % TRADES == 0 {
                ours.iter().for_each(|block| block.verify(trades));
                // Clean pages and dirty ones leave by different ways.
                ours.iter().step_by(2).for_each(Block::fill);
                drop(child.take());
                child = is_shared.then(Idle::fork);
            }
        }
        over.store(true, SeqCst);
        trades
    });
    ours.iter().chain(&theirs).for_each(|block| block.verify(trades));
    println!("verified after {trades} trades");
}
