//! Forbids itself to touch every eighth page (PROT_NONE), and needs the memory that is local for
//! others.

use hecaton_e2e::Checked;
use std::io::Error;

const PAGE: usize = 4096;

/// 62 MiB.
const PAGES: usize = 16_000;

/// Pages of other memory.
const OTHERS: usize = 12_000;

fn main() {
    let writable = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), PAGES * PAGE, writable, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", Error::last_os_error());
    let page = |page: usize| at.cast::<u8>().wrapping_add(page * PAGE);
    // SAFETY: within the mapping, while it may be touched.
    let word = |number: usize| unsafe { &mut *page(number).cast::<usize>() };
    let protect = |protection| {
        for guard in (0..PAGES).step_by(8) {
            // SAFETY: a page of the mapping, which is touched only where that is allowed.
            assert_eq!(unsafe { libc::mprotect(page(guard).cast(), PAGE, protection) }, 0);
        }
    };
    let mut others = Checked::new(1, OTHERS);
    for round in 0..3 {
        (0..PAGES).for_each(|page| *word(page) = page + round);
        protect(libc::PROT_NONE);
        (0..OTHERS).for_each(|page| others.write(page));
        others.verify_all();
        let touchable = (0..PAGES).filter(|page| page % 8 != 0);
        touchable.for_each(|page| assert_eq!(*word(page), page + round, "round {round}"));
        protect(writable);
        (0..PAGES).for_each(|page| assert_eq!(*word(page), page + round, "round {round}"));
    }
    println!("verified");
}
