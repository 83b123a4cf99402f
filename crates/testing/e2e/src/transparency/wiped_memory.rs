//! Forks with memory that its children must find empty (`MADV_WIPEONFORK`), or not at all
//! (`MADV_DONTFORK`), while other memory pushes both out.

use hecaton_e2e::{Checked, PAGE_WORDS, fork_and, wait_for};
use std::io::Error;

const PAGE: usize = 4096;

/// Pages of each kind.
const PAGES: usize = 2048;

/// Pages of other memory.
const OTHERS: usize = 8_000;

const FORKS: usize = 12;

fn map() -> *mut u64 {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), PAGES * PAGE, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", Error::last_os_error());
    at.cast()
}

/// Advice on some pages, by libc or past it.
fn advise(at: *mut u64, pages: std::ops::Range<usize>, advice: i32, past_libc: bool) {
    let start = at.wrapping_add(pages.start * PAGE_WORDS);
    let len = pages.len() * PAGE;
    // SAFETY: the mapping is this program's, and stays.
    let result = unsafe {
        match past_libc {
            true => libc::syscall(libc::SYS_madvise, start, len, advice),
            false => libc::madvise(start.cast(), len, advice).into(),
        }
    };
    assert_eq!(result, 0, "{}", Error::last_os_error());
}

/// The first word of each page.
fn words(at: *mut u64) -> Vec<u64> {
    // SAFETY: within the mapping.
    (0..PAGES).map(|page| unsafe { at.add(page * PAGE_WORDS).read_volatile() }).collect()
}

fn numbers(from: u64) -> Vec<u64> {
    (0..PAGES as u64).map(|page| from + page).collect()
}

fn write(at: *mut u64, from: u64) {
    for (page, number) in numbers(from).into_iter().enumerate() {
        // SAFETY: within the mapping.
        unsafe { at.add(page * PAGE_WORDS).write_volatile(number) };
    }
}

fn is_mapped(at: *mut u64) -> bool {
    let mut pages = [0u8; PAGES];
    // SAFETY: a byte for each page.
    unsafe { libc::mincore(at.cast(), PAGES * PAGE, pages.as_mut_ptr()) == 0 }
}

fn main() {
    let past_libc = std::env::args().nth(1).is_some_and(|how| how == "syscall");
    let (wiped, kept) = (map(), map());
    let mut others = Checked::new(1, OTHERS);
    advise(wiped, 0..PAGES, libc::MADV_WIPEONFORK, past_libc);
    // The second half is as any other memory again.
    advise(wiped, PAGES / 2..PAGES, libc::MADV_KEEPONFORK, past_libc);
    advise(kept, 0..PAGES, libc::MADV_DONTFORK, false);
    for round in 0..FORKS {
        let number = 1 + round as u64 * PAGES as u64;
        write(wiped, number);
        write(kept, number);
        // From nothing to all of it is in the pool at the fork, by way of staging.
        (0..OTHERS * round / (FORKS - 1)).for_each(|page| others.write(page));
        wait_for(fork_and(|| {
            let mut expected = numbers(number);
            expected[..PAGES / 2].fill(0);
            assert_eq!(words(wiped), expected, "fork {round}");
            assert!(!is_mapped(kept), "fork {round}");
            // It is its own from here on, and for its own children wiped again.
            write(wiped, 7);
            wait_for(fork_and(|| {
                let mut expected = numbers(7);
                expected[..PAGES / 2].fill(0);
                assert_eq!(words(wiped), expected, "a child's child, fork {round}");
            }));
            assert_eq!(words(wiped), numbers(7));
        }));
        assert_eq!(words(wiped), numbers(number));
        assert_eq!(words(kept), numbers(number));
    }
    others.verify_all();
    println!("verified in {FORKS} children");
}
