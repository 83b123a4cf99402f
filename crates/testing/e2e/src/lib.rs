//! Gives test programs pages whose contents tell where they belong, and forks.
//!
//! The test programs know nothing of Hecaton. Each word of a page depends on the page's owner, its
//! place, and how often it was written. So the next reader finds a page that is lost, stale, torn
//! or swapped with another page.

use std::io::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// 64-bit words in a page.
pub const PAGE_WORDS: usize = 512;

/// A sequence of random numbers (Vigna's splitmix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `end`.
    pub const fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

const fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Memory that is checked as it is used.
#[derive(Debug)]
pub struct Checked {
    owner: u64,
    words: Vec<u64>,
    generations: Vec<u32>,
}

impl Checked {
    /// Pages that were never written, of generation 0: they must read as zeros.
    pub fn new(owner: u64, pages: usize) -> Self {
        Self { owner, words: vec![0; pages * PAGE_WORDS], generations: vec![0; pages] }
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.generations.len()
    }

    fn word(&self, page: usize, at: usize) -> u64 {
        match self.generations[page] {
            0 => 0,
            generation => {
                mix(self.owner ^ mix((page as u64) << 32 | u64::from(generation)) ^ at as u64)
            }
        }
    }

    /// Writes the page's next generation.
    pub fn write(&mut self, page: usize) {
        self.generations[page] += 1;
        for at in 0..PAGE_WORDS {
            self.words[page * PAGE_WORDS + at] = self.word(page, at);
        }
    }

    /// Compares every word of the page.
    ///
    /// # Panics
    /// If a word is not the one that was last written there.
    pub fn verify(&self, page: usize) {
        for at in 0..PAGE_WORDS {
            let (found, expected) = (self.words[page * PAGE_WORDS + at], self.word(page, at));
            assert!(
                found == expected,
                "owner {:x}: word {at} of page {page} is {found:x} instead of {expected:x} \
                 (generation {})",
                self.owner,
                self.generations[page]
            );
        }
    }

    /// Compares all pages.
    pub fn verify_all(&self) {
        (0..self.pages()).for_each(|page| self.verify(page));
    }

    /// Adds pages at the end; the allocator moves the existing pages (`mremap`).
    pub fn grow(&mut self, pages: usize) {
        let pages = self.pages() + pages;
        self.words.resize(pages * PAGE_WORDS, 0);
        self.generations.resize(pages, 0);
    }

    /// Keeps the first `pages` pages, and frees the memory of the others.
    pub fn shrink(&mut self, pages: usize) {
        self.words.truncate(pages * PAGE_WORDS);
        self.words.shrink_to_fit();
        self.generations.truncate(pages);
    }
}

/// Forks; the child runs `in_child` and exits.
///
/// # Panics
/// If it cannot fork.
pub fn fork_and(in_child: impl FnOnce()) -> libc::pid_t {
    // SAFETY: the child takes no lock that another thread may have held, unless it fails.
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork: {}", Error::last_os_error()),
        0 => {
            // If the last thread of a process panics and is not the first thread, the process exits
            // with success.
            let failed = catch_unwind(AssertUnwindSafe(in_child)).is_err();
            // SAFETY: ends the process.
            unsafe { libc::_exit(failed.into()) };
        }
        child => child,
    }
}

/// Waits until the child has ended.
///
/// # Panics
/// If the child failed.
pub fn wait_for(child: libc::pid_t) {
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert!(waited == child, "cannot wait: {}", Error::last_os_error());
    assert!(status == 0, "child {child} ended with wait status {status:#x}");
}

/// The argument at this place as a number.
///
/// # Panics
/// If it is missing or no number: the tests are the only callers.
pub fn number_argument(place: usize) -> usize {
    let argument =
        std::env::args().nth(place).unwrap_or_else(|| panic!("argument {place} is missing"));
    argument.parse().unwrap_or_else(|_| panic!("argument {place} is no number: {argument}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_child_of_a_thread_that_fails_is_noticed() {
        let ends = |in_child: fn()| thread::spawn(move || wait_for(fork_and(in_child))).join();
        ends(|| {}).expect("it ended well");
        // Without a panic message: another test's thread may hold a lock that the message needs.
        ends(|| std::panic::resume_unwind(Box::new(()))).expect_err("it failed");
    }

    #[test]
    fn a_changed_word_is_found() {
        let mut memory = Checked::new(7, 4);
        memory.verify_all();
        memory.write(2);
        memory.verify_all();
        memory.words[2 * PAGE_WORDS + 511] ^= 1;
        assert!(std::panic::catch_unwind(|| memory.verify_all()).is_err());
    }

    #[test]
    fn a_page_of_an_older_generation_is_found() {
        let mut memory = Checked::new(7, 1);
        memory.write(0);
        let old = memory.words.clone();
        memory.write(0);
        memory.words = old;
        assert!(std::panic::catch_unwind(|| memory.verify_all()).is_err());
    }
}
