//! Locks memory in each way, and prints what came of it: `locked-memory MEBIBYTES`.

use hecaton_e2e::number_argument;
use std::io::Error;

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// Bytes of mappings that are made while memory to come is locked.
const LATER: usize = 4 * MIB;

fn told(what: &str, result: libc::c_int) {
    match result {
        0 => println!("{what}: done"),
        _ => println!("{what}: {}", Error::last_os_error()),
    }
}

fn map(len: usize, extra: libc::c_int) -> Result<*mut u8, Error> {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | extra);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(Error::last_os_error()) } else { Ok(at.cast()) }
}

fn resident_pages(at: *mut u8, len: usize) -> usize {
    let mut pages = vec![0u8; len / PAGE];
    // SAFETY: a byte for each page.
    assert_eq!(unsafe { libc::mincore(at.cast(), len, pages.as_mut_ptr()) }, 0);
    pages.iter().filter(|page| **page & 1 == 1).count()
}

/// Makes a mapping, and says how much of it is there.
fn map_later(what: &str, len: usize) {
    match map(len, 0) {
        Ok(at) => {
            println!("{what}: {} of {} pages", resident_pages(at, len), len / PAGE);
            // SAFETY: the mapping just made.
            assert_eq!(unsafe { libc::munmap(at.cast(), len) }, 0);
        }
        Err(error) => println!("{what}: {error}"),
    }
}

fn main() {
    let len = number_argument(1) * MIB;
    let at = map(len, 0).expect("there is room");
    let word = |page: usize| {
        // SAFETY: within the mapping.
        unsafe { &mut *at.add(page * PAGE).cast::<usize>() }
    };
    (0..len / PAGE).for_each(|page| *word(page) = page);
    // SAFETY: these lock or unlock memory of this program.
    unsafe {
        told("mlock", libc::mlock(at.cast(), len));
        told("once more", libc::mlock(at.cast(), len));
        told("munlock", libc::munlock(at.cast(), len));
        told("mlock2", libc::mlock2(at.cast(), len, libc::MLOCK_ONFAULT as libc::c_uint));
        told("munlock", libc::munlock(at.cast(), len));
        told("mlockall, present", libc::mlockall(libc::MCL_CURRENT));
        told("mlockall, to come", libc::mlockall(libc::MCL_FUTURE));
        map_later("to come", LATER);
        map_later("to come, large", len);
        told("munlockall", libc::munlockall());
        let all = libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT;
        told("mlockall, all as it is touched", libc::mlockall(all));
        map_later("as it is touched", LATER);
        told("munlockall", libc::munlockall());
        told("nothing", libc::mlockall(libc::MCL_ONFAULT));
    }
    let brought_in = map(LATER, libc::MAP_POPULATE).expect("there is room");
    println!("brought in: {} pages", resident_pages(brought_in, LATER));
    assert!((0..len / PAGE).all(|page| *word(page) == page));
    println!("verified");
}
