//! Maps much more than it uses: `large-mapping BYTES PLACES`.
//!
//! A mapping and an allocation of that size are written to at so many places far apart, and read
//! back.

use hecaton_e2e::{Random, number_argument};
use std::alloc::{Layout, alloc, dealloc};
use std::io::Error;

fn main() {
    let (len, places) = (number_argument(1), number_argument(2));
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        println!("mmap: {}", Error::last_os_error());
        return;
    }
    use_and_compare(at.cast(), len, places, 1);
    // SAFETY: the mapping just made, which is not used any more.
    assert_eq!(unsafe { libc::munmap(at, len) }, 0);

    let layout = Layout::from_size_align(len, 16).expect("a size");
    // SAFETY: the size is not zero.
    let at = unsafe { alloc(layout) };
    assert!(!at.is_null(), "the allocator has nothing of that size");
    use_and_compare(at, len, places, 2);
    // SAFETY: allocated just now, with the same layout.
    unsafe { dealloc(at, layout) };
    println!("verified");
}

fn use_and_compare(at: *mut u8, len: usize, places: usize, seed: u64) {
    let part = len / places / 8;
    let words = || {
        let mut random = Random(seed);
        (0..places).map(move |place| {
            // SAFETY: within the memory, which is aligned for words.
            let word = unsafe { at.cast::<u64>().add(part * place + random.below(part)) };
            (word, random.next())
        })
    };
    // SAFETY: as above.
    words().for_each(|(word, value)| unsafe { word.write_volatile(value) });
    // SAFETY: as above.
    assert!(words().all(|(word, value)| unsafe { word.read_volatile() } == value));
}
