//! Serves faults of its own memory: half of it has contents that other memory has pushed out, half
//! was never used and is filled by a thread of this program.

use hecaton_e2e::Checked;
use hecaton_uffd::{Uffd, abi::*};
use std::{io::Error, ptr};

const PAGE: usize = 4096;

/// Pages of the memory; the first half is used before it is registered.
const PAGES: usize = 2048;

/// Pages of other memory.
const OTHERS: usize = 12_000;

const LEN: usize = PAGES * PAGE;

/// The first word of a page that was used before. No zero: a page of zeros counts as never used.
const fn used(page: usize) -> u64 {
    1 + page as u64
}

/// The program puts this in the first word of a page that faults.
const fn filling(page: usize) -> u64 {
    0x5eed_0000 + page as u64
}

fn map(len: usize) -> *mut u8 {
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, -1, 0) };
    assert_ne!(at, libc::MAP_FAILED, "{}", Error::last_os_error());
    at.cast()
}

/// By libc, as other programs do.
fn register(uffd: Uffd, memory: *mut u8) {
    let range = UffdioRange { start: memory as u64, len: LEN as u64 };
    let mut request = UffdioRegister { range, mode: UFFDIO_REGISTER_MODE_MISSING, ioctls: 0 };
    // SAFETY: the structure is that of the request.
    let result = unsafe { libc::ioctl(uffd.0, UFFDIO_REGISTER, &raw mut request) };
    assert_eq!(result, 0, "{}", Error::last_os_error());
}

fn serve(uffd: Uffd, memory: usize) {
    let mut page = vec![0u64; PAGE / 8];
    loop {
        let mut polled = libc::pollfd { fd: uffd.0, events: libc::POLLIN, revents: 0 };
        let mut messages = [UffdMsg::default()];
        // SAFETY: one structure, and one message.
        let read = unsafe {
            libc::poll(&raw mut polled, 1, -1);
            libc::read(uffd.0, messages.as_mut_ptr().cast(), size_of::<UffdMsg>())
        };
        if read <= 0 {
            continue;
        }
        let at = messages[0].arg1 as usize & !(PAGE - 1);
        page[0] = filling((at - memory) / PAGE);
        // A page that another fault has filled is there already.
        let _ = uffd.copy(at as u64, page.as_ptr().cast(), PAGE as u64, 0);
    }
}

fn main() {
    let memory = map(LEN);
    let word = |page: usize| {
        // SAFETY: within the mapping.
        unsafe { &mut *memory.add(page * PAGE).cast::<u64>() }
    };
    (0..PAGES / 2).for_each(|page| *word(page) = used(page));
    let mut others = Checked::new(1, OTHERS);
    (0..OTHERS).for_each(|page| others.write(page));

    let uffd = Uffd::open().expect("userfaultfd is permitted");
    uffd.api(0).expect("the kernel has it");
    register(uffd, memory);
    let start = memory as usize;
    std::thread::spawn(move || serve(uffd, start));
    (0..OTHERS).for_each(|page| others.write(page));
    assert!((0..PAGES / 2).all(|page| *word(page) == used(page)), "what was there before");
    assert!((PAGES / 2..PAGES).all(|page| *word(page) == filling(page)), "what it serves");
    others.verify_all();
    println!("verified");
}
