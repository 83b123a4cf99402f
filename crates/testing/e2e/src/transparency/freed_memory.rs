//! Gives memory back lazily (`MADV_FREE`), and uses it again: `freed-memory ROUNDS`.

use hecaton_e2e::number_argument;
use std::io::Error;

const LEN: usize = 200 << 20;

fn main() {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), LEN, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", Error::last_os_error());
    let word = |page: usize| {
        // SAFETY: within the mapping.
        unsafe { &mut *at.cast::<u8>().add(page * 4096).cast::<usize>() }
    };
    for round in 0..number_argument(1) {
        (0..LEN / 4096).for_each(|page| *word(page) = page + round);
        assert!((0..LEN / 4096).all(|page| *word(page) == page + round), "round {round}");
        // SAFETY: what was there is not needed any more.
        assert_eq!(unsafe { libc::madvise(at, LEN, libc::MADV_FREE) }, 0);
    }
    println!("verified");
}
